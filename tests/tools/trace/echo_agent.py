"""An agent of one call."""

from __future__ import annotations

import ajet


@ajet.workflow
async def answer(question: str, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    return reply["content"] or ""
