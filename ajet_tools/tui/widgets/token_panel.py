"""What is known of the token under the cursor, and the legend of the colours."""

from __future__ import annotations

from collections.abc import Mapping

from rich.style import Style
from rich.text import Text
from textual.widgets import Static

from ajet_tools.trace.shades import Shade
from ajet_tools.trace.text import visible
from ajet_tools.trace.token_facts import facts_of, fork_words, why
from ajet_tools.trace.token_view import TokenView

__all__ = ["Legend", "TokenPanel"]


class TokenPanel(Static):
    """Id, exact bytes, values, call, and why the token was trained or not."""

    DEFAULT_CSS = """
    TokenPanel { height: auto; min-height: 6; max-height: 9; padding: 0 1; background: $panel; color: $foreground; }
    """

    def tell(self, view: TokenView, token: int) -> None:
        """Show a token."""
        said = Text()
        for line in facts_of(view, token):
            for name, value in line:
                if said.plain and not said.plain.endswith("\n"):
                    said.append("   ")
                said.append(f"{name} ", style="dim").append(visible(value))
            if line:
                said.append("\n")
        said.append(visible(why(view, token)), style="bold")
        for fork in view.forks:
            if fork.at == token:
                said.append(f"\n{visible(fork_words(fork))}", style="magenta")
        self.update(said)


class Legend(Static):
    """What each colour means, on one line or two."""

    DEFAULT_CSS = "Legend { height: auto; max-height: 2; padding: 0 1; color: $foreground; }"

    def tell(self, number: int, shade: Shade, tones: Mapping[str, Style]) -> None:
        """Show the levels that stand in the text."""
        said = Text(f"{number} {shade.name}: ")
        for level in shade.present:
            said.append(f" {level.label} ", style=tones[level.tone]).append(" ")
        if shade.note:
            said.append(f" {shade.note}", style="dim")
        self.update(said)
