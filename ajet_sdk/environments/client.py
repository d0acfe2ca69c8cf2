"""A client of the environment service: one environment instance per episode, over HTTP.

Every endpoint is a POST of `{env_type, task_id, instance_id, messages, params}` and answers
`{"data": ...}`: `create`, `step`, `evaluate`, `get_info`, `release`, `get_env_profile` (the task
ids of a split).
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ajet_sdk.addresses import below
from ajet_sdk.errors import EnvironmentUnavailable, SignatureError, first_line
from ajet_sdk.types import Json, JsonView, new_id

if TYPE_CHECKING:
    import httpx

_TRIES = 3
_TIMEOUT = 60.0
_FULL = 503
_NO_FEEDBACK = "The environment gave no feedback; give valid input and try again."


class GymEnv:
    """An environment instance of an episode. Its calls block; a run creates and releases it.

    Exceptions of its methods, or those of a subclass, are infrastructure faults of the episode.
    After a failed step or evaluation all later ones fail, and the episode has no reward, even if
    the agent catches the exception.

    Args:
        service_url: the address of an environment service, or several; the instance's id selects the first to try, and
            the next ones are tried if it does not answer or is full.
        env_type: the service's name of the environment.
        task_id: the service's name of the task.
        instance_id: the name of this instance; None: a new one.
        timeout: seconds to wait for each answer.
    """

    def __init__(
        self,
        service_url: str | Sequence[str],
        env_type: str,
        task_id: str,
        *,
        instance_id: str | None = None,
        timeout: float = _TIMEOUT,
    ) -> None:
        self.env_type = env_type
        self.task_id = task_id
        self.instance_id: str = instance_id or new_id()
        self.timeout = timeout
        urls = _urls(service_url)
        first = zlib.crc32(self.instance_id.encode()) % len(urls)
        self._urls = urls[first:] + urls[:first]
        self.service_url: str = self._urls[0]
        self.fault: EnvironmentUnavailable | None = None
        """The error of a failed step or evaluation."""
        self._http: httpx.Client | None = None

    def __getstate__(self) -> dict[str, object]:
        """Pickle without the connection."""
        return {**self.__dict__, "_http": None}

    def create(self, params: JsonView | None = None) -> list[Json]:
        """Start the environment and return its first state as messages.

        If all services are full, it waits up to `timeout` seconds. Raises EnvironmentUnavailable.
        """
        data = self._created(params or {})
        state = data.get("state") if isinstance(data, Mapping) else None
        self.fault = None
        messages = [state] if isinstance(state, dict) else state or []
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) for message in messages
        ):
            raise EnvironmentUnavailable(
                f"{self.service_url}/create returned a state that is not a list of messages:"
                f" {state!r}"
            )
        return messages

    def _created(self, params: Mapping[str, object]) -> object:
        until = time.monotonic() + self.timeout
        tries = 0
        while True:
            errors = []
            for url in self._urls:
                self.service_url = url
                try:
                    return self._ask("create", params=params)
                except EnvironmentUnavailable as error:
                    if error.status is not None and error.status < 500:
                        raise
                    errors.append(error)
            tries += 1
            full = any(error.status == _FULL for error in errors)
            if time.monotonic() > until if full else tries == _TRIES:
                raise errors[-1]
            time.sleep(0.5 * min(tries, 4))

    def step(self, action: Mapping[str, object]) -> tuple[str | list[Json], float, bool, Json]:
        """Send an action, `{"role": "assistant", "content": "..."}`; returns observation, reward,
        terminated, info.

        The observation is text, or with pictures the parts of a message's content. A message may
        have `tool_calls`; then `info["messages"]` has the result of each. A step is not retried, as
        it changes the environment. Raises EnvironmentUnavailable, and
        SignatureError, a fault of the agent, if the action is no message or cannot be encoded.
        """
        if not isinstance(action, Mapping):
            raise SignatureError(
                f"env.step takes a message, {{'role': …, 'content': …}} (got {action!r:.100})"
            )
        message = {**action, "content": _text_of(action.get("content"))}
        try:
            json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate, NaN, an object
            raise SignatureError(f"env.step takes a message that JSON can hold: {error}") from error
        with self._faults():
            return self._stepped(message)

    def _stepped(
        self, message: JsonView
    ) -> tuple[str | list[Json], float, bool, dict[str, object]]:
        answer = self._ask("step", messages=message)
        data = answer if isinstance(answer, Mapping) else {}
        state = data.get("state")
        messages: list[Any] = state if isinstance(state, list) else [state]
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise EnvironmentUnavailable(
                f"{self.service_url}/step returned a state that is not a message: {state!r}"
            )
        reward = data.get("reward") or 0.0
        info = data.get("info") or {}
        if (
            not isinstance(reward, (int, float))
            or not math.isfinite(reward)
            or not isinstance(info, Mapping)
        ):
            raise EnvironmentUnavailable(
                f"{self.service_url}/step returned an invalid reward or info: {reward!r},"
                f" {info!r:.100}"
            )
        observation = _observation(messages)
        if len(messages) > 1 or messages[0].get("role") == "tool":
            info = {**info, "messages": messages}
        return observation, float(reward), bool(data.get("is_terminated")), dict(info)

    def evaluate(
        self, uuid: str | None = None, params: Mapping[str, object] | None = None
    ) -> float:
        """Return the environment's score. `uuid` is ignored. Raises EnvironmentUnavailable."""
        with self._faults():
            value = self._ask("evaluate", params=params, tries=_TRIES)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not math.isfinite(value)
            ):
                raise EnvironmentUnavailable(
                    f"{self.service_url}/evaluate did not return a number: {value!r}"
                )
            return float(value)

    def info(self, params: Mapping[str, object] | None = None) -> Any:
        """Return information on the environment, for example its tools. Raises
        EnvironmentUnavailable."""
        return self._ask("get_info", params=params, tries=_TRIES)

    def release(self) -> None:
        """Release the environment. Raises EnvironmentUnavailable."""
        try:
            self._ask("release", tries=_TRIES)
        finally:
            http = self._http
            self._http = None
            if http is not None:
                http.close()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Remember an exception of the block, and raise it again in later calls."""
        if self.fault is not None:
            raise EnvironmentUnavailable(str(self.fault), status=self.fault.status)
        try:
            yield
        except EnvironmentUnavailable as error:
            self.fault = EnvironmentUnavailable(str(error), status=error.status)
            raise

    def _ask(
        self,
        endpoint: str,
        *,
        messages: JsonView | None = None,
        params: JsonView | None = None,
        tries: int = 1,
    ) -> Any:
        body = {
            "env_type": self.env_type,
            "task_id": self.task_id,
            "instance_id": self.instance_id,
            "messages": dict(messages or {}),
            "params": dict(params or {}),
        }
        if self._http is None:
            self._http = _client(self._urls)
        return _post(self._http, self.service_url, endpoint, body, self.timeout, tries)


def task_ids(service_url: str | Sequence[str], env_type: str, split: str) -> list[str]:
    """Return the task ids of a split from the first service that answers. Raises
    EnvironmentUnavailable."""
    body = {
        "env_type": env_type,
        "task_id": None,
        "instance_id": None,
        "messages": {},
        "params": {"split": split},
    }
    url, *further = _urls(service_url)
    with _client([url, *further]) as http:
        while True:
            try:
                ids = _post(http, url, "get_env_profile", body, _TIMEOUT, _TRIES)
                break
            except EnvironmentUnavailable as error:
                if not further or (error.status is not None and error.status < 500):
                    raise
                url, *further = further
    if not isinstance(ids, list):
        raise EnvironmentUnavailable(
            f"{url}/get_env_profile did not return a list of task ids: {ids!r}"
        )
    return [str(task_id) for task_id in ids]


def service_health(url: str) -> Json:
    """Return a service's health report; `{"status": "ok"}` for other services. Raises
    EnvironmentUnavailable."""
    with _client([url]) as http:
        health = _request(http, "GET", url.rstrip("/"), "healthz", None, 5.0, 1)
    return health if isinstance(health, dict) else {"status": "ok"}


def _urls(service_url: str | Sequence[str]) -> list[str]:
    urls = [service_url] if isinstance(service_url, str) else list(service_url)
    return [url.rstrip("/") for url in urls]


def _client(urls: Sequence[str]) -> httpx.Client:
    import httpx

    # Without TLS no certificates are loaded, which would cost more than the request.
    secure = any(url.startswith("https:") for url in urls)
    key = os.environ.get("AJET_ENV_KEY")
    return httpx.Client(
        trust_env=secure, verify=secure, headers={"authorization": f"Bearer {key}"} if key else None
    )


def _post(
    http: httpx.Client, url: str, endpoint: str, body: Json, timeout: float, tries: int
) -> object:
    answer = _request(http, "POST", url, endpoint, body, timeout, tries)
    if not isinstance(answer, dict):
        raise EnvironmentUnavailable(f"{url}/{endpoint} did not return an object: {answer!r:.100}")
    return answer.get("data")


def _request(
    http: httpx.Client,
    method: str,
    url: str,
    endpoint: str,
    body: dict[str, object] | None,
    timeout: float,
    tries: int,
) -> Any:
    """The response as JSON; None for a GET without JSON. Raises EnvironmentUnavailable."""
    import httpx

    for remaining in reversed(range(tries)):
        try:
            response = http.request(method, below(url, endpoint), json=body, timeout=timeout)
            response.raise_for_status()
            if body is not None or "json" in response.headers.get("content-type", ""):
                return response.json()
            return None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            if isinstance(error, httpx.HTTPStatusError):
                status = error.response.status_code
            else:
                status = None
            if (status is not None and status < 500) or not remaining:
                why = _why(error, endpoint, timeout)
                raise EnvironmentUnavailable(
                    f"the environment service at {url} {why}", status=status
                ) from error
            time.sleep(0.5 * (tries - remaining))
    raise AssertionError("unreachable")


def _why(error: Exception, endpoint: str, timeout: float) -> str:
    """The error message; it mentions the address only if the service can't be reached."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return f"answered {endpoint} with {error.response.status_code}: {error.response.text[:500]}"
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return f"did not answer {endpoint} within {timeout:g} s"
    reason = first_line(error)
    if isinstance(
        error,
        httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol | httpx.InvalidURL,
    ):
        return f"cannot be reached ({reason}); start it, or correct task_reader.env_service.env_url"
    return f"did not answer {endpoint} as it should ({reason})"


def _observation(messages: Sequence[JsonView]) -> str | list[Json]:
    """The texts of messages; of a single one with pictures its parts."""
    content = messages[0].get("content")
    if len(messages) == 1 and isinstance(content, list):
        return content
    texts = []
    for message in messages:
        content = message.get("content") or message.get("error") or ""
        texts.append(
            _text_of(content) or "[picture]" if isinstance(content, list) else str(content)
        )
    return "\n".join(filter(None, texts)) or _NO_FEEDBACK


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(
            str(part.get("text", "")) if isinstance(part, Mapping) else str(part)
            for part in content
        )
    return "" if content is None else str(content)
