"""The running batch: conversations in the rows of one key-value block, all advanced by one forward pass per token.

A row is free, resting (a conversation between two turns) or running. New requests are prefilled in groups of like
length and join the running rows at the next token; a request whose prompt begins like a row that is there, of its own
session or another's, computes only what differs. Nothing here knows of threads or event loops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.engines.local.draw import Draw, draw, uniform
from ajet_sdk.engines.local.forward import forward_of
from ajet_sdk.engines.local.jobs import Job, StopWatch
from ajet_sdk.engines.local.kv import RowCache

__all__ = ["Slots"]

_FREE, _RESTING, _RUNNING = 0, 1, 2
_SHARE_AT_LEAST = 16
"""Shared tokens below which copying another row's keys and values does not pay."""
_PREFILL_TOKENS = 8192
_LOGITS = 1 << 25
_Rows = npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class _Joiner:
    job: Job
    row: int
    begin: int
    """Tokens of the prompt that need no computing."""

    @property
    def todo(self) -> int:
        return len(self.job.request.prompt) - self.begin


class Slots:
    """Rows of conversations over a model with plain attention in every layer."""

    def __init__(
        self, model: Any, *, eos_ids: Iterable[int], vocabulary: int, max_rows: int, kv_bytes: int, share: bool
    ) -> None:
        self.model, self._share, self._kv_bytes, self._max_batch = model, share, kv_bytes, max_rows
        self._device: torch.device = next(model.parameters()).device
        self._dtype: torch.dtype = model.dtype
        self._eos = np.zeros(vocabulary, dtype=bool)
        self._eos[[i for i in eos_ids if i < vocabulary]] = True
        self._cache = RowCache(0, 0)
        self._forward = forward_of(model, self._cache)
        self.clear()

    def clear(self) -> None:
        """Forget every conversation; none may be running."""
        self._cache.drop(0, 0)
        self._forward.refresh()
        self._ids: npt.NDArray[np.int32] = np.zeros((0, 1), dtype=np.int32)
        self._logprobs: npt.NDArray[np.float32] = np.zeros((0, 1), dtype=np.float32)
        for name, dtype in (
            *(("_state", np.int8), ("_length", np.int64), ("_limit", np.int64), ("_start", np.int64)),
            *(("_used", np.int64), ("_temperature", np.float32), ("_top_p", np.float32), ("_top_k", np.int64)),
            ("_seed", np.uint64),
        ):
            setattr(self, name, np.zeros(0, dtype=dtype))
        self._jobs: list[Job | None] = []
        self._owner: list[str | None] = []
        self._sessions: defaultdict[str, set[int]] = defaultdict(set)
        self._tick = 0
        self._changed()

    # Types of the arrays that `clear` makes, one element per row.
    _state: npt.NDArray[np.int8]
    _length: npt.NDArray[np.int64]
    """Tokens whose keys and values are there; the id of one more may be known."""
    _limit: npt.NDArray[np.int64]
    _start: npt.NDArray[np.int64]
    _used: npt.NDArray[np.int64]
    _temperature: npt.NDArray[np.float32]
    _top_p: npt.NDArray[np.float32]
    _top_k: npt.NDArray[np.int64]
    _seed: npt.NDArray[np.uint64]

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def resting(self) -> int:
        return int((self._state == _RESTING).sum())

    def _changed(self) -> None:
        """Which rows run has changed: prepare what every step needs of them."""
        self._rows: _Rows = np.flatnonzero(self._state == _RUNNING)
        self._watched = self._with_stops(self._rows)
        self._draw = self._how(self._rows) if len(self._rows) else None

    def _with_stops(self, rows: _Rows) -> list[tuple[int, StopWatch]]:
        """Those of the rows, by position, that have stop strings to look for."""
        return [(i, job.stop) for i, row in enumerate(rows) if (job := self._jobs[row]) is not None and job.stop]

    def _how(self, rows: _Rows) -> Draw:
        return Draw(self._temperature[rows], self._top_k[rows], self._top_p[rows], self._device)

    # Joining

    def admit(self, jobs: Sequence[Job]) -> list[Job]:
        """Prefill the jobs' prompts and sample a first token of each; returns those that are finished by it."""
        seen: set[tuple[str, bytes]] = set()
        first, later = [], []
        for job in jobs:
            key = ("" if self._share else job.request.session, job.request.prompt.tobytes())
            (later if key in seen else first).append(job)
            seen.add(key)
        done: list[Job] = []
        for wave in (first, later):
            done += self._join(wave) if wave else []
        return done

    def _join(self, jobs: Sequence[Job]) -> list[Job]:
        self._reserve(max(len(job.request.prompt) for job in jobs) + 1)
        copies: list[tuple[int, int, int]] = []
        joiners = [self._place(job, copies) for job in jobs]
        if copies:
            source, target, lengths = (np.array(column) for column in zip(*copies, strict=True))
            self._cache.copy_rows(self._tensor(source), self._tensor(target), int(lengths.max()))
            self._length[target] = lengths
        rows = np.array([joiner.row for joiner in joiners])
        tokens, logprobs = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.float32)
        for group in _groups(joiners, len(self._eos)):
            picked = [joiners[i] for i in group]
            tokens[group], logprobs[group] = self._first_tokens(picked, self._prefill(picked))
        done = self._take(rows, tokens, logprobs, self._with_stops(rows))
        self._changed()
        return done

    def _place(self, job: Job, copies: list[tuple[int, int, int]]) -> _Joiner:
        request = job.request
        row, begin = self._find(request.prompt, request.session)
        in_place = row >= 0 and begin == self._length[row] and self._state[row] == _RESTING
        if not (in_place and self._owner[row] == request.session):
            source, row = row, self._allocate()
            self._length[row] = 0
            if begin:
                copies.append((source, row, begin))
        self._own(row, request.session)
        total = len(request.prompt)
        self._ids[row, :total] = request.prompt
        self._state[row] = _RUNNING
        self._jobs[row], job.place = job, row
        self._start[row], self._limit[row], self._seed[row] = total, total + request.max_new, job.seed
        sampling = request.sampling
        self._temperature[row], self._top_p[row] = sampling.temperature, sampling.top_p
        self._top_k[row] = sampling.top_k
        return _Joiner(job, row, begin)

    def _find(self, prompt: npt.NDArray[np.int32], session: str) -> tuple[int, int]:
        """The row that shares most tokens with the prompt, and how many; (-1, 0) where none shares enough."""
        most = len(prompt) - 1
        best, best_shared = -1, 0
        for row in self._sessions.get(session, ()):
            shared = self._shared(prompt, row, most)
            if shared > best_shared:
                best, best_shared = row, shared
            if shared == self._length[row] and self._state[row] == _RESTING and shared >= best_shared:
                best = row
        if best >= 0 and best_shared == self._length[best]:
            return best, best_shared
        if self._share and most >= _SHARE_AT_LEAST and len(self._length):
            width = min(most, int(self._length.max()))
            same = self._ids[:, :width] == prompt[:width]
            shared_R = np.where(same.all(axis=1), width, same.argmin(axis=1)) if width else np.zeros(len(same), int)
            np.minimum(shared_R, self._length, out=shared_R)
            row = int(shared_R.argmax())
            if shared_R[row] > best_shared:
                best, best_shared = row, int(shared_R[row])
        return (best, best_shared) if best_shared >= min(_SHARE_AT_LEAST, most) else (-1, 0)

    def _shared(self, prompt: npt.NDArray[np.int32], row: int, most: int) -> int:
        width = min(most, int(self._length[row]))
        differs = self._ids[row, :width] != prompt[:width]
        return int(differs.argmax()) if differs.any() else width

    def _own(self, row: int, session: str | None) -> None:
        before = self._owner[row]
        if before is not None and before != session:
            self._sessions[before].discard(row)
            if not self._sessions[before]:
                del self._sessions[before]
        self._owner[row] = session
        if session is not None:
            self._sessions[session].add(row)

    # Memory

    def _allocate(self) -> int:
        free = np.flatnonzero(self._state == _FREE)
        if not len(free):
            rows = len(self._state)
            if rows < self._most_rows(self._cache.capacity):
                self._resize(min(max(8, rows * 2), self._most_rows(self._cache.capacity)), self._cache.capacity)
                return rows
            resting = np.flatnonzero(self._state == _RESTING)
            free = resting[[self._used[resting].argmin()]]
            self._release(int(free[0]))
        return int(free[0])

    def _most_rows(self, capacity: int) -> int:
        per_row = self._cache.bytes_per_token * capacity
        return max(self._max_batch, self._kv_bytes // per_row if per_row else 0)

    def _reserve(self, length: int) -> None:
        """Make rows long enough for `length` tokens."""
        if length <= self._cache.capacity:
            return
        capacity = -(-max(length, int(self._cache.capacity * 1.5)) // 64) * 64
        rows = len(self._state)
        if rows > (most := self._most_rows(capacity)):
            resting = np.flatnonzero(self._state == _RESTING)
            for row in resting[self._used[resting].argsort()][: rows - most]:
                self._release(int(row))
            used = np.flatnonzero(self._state != _FREE)
            rows = max(most, int(used.max(initial=-1)) + 1)
        self._resize(rows, capacity)

    def _resize(self, rows: int, capacity: int) -> None:
        if rows and capacity:
            self._cache.resize(rows, capacity)
        else:
            self._cache.rows, self._cache.capacity = rows, capacity
        kept = min(rows, len(self._state))
        self._ids = _grown(self._ids, kept, (rows, capacity + 1))
        self._logprobs = _grown(self._logprobs, kept, (rows, capacity + 1))
        for name in ("_state", "_length", "_limit", "_start", "_used", "_temperature", "_top_p", "_top_k", "_seed"):
            setattr(self, name, _grown(getattr(self, name), kept, (rows,)))
        self._jobs = self._jobs[:kept] + [None] * (rows - kept)
        self._owner = self._owner[:kept] + [None] * (rows - kept)

    def _release(self, row: int) -> None:
        self._own(row, None)
        self._state[row], self._length[row], self._jobs[row] = _FREE, 0, None

    # Forward passes

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)

    def _prefill(self, joiners: Sequence[_Joiner]) -> torch.Tensor:
        """Compute the prompts' missing tokens; the logits behind the last token of each, [B, V]."""
        rows = np.array([joiner.row for joiner in joiners])
        begin = np.array([joiner.begin for joiner in joiners])
        todo = np.array([joiner.todo for joiner in joiners])
        width = int(todo.max())
        self._reserve(int(begin.max()) + width)
        places_BT = begin[:, None] + np.arange(width)
        ids = self._tensor(np.take_along_axis(self._ids[rows], places_BT, axis=1).astype(np.int64))
        write = self._tensor((rows[:, None] * self._cache.capacity + places_BT).reshape(-1))
        mask = None
        if begin.any():
            window = int((begin + todo).max())
            self._cache.extend(write, self._tensor(rows), window)
            mask = self._mask(self._tensor(places_BT), window)
        else:
            self._cache.fresh(write)
        logits = self._forward(ids, self._tensor(places_BT), mask, None if (todo == width).all() else self._tensor(todo - 1))
        self._length[rows] = begin + todo
        return logits

    def _decode(self) -> torch.Tensor:
        """Advance every running row by the token sampled last; the logits behind it, [B, V]."""
        rows, length = self._rows, self._length[self._rows]
        window = int(length.max()) + 1
        self._reserve(window + 1)
        span = int(rows[-1]) + 1
        dense = len(rows) * 4 >= span * 3
        batch = np.arange(span) if dense else rows
        places = self._length[batch]
        ids = self._ids[batch, places].astype(np.int64)[:, None]
        write = self._tensor(batch * self._cache.capacity + places)
        if dense:
            self._cache.dense(write, span, window)
        else:
            self._cache.extend(write, self._tensor(rows), window)
        places_B1 = self._tensor(places[:, None])
        logits = self._forward(self._tensor(ids), places_B1, self._mask(places_B1, window), None)
        self._length[rows] += 1
        return logits[self._tensor(rows)] if dense and len(rows) < span else logits

    def _mask(self, places_BT: torch.Tensor, window: int) -> torch.Tensor:
        """Which of the first `window` places each token sees: 0 there, else -inf; [B, 1, T, window]."""
        hidden = torch.arange(window, device=places_BT.device) > places_BT[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None]

    # Sampling

    def step(self) -> list[Job]:
        """One more token for every running job; returns those that are finished by it."""
        if self._draw is None:
            return []
        logits = self._decode()
        tokens, logprobs = self._sample(self._rows, self._draw, logits)
        done = self._take(self._rows, tokens, logprobs, self._watched)
        if done:
            self._changed()
        return done

    def _first_tokens(self, joiners: Sequence[_Joiner], logits: torch.Tensor) -> tuple[Any, Any]:
        rows = np.array([joiner.row for joiner in joiners])
        return self._sample(rows, self._how(rows), logits)

    def _sample(self, rows: _Rows, how: Draw, logits: torch.Tensor) -> tuple[Any, Any]:
        noise = self._tensor(uniform(self._seed[rows], self._length[rows] - self._start[rows]))
        tokens, logprobs = draw(logits, how, noise)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _take(
        self,
        rows: _Rows,
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        watched: Sequence[tuple[int, StopWatch]],
    ) -> list[Job]:
        """Write down one sampled token a row, and end the rows that it finishes."""
        places = self._length[rows]
        self._ids[rows, places] = tokens
        self._logprobs[rows, places] = logprobs
        stopped = self._eos[tokens]
        for i, watch in watched:
            if not stopped[i]:
                stopped[i] = watch.feed(int(tokens[i]))
        done = stopped | (places + 1 >= self._limit[rows])
        return [self._finish(int(rows[i]), bool(stopped[i])) for i in np.flatnonzero(done)]

    def _finish(self, row: int, stopped: bool) -> Job:
        job = self._jobs[row]
        assert job is not None
        start, end = int(self._start[row]), int(self._length[row]) + 1
        job.output = self._ids[row, start:end].tolist()
        job.logprobs = self._logprobs[row, start:end].tolist()
        job.reason = "stop" if stopped else "length"
        self._rest(row)
        return job

    def _rest(self, row: int) -> None:
        self._tick += 1
        self._state[row], self._used[row], self._jobs[row] = _RESTING, self._tick, None
        if self._owner[row] is None:
            self._release(row)

    # Leaving

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Stop jobs that run; what they computed stays as their session's."""
        for job in jobs:
            if job.place is not None and self._jobs[job.place] is job:
                self._rest(job.place)
        self._changed()

    def forget(self, session: str) -> None:
        """Free a session's rows: at once where they rest, when they end where they run."""
        for row in list(self._sessions.get(session, ())):
            self._own(row, None)
            if self._state[row] == _RESTING:
                self._release(row)

    def jobs(self) -> list[Job]:
        return [job for job in self._jobs if job is not None]


def _grown(array: npt.NDArray[Any], kept: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    new = np.zeros(shape, dtype=array.dtype)
    if array.ndim == 1:
        new[:kept] = array[:kept]
    else:
        new[:kept, : min(array.shape[1], shape[1])] = array[:kept, : shape[1]]
    return new


def _groups(joiners: Sequence[_Joiner], vocabulary: int) -> list[list[int]]:
    """Joiners in groups to prefill at once: fresh ones apart, and none padded far."""
    order = sorted(range(len(joiners)), key=lambda i: (joiners[i].begin > 0, joiners[i].todo))
    groups: list[list[int]] = []
    real = 0
    lengths: set[int] = set()
    for i in order:
        joiner = joiners[i]
        if groups:
            first = joiners[groups[-1][0]]
            size = len(groups[-1]) + 1
            padded = size * joiner.todo
            kinds = len(lengths | {joiner.todo})
            fits = padded - real - joiner.todo <= max(256, real // 4) and padded <= _PREFILL_TOKENS
            if fits and (first.begin > 0) == (joiner.begin > 0) and kinds * size * vocabulary <= _LOGITS:
                groups[-1].append(i)
                real += joiner.todo
                lengths.add(joiner.todo)
                continue
        groups.append([i])
        real, lengths = joiner.todo, {joiner.todo}
    return groups
