"""The process of `learner.run_learner`:
`python -m ajet_sdk.backbones.trinity.learner_process OPTIONS`."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from ajet_sdk.errors import AjetError
from ajet_sdk.reporting.output import echo
from ajet_sdk.rollout.event_loop import run_to_end
from ajet_sdk.trainer_service.server import serve

_PAUSE = 0.2
"""Seconds between two checks of the parent."""


def main() -> None:
    """Serve until SIGTERM, or until the parent is gone."""
    options = json.loads(sys.argv[1])
    threading.Thread(target=_end_with, args=(options.pop("parent"),), daemon=True).start()
    listener = socket.socket(fileno=options.pop("listener"))
    state = Path(options.pop("state"))
    try:
        run_to_end(
            serve(
                listener, state=state, api_key=os.environ["TINKER_API_KEY"], device="cpu", **options
            )
        )
    except AjetError as error:
        echo(f"ajet: {error}", err=True)
        raise SystemExit(1) from None


def _end_with(parent: int) -> None:
    """End at once when the parent is gone; the state on disk is always complete."""
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    os._exit(1)


if __name__ == "__main__":
    main()
