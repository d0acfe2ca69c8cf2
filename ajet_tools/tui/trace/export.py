"""Data in one keystroke: the chosen episodes to a file, the format and the folder asked once and remembered.

What is done with the episodes that are selected in a list, or with the one under its cursor.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input, Label, ProgressBar, Select, Static

from ajet_sdk.errors import AjetError
from ajet_sdk.reporting.output import visible
from ajet_tools.dataset.similarity.held_out import export_rows
from ajet_tools.trace.export import FORMATS, SUFFIXES, Exported, Format
from ajet_tools.trace.queries.episodes import attempts_of
from ajet_tools.tui.base import Dialog
from ajet_tools.tui.settings import Settings
from ajet_tools.tui.trace.screen import TraceScreen, TraceViewer
from ajet_tools.tui.widgets.listing import ListingTable


class ExportScreen(Dialog[None]):
    """Writes episodes to a file, with progress; escape stops, and then nothing is written.

    Asks for the format and the file the first time, and whenever `asking`; else it writes at once, in the format and to
    the folder of the last time, to a name that is not taken.
    """

    app: TraceViewer
    DEFAULT_CSS = """
    ExportScreen {
        & > Vertical { width: 70; max-width: 95%; max-height: 95%; }
        & Input { background: $boost; }
        & Label { color: $text-muted; }
        & ProgressBar { display: none; margin-top: 1; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Stop, or close", show=False),
        Binding("ctrl+s", "write", "Write", show=False),
    ]

    @dataclass
    class Progress(Message):
        """So many episodes are written."""

        done: int
        of: int

    def __init__(self, episode_ids: Sequence[str], run_id: str = "", *, asking: bool = False) -> None:
        super().__init__()
        self.episode_ids = episode_ids
        self.run_id = run_id
        self.asking = asking
        self._stop = threading.Event()
        self._writing = False
        self._settings = Settings()

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            count = len(self.episode_ids)
            box.border_title = f"export {count:,} {'episode' if count == 1 else 'episodes'}"
            box.border_subtitle = "enter in the file's name writes · esc"
            yield Label("format")
            yield Select[Format]([(name, name) for name in FORMATS], allow_blank=False, compact=True, id="format")
            yield Label("file (secrets and personal data are redacted)")
            yield Input(id="file", select_on_focus=False, compact=True)
            yield Static("", id="wrong", markup=False)
            yield ProgressBar(total=count, show_eta=False)

    def on_mount(self) -> None:
        try:
            self._settings = Settings.load()
        except AjetError as error:
            self.app.show_error(error)
        last: Format | None = next((name for name in FORMATS if name == self._settings.export_format), None)
        self.query_one(Select).value = last or FORMATS[0]
        self.query_one(Input).value = str(self._free_file(last or FORMATS[0]))
        self.query_one(Input).focus()
        if last and not self.asking:
            self.action_write()

    def _free_file(self, format: Format) -> Path:
        """A free name in the last used folder: `episodes-RUN.jsonl`, `episodes-RUN-2.jsonl`."""
        folder = Path(self._settings.export_folder or Path.cwd())
        stem = f"{format}-{self.run_id[:8]}" if self.run_id else format
        number, file = 1, folder / f"{stem}{SUFFIXES[format]}"
        while file.exists():
            number += 1
            file = folder / f"{stem}-{number}{SUFFIXES[format]}"
        return file

    def on_select_changed(self, event: Select.Changed) -> None:
        """Change the suggested name's suffix with the format; a typed name stays."""
        field = self.query_one(Input)
        typed = Path(field.value)
        if typed.suffix in set(SUFFIXES.values()) and not self._writing:
            field.value = str(self._free_file(self._format))

    @property
    def _format(self) -> Format:
        return next(name for name in FORMATS if name == self.query_one(Select).value)

    def on_input_submitted(self) -> None:
        self.action_write()

    def action_write(self) -> None:
        text = self.query_one(Input).value.strip()
        file = Path(text).expanduser()
        if self._writing:
            return
        if not text or file.is_dir():
            self.show_wrong(f"{text or 'this'} is not a file name")
        elif file.exists():
            self.show_wrong(f"{file} already exists; choose another name")
        else:
            self._writing = True
            self._stop.clear()
            self._write(self._format, file)

    @work(group="export")
    async def _write(self, format: Format, file: Path) -> None:
        self.show_wrong("")
        self.query_one(ProgressBar).display = True
        self.query_one(Vertical).border_subtitle = "esc stops"

        def progress(done: int, of: int) -> None:
            self.post_message(self.Progress(done, of))

        try:
            done = await self.app.ask(
                export_rows,
                self.episode_ids,
                format,
                file,
                self.run_id or None,
                trace=self.app.path,
                progress=progress,
                cancelled=self._stop.is_set,
            )
        except (AjetError, OSError) as error:
            self.show_wrong(str(error))
            return
        finally:
            self._writing = False
            self.query_one(ProgressBar).display = False
        self._save_settings(format, file)
        self.notify(describe_export(done), markup=False, timeout=10)
        self.dismiss()

    def _save_settings(self, format: Format, file: Path) -> None:
        try:
            folder = str(file.resolve().parent)
            Settings.load().model_copy(update={"export_format": format, "export_folder": folder}).save()
        except AjetError as error:
            self.app.show_error(error)

    def on_export_screen_progress(self, event: Progress) -> None:
        self.query_one(ProgressBar).update(total=event.of, progress=event.done)

    def on_unmount(self) -> None:
        self._stop.set()

    def action_leave(self) -> None:
        if self._writing:
            self._stop.set()
        else:
            self.dismiss()


def describe_export(done: Exported) -> str:
    """The counts of what was written, redacted and left out."""
    lines = [f"{done.rows:,} rows of {done.episodes:,} episodes as {done.format} in {visible(str(done.path))}"]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in done.redacted.items())
    lines.append(f"{sum(done.redacted.values()):,} values redacted{f' ({kinds})' if kinds else ''}")
    lines += [f"left out: {count:,} {reason}" for reason, count in done.left_out.items()]
    return "\n".join(lines)


