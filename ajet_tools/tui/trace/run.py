"""Screen of a run: curves, ledger, failures, metrics, config."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import ClassVar

import yaml
from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ItemGrid, VerticalScroll
from textual.widgets import Static, TabbedContent, TabPane

from ajet_sdk.reporting.output import visible
from ajet_sdk.types import now
from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import compact, lasting, number, table
from ajet_tools.trace import queries
from ajet_tools.trace.compare.reasons import reasons
from ajet_tools.trace.compare.verdict import Verdict, verdicts
from ajet_tools.trace.decoding import recorded_config
from ajet_tools.trace.queries.receipts import HERE, TokenReceipt, by_client, client_rows
from ajet_tools.trace.queries.runs import (
    Failure,
    LedgerTotal,
    Panel,
    RunOverview,
    failures_in_words,
    is_constant,
    panels,
    seconds_of,
    steps_of,
    with_shares,
)
from ajet_tools.tui.trace.runs import STATUS_STYLES, VERDICT_STYLES, verdict_text
from ajet_tools.tui.trace.screen import TraceScreen
from ajet_tools.tui.widgets.chart import Chart, sparkline

_VIEWS = ("curves", "ledger", "metrics", "config")
_REASONS = 3
"""Lines of reasons for a verdict; `w` shows all."""


class RunScreen(TraceScreen):
    """Shows one of four views of a run, with live updates."""

    AUTO_FOCUS = "#curves VerticalScroll"
    DEFAULT_CSS = """
    RunScreen #head { height: auto; padding: 0 1; }
    RunScreen TabbedContent, RunScreen ContentSwitcher, RunScreen TabPane { height: 1fr; }
    RunScreen TabPane { padding: 0 1; }
    RunScreen ItemGrid { height: auto; grid-rows: 9; grid-gutter: 0 1; }
    RunScreen Chart { height: 9; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "next_view", "View"),
        Binding("w", "explain", "Why"),
        Binding("e", "episodes", "Episodes"),
        Binding("F", "failed", "Failed"),
        Binding("y", "copy", "Copy id", show=False),
    ]
    PALETTE: ClassVar[Sequence[tuple[str, str]]] = [
        *((f"View: {name}", f"view('{name}')") for name in _VIEWS),
        ("Tasks by steps", "tasks"),
    ]

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id = run_id
        self.run: RunOverview | None = None
        self.verdict: Verdict | None = None
        self.reasons: list[str] = []
        self.panels: list[Panel] = []
        self.title = "runs › …"
        self.sub_title = one_line(run_id, 12)

    def compose_body(self) -> ComposeResult:
        yield Static(id="head")
        with TabbedContent():
            with TabPane("curves", id="curves"), VerticalScroll():
                yield ItemGrid(min_column_width=38)
            for name in _VIEWS[1:]:
                with TabPane(name, id=name), VerticalScroll():
                    yield Static()

    def on_mount(self) -> None:
        self.set_interval(1.0, self._show_head)

    @property
    def view(self) -> str:
        return self.query_one(TabbedContent).active

    async def read(self) -> None:
        matches = await self.app.ask(queries.overview, self.run_id)
        is_first = self.run is None
        self.run = matches[0] if matches else None
        if self.run is not None:
            self.title = f"runs › {one_line(self.run['name'], 40) or 'run'}"
            self.verdict = (await self.app.ask(verdicts, matches))[self.run_id]
            self.reasons = await self.app.ask(reasons, self.run, self.verdict)
        self.panels = await self.app.ask(panels, self.run_id)
        self._show_head()
        await self._show_curves()
        await self._show_view()
        if is_first and self.run is not None and self.is_current:
            is_scored = self.run["status"] == "finished" and self.run["episodes"]
            if is_scored and not self.panels:  # there is nothing else to see of it
                self.action_view("config")
                self.app.open_episodes(self.run_id)

    def _show_head(self) -> None:
        if self.run is not None:
            # metrics stand for a verdict until there are two steps
            head = _head(self.run, self.panels, self.app.size.width - 2)
            if self.verdict is not None and self.verdict.first is not None:
                head = _verdict_head(self.run, self.verdict, self.reasons, self.app.size.width - 4)
            self.query_one("#head", Static).update(head)

    async def _show_curves(self) -> None:
        """Show the curves that vary; the last values of the others are in the metrics."""
        varying = [panel for panel in self.panels if not is_constant(panel)] or self.panels
        grid = self.query_one(ItemGrid)
        charts = list(grid.query(Chart))
        more = [Chart() for _ in range(len(varying) - len(charts))]
        if more:
            await grid.mount(*more)
        for chart, panel in zip([*charts, *more], varying, strict=False):
            chart.show(panel)

    async def _show_view(self) -> None:
        """Fill the view that is shown, if it is text."""
        name = self.view
        width = max(40, self.app.size.width - 4)
        if name == "curves":
            return
        content: RenderableType
        if name == "ledger":
            content = await self._ledger(width)
        elif name == "metrics":
            content = table(_metric_rows(self.panels), width, right=["last", "lowest", "highest"])
        else:
            content = await self._config()
        self.query_one(f"#{name} Static", Static).update(content)

    async def _ledger(self, width: int) -> RenderableType:
        totals = await self.app.ask(queries.ledger_totals, self.run_id)
        failed = await self.app.ask(queries.failures, self.run_id)
        clients = await self.app.ask(by_client, self.run_id)
        return _ledger(totals, failed, clients, width)

    async def _config(self) -> RenderableType:
        config = await self.app.ask(recorded_config, self.run_id)
        if not config:
            return Text("No config is recorded.")
        return Text(visible(yaml.safe_dump(config, sort_keys=False, allow_unicode=True)))

    def action_next_view(self) -> None:
        self.action_view(_VIEWS[(_VIEWS.index(self.view) + 1) % len(_VIEWS)])

    def action_view(self, name: str) -> None:
        self.query_one(TabbedContent).active = name

    async def on_tabbed_content_tab_activated(self) -> None:
        self.query_one(f"#{self.view} VerticalScroll").focus()
        await self._show_view()

    def action_tasks(self) -> None:
        self.app.open_many_runs([self.run_id])

    def action_explain(self) -> None:
        self.app.open_explanation(self.run_id)

    def action_episodes(self) -> None:
        self.app.open_episodes(self.run_id)

    def action_failed(self) -> None:
        if self.run is not None and not self.run["unsound"]:
            self.notify("no episode failed", timeout=2)
        else:
            self.app.open_episodes(self.run_id, "status <> 'succeeded'")

    def action_copy(self) -> None:
        self.app.copy(self.run_id, "the run's id")


