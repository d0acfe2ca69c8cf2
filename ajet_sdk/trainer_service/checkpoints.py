"""Checkpoints on disk under the API's paths: `tinker://ID/weights/NAME` is the directory STATE/ID/weights/NAME."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ajet_sdk.dialects.json import Json
from ajet_sdk.errors import CheckpointError, RequestRefused
from ajet_sdk.trainer_service.policies import Policy

SAVE, SNAPSHOT, EXPORT = "save_weights", "save_weights_for_sampler", "save_weights_external"
_PARTS = {SAVE: "weights", SNAPSHOT: "sampler_weights", EXPORT: "external_weights"}
_SESSIONS = "sessions"
"""Directory of unnamed weights, one per sampling session."""
_KEPT = 16
"""Number of sampling sessions per policy whose weights are kept."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(rf"tinker://([^/]+)/({'|'.join([*_PARTS.values(), _SESSIONS])})/({_NAME.pattern})")


class Checkpoints:
    """Stores the weights of all policies in a directory. Checkpoints are written to a draft and renamed."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def directory(self, policy_id: str) -> Path:
        return self.state / policy_id.replace(":", "_")

    def keep(self, policy_id: str, seq: int, policy: Policy) -> Path:
        """Save the weights after a request, for the next server on this state."""
        directory = self.directory(policy_id) / f"step-{seq}"
        shutil.rmtree(directory, ignore_errors=True)  # left by a server that was killed while writing
        policy.save(directory, optimiser=True)
        return directory

    def save(self, policy_id: str, policy: Policy, kind: str, body: Json) -> str:
        """Save a checkpoint for a client; returns its path. Raises RequestRefused."""
        name, session = body.get("path"), body.get("sampling_session_seq_id")
        if name is None:
            name = f"step-{body['seq_id']}" if session is None else str(session)
        if not _NAME.fullmatch(name):
            raise RequestRefused(f"{name!r} is no name of a checkpoint: use letters, digits, '.', '_' and '-'", "path")
        if body.get("age_encryption_recipients"):
            raise RequestRefused("this server encrypts no checkpoints; leave age_encryption_recipients out")
        part = _PARTS[kind] if session is None else _SESSIONS
        target, path = self.directory(policy_id) / part / name, f"tinker://{policy_id}/{part}/{name}"
        if target.exists() and kind == SAVE and not body.get("overwrite"):
            raise RequestRefused(f"{path} is there already; pass overwrite=True, or choose another name", "path")
        draft = target.with_name(f".{name}")
        shutil.rmtree(draft, ignore_errors=True)
        policy.save(draft, optimiser=kind == SAVE, about={"user_metadata": body.get("user_metadata")})
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        if session is not None:
            for old in sorted(target.parent.iterdir(), key=lambda directory: directory.stat().st_mtime)[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        return path

    def place(self, path: str) -> Path:
        """The directory that a tinker:// path names, be it there or not."""
        parts = _PATH.fullmatch(path)
        return self.directory(parts[1]) / parts[2] / parts[3] if parts else self.state / "none"

    def find(self, path: str) -> Path:
        """The directory of an existing path. Raises CheckpointError."""
        directory = self.place(path)
        if directory.resolve().parent.parent.parent != self.state.resolve() or not directory.is_dir():
            raise CheckpointError(
                f"there is no checkpoint {path} on this server; unnamed ones of save_weights_and_get_sampling_client "
                f"are kept for the newest {_KEPT} sessions of a model"
            )
        return directory

    def named(self, policies: Iterable[str]) -> dict[str, Path]:
        """The named checkpoints of policies, by their paths."""
        return {
            f"tinker://{id_}/{part}/{directory.name}": directory
            for id_ in policies
            for part in _PARTS.values()
            for directory in sorted((self.directory(id_) / part).glob("[!.]*"))
        }