_MAX_COMPARED = 16


class SelectionScreen(TraceScreen):
    """A screen with a table of episodes; its subclass says what marks stand beside them."""

    def __init__(self, run_id: str | None) -> None:
        super().__init__()
        self.run_id = run_id

    @property
    def table(self) -> ListingTable:
        return self.query_one(ListingTable)

    def update_marks(self) -> None:
        """Show what is marked now."""
        raise NotImplementedError

    @property
    def all_ids(self) -> Sequence[str]:
        """All that the list has."""
        raise NotImplementedError

    @property
    def selected_ids(self) -> list[str]:
        """The selection in the order of the list, then what isn't listed; without one, the row under the cursor."""
        places, selected = self.table.places, self.table.selected
        if not selected:
            return [self.table.cursor_id] if self.table.cursor_id else []
        return [*sorted(selected & places.keys(), key=lambda id: places[id]), *sorted(selected - places.keys())]

    @work(group="group", exclusive=True)
    async def action_group(self) -> None:
        if (id := self.table.cursor_id) is not None:
            self.app.open_compare((await self.app.ask(attempts_of, id))[:_MAX_COMPARED])

    def action_compare(self) -> None:
        chosen = self.selected_ids
        if len(chosen) == 1 and self.table.cursor_id not in (None, chosen[0]):
            chosen.append(str(self.table.cursor_id))
        if 2 <= len(chosen) <= _MAX_COMPARED:
            self.app.open_compare(chosen)
        else:
            self.notify(f"select 2 to {_MAX_COMPARED} episodes with space (now {len(self.table.selected):,})")

    def action_feedback(self) -> None:
        if (id := self.table.cursor_id) is not None:
            self.app.open_feedback(id)

    def action_copy(self) -> None:
        if chosen := self.selected_ids:
            self.app.copy("\n".join(chosen), chosen[0] if len(chosen) == 1 else f"{len(chosen):,} ids")

    def action_export(self, asking: bool) -> None:
        """The selection; with none, whatever the list shows."""
        if ids := self.selected_ids if self.table.selected else self.all_ids:
            self.app.push_screen(ExportScreen(ids, self.run_id or "", asking=asking))
        else:
            self.notify("there are no episodes to export")
