"""See the package."""

from typing import NoReturn

ChatTemplateContentFormat = str
ConversationMessage = dict


def parse_chat_messages(*_: object, **__: object) -> NoReturn:
    """Not to be called here."""
    raise RuntimeError("images and videos need vLLM; this is ajet's replacement for runs without GPUs")


parse_chat_messages_async = parse_chat_messages
