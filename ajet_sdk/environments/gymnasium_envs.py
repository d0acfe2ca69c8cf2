"""Gymnasium environments: `gymnasium:FrozenLake-v1`, or made by a user's function. A task id is a
seed.

An action is its number, its name if names are given, or JSON. An observation is what the environment
renders, text (`render_mode: ansi`) or a picture (`render_mode: rgb_array`), else its value as JSON.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ajet_sdk.environments.spec import Spec, UnknownTask, WrongTarget, answer, messages_of

if TYPE_CHECKING:
    import gymnasium

    from ajet_sdk.types import Json, JsonView

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def load(name: str, spec: Spec) -> Callable[[str], Played]:
    """Return a function that makes the environment registered under a name. Raises ImportError,
    WrongTarget."""
    import gymnasium

    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:  # its message suggests similar names
        raise WrongTarget(f"gymnasium has no environment {name}: {error}") from error

    def create(task_id: str) -> Played:
        try:
            seed = int(task_id)
        except ValueError:
            raise UnknownTask(
                f"a task of gymnasium:{name} is a seed, which is a number (got {task_id!r})"
            ) from None
        return Played(gymnasium.make(name, **spec.arguments), seed, spec.actions)

    return create


class Played:
    """A running gymnasium environment."""

    def __init__(
        self, env: gymnasium.Env[object, object], seed: int | None, actions: Sequence[str]
    ) -> None:
        if actions and getattr(env.action_space, "n", None) != len(actions):
            raise WrongTarget(
                f"--actions names {len(actions)} actions, but the environment's are"
                f" {env.action_space}; name each of a Discrete space, or leave it out"
            )
        self._env = env
        self._seed = seed
        self._actions = [name.lower() for name in actions]
        self._total = 0.0

    def reset(self) -> list[Json]:
        observation, _ = self._env.reset(seed=self._seed)
        return messages_of(self._shown(observation))

    def step(self, message: Mapping[str, object]) -> Json:
        try:
            action = self._read(str(message.get("content") or "").strip())
        except Exception:  # noqa: BLE001  a space may raise anything for a text
            # A mistake of the agent, from which it can learn: the environment does not change.
            return answer(f"Not an action. {self._expected()}", 0.0, False, {"invalid": True})
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._total += float(reward)
        info = {**info, "truncated": bool(truncated)}
        return answer(self._shown(observation), float(reward), bool(terminated or truncated), info)

    def evaluate(self, params: Mapping[str, object]) -> float:
        """The sum of the rewards so far."""
        return self._total

    def info(self, params: JsonView) -> Json:
        return {
            "actions": self._actions or str(self._env.action_space),
            "observations": str(self._env.observation_space),
            "expected": self._expected(),
        }

    def close(self) -> None:
        self._env.close()

    def _shown(self, observation: object) -> str | list[Json]:
        if self._env.render_mode == "ansi":
            return _COLOURS.sub("", str(self._env.render()))
        if self._env.render_mode == "rgb_array":
            data = base64.b64encode(_png(self._env.render())).decode()
            url = {"url": f"data:image/png;base64,{data}"}
            return [{"type": "image_url", "image_url": url}]
        value = _jsonable(observation)
        return value if isinstance(value, str) else json.dumps(value)

    def _read(self, text: str) -> object:
        """Parse an action. Raises if the text is none."""
        space: Any = self._env.action_space
        if self._actions:
            return space.start + self._actions.index(text.lower())
        action = _element(space, text if type(space).__name__ == "Text" else json.loads(text))
        if not space.contains(action):
            raise ValueError(text)
        return action

    def _expected(self) -> str:
        if self._actions:
            return f"Say one of: {', '.join(self._actions)}."
        return f"Say an element of {self._env.action_space}" + (
            "." if type(self._env.action_space).__name__ in ("Text", "Discrete") else ", as JSON."
        )


def _png(pixels: Any) -> bytes:
    """The file of rows of RGB pixels (PNG specification, section 11), as the environment's
    interpreter may lack Pillow."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # each without a filter
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")):
        checked = kind + data
        file += struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))
    return file


def _jsonable(value: Any) -> object:
    """Convert an element of a space to JSON."""
    if isinstance(value, Mapping):
        return {name: _jsonable(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_jsonable(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _element(space: Any, value: Any) -> object:
    """Convert JSON to an element of a space. Raises if it is none."""
    if hasattr(space, "spaces"):
        if isinstance(space.spaces, Mapping):
            return {name: _element(inner, value[name]) for name, inner in space.spaces.items()}
        return tuple(_element(inner, value[place]) for place, inner in enumerate(space.spaces))
    if type(space).__name__ == "Discrete" and not isinstance(value, int):
        raise TypeError(value)
    return space.from_jsonable([value])[0]
