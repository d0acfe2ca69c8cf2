"""An agent that asks like a doctor: given a consultation so far, the next question."""

from __future__ import annotations

import ajet


@ajet.workflow
async def ask(task: ajet.Task, model: ajet.Model) -> str:
    """The doctor's next words."""
    reply = await model.chat(task.init_messages)
    return (reply["content"] or "").strip() or "(nothing)"