def _metric_rows(shown: Sequence[Panel]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for panel in sorted(shown, key=is_constant):
        for curve in panel.curves:
            values = [value for _, value in curve.points]
            rows.append(
                {
                    "metric": one_line(f"{panel.title} {curve.label}".strip(), 40),
                    "curve": sparkline(values, 12),
                    "last": number(values[-1]),
                    "lowest": number(min(values)),
                    "highest": number(max(values)),
                    "step": curve.points[-1][0],
                }
            )
    return rows


def _verdict_head(run: RunOverview, verdict: Verdict, why: Sequence[str], width: int) -> Text:
    """Format status, verdict with rewards, and reasons, one per line."""
    head = _progress(run)
    head.append("\n")
    head.append(verdict_text(run, verdict))
    first = verdict.first
    last = verdict.last
    best = verdict.best
    assert first is not None and last is not None and best is not None
    head.append(f"  {verdict.kind} ")
    head.append(
        f"{first['mean']:.3f} → {last['mean']:.3f}", style=VERDICT_STYLES.get(verdict.word, "bold")
    )
    head.append(f" (step {first['step']} to {last['step']}; best at {best['step']})")
    if run["error"]:
        head.append(f"\n{one_line(run['error'], width)}", style="red")
    lines: list[str] = []
    for reason in why:
        lines += wrap(reason, width, initial_indent="  ", subsequent_indent="    ")
    for line in lines[:_REASONS]:
        head.append(f"\n{visible(line)}")
    return head


def _head(run: RunOverview, shown: list[Panel], width: int) -> Text:
    """Format two lines: status and progress, then the latest metrics or the error."""
    head = _progress(run)
    head.append("\n")
    if run["error"]:
        head.append(one_line(run["error"], width), style="red")
    elif run["unsound"]:
        head.append(f"{run['unsound']:,} failed: {failures_in_words(run, width - 20)}", style="red")
    else:
        last = {panel.title: panel.curves[0].last for panel in shown}
        names = [
            name
            for name in ("reward", "success", "merge ratio", "entropy", "KL", "dollars")
            if name in last
        ]
        head.append(
            "  ".join(f"{name} {number(last[name])}" for name in names) or "no metric yet",
            style="dim",
        )
    return head


def _progress(run: RunOverview) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(one_line(run["name"], 24), style="bold")
    line.append("  ")
    line.append(run["status"], style=STATUS_STYLES.get(run["status"], ""))
    steps = steps_of(run)
    parts = [
        run["backbone"],
        f"step {steps}" if steps else "",
        f"{compact(run['episodes'])} episodes",
    ]
    parts += [
        f"{compact(run['tokens'])} tokens" if run["tokens"] else "",
        lasting(seconds_of(run, now())),
    ]
    line.append("".join(f"  {part}" for part in parts if part))
    return line


def _ledger(
    totals: list[LedgerTotal], failed: list[Failure], clients: list[TokenReceipt], width: int
) -> Group:
    """Format the ledger, the causes of failures, and the clients of a swarm as tables."""
    parts: list[RenderableType] = []
    if totals:
        title = "ledger: what became of every sampled token"
        parts.append(table(with_shares(totals), width, title=title, right=["share"]))
    else:
        parts.append(Text("No ledger yet: it is written at the end of a step.", style="dim"))
    parts.append(Text())
    if failed:
        causes: list[dict[str, object]] = []
        for row in failed:
            cause: dict[str, object] = {"cause": row["cause"], "episodes": row["episodes"]}
            cause |= {"share": f"{row['share']:.1%}", "last_step": row["last_step"]}
            causes.append({**cause, "example": row["example"][:8], "error": row["error"]})
        parts.append(table(causes, width, title="failures by cause", right=["share"]))
    else:
        parts.append(Text("No episode failed.", style="dim"))
    if any(client.name != HERE for client in clients):
        parts += [Text(), table(client_rows(clients), width, title="clients, and their tokens")]
    return Group(*parts)
