"""The running batch: conversations in the rows of a key-value block, all advanced by one forward
pass per token.

New requests are prefilled in groups of similar length and join the running rows at the next token.
A prompt that shares a prefix with a row, of its own session or another, computes only the rest.
This module is independent of threads and event loops. Shapes: B rows of a pass, T tokens each, V
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.engines.local.cache import RESTING, RUNNING, CacheRows, RowCache
from ajet_sdk.engines.local.forward import Shown, causal_mask, forward_of
from ajet_sdk.engines.local.logits import process
from ajet_sdk.engines.local.requests import (
    Continuation,
    StopWatch,
    TokenDraw,
    draw,
    most_likely,
    uniform,
)
from ajet_sdk.engines.local.vision import Vision
from ajet_sdk.errors import EngineError
from ajet_sdk.memory import return_freed
from ajet_sdk.pictures import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFILL_TOKENS = 8192
"""Tokens of one prefill pass, padding included."""
_PADDING = 256
"""Padding tokens that take less time than another pass."""
_Places = npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class _Joiner:
    row: int
    begin: int
    """Prompt tokens that are already computed."""
    todo: int


class RunningBatch:
    """A batch of conversations over a model with plain attention in every layer."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Iterable[int],
        vocabulary: int,
        max_batch: int,
        kv_bytes: int,
        deterministic: bool = False,
        vision: Vision | None = None,
    ) -> None:
        self._vision = vision
        self._device: torch.device = next(model.parameters()).device
        self._dtype: torch.dtype = model.dtype
        self._share = not deterministic
        self._eos = np.zeros(vocabulary, dtype=bool)
        self._eos[[i for i in eos_ids if i < vocabulary]] = True
        self._cache = RowCache()
        self._forward = forward_of(model, self._cache)
        self._table = CacheRows(
            self._cache, at_least=max_batch, kv_bytes=kv_bytes, share=self._share
        )
        self._changed()

    def suspend(self) -> list[Continuation]:
        """Stop all running continuations and free the memory; `admit` lets them go on."""
        suspended = [self._end(int(row)) for row in self._rows]
        self.clear()
        return suspended

    def clear(self) -> None:
        """Drop all conversations and free the memory, also that freed by a trainer."""
        if self._cache.rows:
            self._cache.drop()
        return_freed()
        self._forward.refresh()
        self._table.clear()
        self._changed()

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def resting(self) -> int:
        return int((self._table.state == RESTING).sum())

    def continuations(self) -> list[Continuation]:
        return [
            continuation for continuation in self._table.continuations if continuation is not None
        ]

    def _changed(self) -> None:
        """Prepare per-step data after the running rows have changed."""
        self._rows: _Places = np.flatnonzero(self._table.state == RUNNING)
        self._watched = self._stop_watches(self._rows)
        self._how = self._token_draw(self._rows) if len(self._rows) else None

    def _stop_watches(self, rows: _Places) -> list[tuple[int, StopWatch]]:
        """The stop watches of rows with stop strings, by position."""
        continuations = self._table.continuations
        return [
            (i, continuation.stop)
            for i, row in enumerate(rows)
            if (continuation := continuations[row]) is not None and continuation.stop
        ]

    def _token_draw(self, rows: _Places) -> TokenDraw:
        table = self._table
        return TokenDraw(
            table.temperature[rows],
            table.top_k[rows],
            table.top_p[rows],
            table.min_p[rows],
            self._device,
        )

    # Joining and leaving

    def admit(self, continuations: Sequence[Continuation]) -> list[Continuation]:
        """Prefill the prompts, with what was sampled before a suspension, and sample one token
        for each; returns finished continuations."""
        known: set[tuple[str, bytes]] = set()
        first: list[Continuation] = []
        later: list[Continuation] = []
        for continuation in continuations:
            key = (
                "" if self._share else continuation.request.session,
                continuation.ids.tobytes(),
            )
            (later if key in known else first).append(continuation)
            known.add(key)
        done: list[Continuation] = []
        for wave in (first, later):
            done += self._join(wave) if wave else []
        return done

    def _join(self, continuations: Sequence[Continuation]) -> list[Continuation]:
        self._table.reserve(max(len(continuation.ids) for continuation in continuations) + 1)
        joiners = []
        copies: list[tuple[int, int, int]] = []
        for continuation in continuations:
            request = continuation.request
            shift = 0
            if self._vision is not None:
                shift = self._vision.shift(request.prompt, request.pictures)
            row, source, shared = self._table.seat(continuation, shift)
            joiners.append(_Joiner(row, shared, len(continuation.ids) - shared))
            if source >= 0:
                copies.append((source, row, shared))
        if copies:
            source_B, target_B, shared_B = (
                np.array(column) for column in zip(*copies, strict=True)
            )
            self._cache.copy_rows(
                self._tensor(source_B), self._tensor(target_B), int(shared_B.max())
            )
            self._table.length[target_B] = shared_B
        rows = np.array([joiner.row for joiner in joiners])
        tokens = np.zeros(len(rows), np.int64)
        logprobs = np.zeros(len(rows), np.float32)
        for group in _groups(joiners):
            logits = self._prefill([joiners[i] for i in group])
            tokens[group], logprobs[group] = self._sample(
                rows[group], self._token_draw(rows[group]), logits
            )
        done = self._take(rows, tokens, logprobs, self._stop_watches(rows))
        self._changed()
        return done

    def cancel(self, continuations: Iterable[Continuation]) -> None:
        """Stop running continuations, with the tokens sampled so far; computed tokens stay cached
        for the session."""
        for continuation in continuations:
            if (
                continuation.row is not None
                and self._table.continuations[continuation.row] is continuation
            ):
                self._finish(continuation.row, stopped=False)
        self._changed()

    def forget(self, session: str) -> None:
        """Free a session's rows: resting ones at once, running ones at their end."""
        self._table.forget(session)

    # Forward passes

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.to(self._device, non_blocking=True)

    def _prefill(self, joiners: Sequence[_Joiner]) -> torch.Tensor:
        """Compute the prompts' missing tokens; returns the logits after the last token of each, [B,
        V]."""
        table = self._table
        rows = np.array([joiner.row for joiner in joiners])
        begin = np.array([joiner.begin for joiner in joiners])
        todo = np.array([joiner.todo for joiner in joiners])
        width = int(todo.max())
        table.reserve(int(begin.max()) + width)
        places_BT = begin[:, None] + np.arange(width)
        ids = np.take_along_axis(table.ids[rows], places_BT, axis=1).astype(np.int64)
        shown = None
        if self._vision is not None:
            ids[np.arange(width) >= todo[:, None]] = 0  # padding, not a picture of an earlier row
            shown = self._shown(rows, ids, begin)
            ids = self._vision.model_ids(ids)
        write = self._tensor((rows[:, None] * self._cache.capacity + places_BT).reshape(-1))
        places = self._tensor(places_BT)
        mask = None
        if begin.any():
            window = int((begin + todo).max())
            self._cache.extend(write, self._tensor(rows), window)
            mask = causal_mask(places, window, self._dtype)
        else:
            self._cache.fresh(write)
        last = None if (todo == width).all() else self._tensor(todo - 1)
        logits = self._forward(self._tensor(ids), places, mask, last, shown)
        table.length[rows] = begin + todo
        return logits

    def _shown(self, rows: _Places, ids_BT: _Places, begin: _Places) -> Shown:
        """The positions and pictures of prompts from `begin` on."""
        assert self._vision is not None
        table = self._table
        width = ids_BT.shape[1]
        pictures: dict[int, Picture] = {}
        positions = np.zeros((3, *ids_BT.shape), np.int64)
        for i, row in enumerate(rows):
            continuation = table.continuations[row]
            assert continuation is not None
            pictures |= continuation.request.pictures
            of_prompt = self._vision.positions(continuation.ids, pictures)[:, begin[i] :]
            positions[:, i, : min(width, of_prompt.shape[1])] = of_prompt[:, :width]
        return Shown(
            self._tensor(positions if self._vision.processor.has_grid_positions else positions[0]),
            self._vision.arguments(ids_BT, pictures, self._device),
        )

    def _decode(self) -> torch.Tensor:
        """Advance every running row by the token sampled last; returns the logits after it, [B,
        V]."""
        table = self._table
        rows = self._rows
        window = int(table.length[rows].max()) + 1
        table.reserve(window + 1)
        first = int(rows[0])
        behind = int(rows[-1]) + 1
        dense = self._share and len(rows) * 4 >= (behind - first) * 3
        batch = np.arange(first, behind) if dense else rows
        places = table.length[batch]
        ids = table.ids[batch, places].astype(np.int64)[:, None]
        write = self._tensor(batch * self._cache.capacity + places)
        # If dense, idle rows in between are computed, too, and ignored.
        self._cache.extend(write, slice(first, behind) if dense else self._tensor(rows), window)
        places_B1 = self._tensor(places[:, None])
        shown = None
        if self._vision is not None:
            ids = self._vision.model_ids(ids)  # idle rows in between may have pictures
            positions_B1 = (places + table.shift[batch])[:, None]
            grid = self._vision.processor.has_grid_positions
            positions = np.stack([positions_B1] * 3) if grid else positions_B1
            shown = Shown(self._tensor(positions), {})
        mask = causal_mask(places_B1, window, self._dtype)
        logits = self._forward(self._tensor(ids), places_B1, mask, None, shown)
        table.length[rows] += 1
        if len(rows) < len(batch):
            return logits[self._tensor(rows - first)]
        return logits

    # Sampling

    def step(self) -> list[Continuation]:
        """Sample a token for every running continuation; returns finished ones."""
        if self._how is None:
            return []
        tokens, logprobs = self._sample(self._rows, self._how, self._decode())
        done = self._take(self._rows, tokens, logprobs, self._watched)
        if done:
            self._changed()
        return done

    def _sample(self, rows: _Places, how: TokenDraw, logits: torch.Tensor) -> tuple[Any, Any]:
        table = self._table
        noise = uniform(table.seed[rows], table.length[rows] - table.start[rows])
        logits = self._processed(rows, logits)
        tokens, logprobs = draw(logits, how, self._tensor(noise))
        sampled = tokens.cpu().numpy(), logprobs.cpu().numpy()
        wanting = [
            (i, continuation)
            for i, row in enumerate(rows)
            if (continuation := table.continuations[row]) is not None
            and continuation.request.sampling.top_logprobs
        ]
        if wanting:
            best, values = most_likely(
                logits, how, max(c.request.sampling.top_logprobs for _, c in wanting)
            )
            for i, continuation in wanting:
                continuation.keep_top(best[i].tolist(), values[i].tolist())
        if np.isnan(sampled[1]).any():
            raise EngineError(
                "the model's logits are not finite: its weights are broken (learning rate too"
                " high?)"
            )
        return sampled

    def _processed(self, rows: _Places, logits: torch.Tensor) -> torch.Tensor:
        changed = list[tuple[int, torch.Tensor]]()
        for i, row in enumerate(rows):
            continuation = self._table.continuations[row]
            if continuation is not None and continuation.processors:
                start = int(self._table.start[row])
                end = int(self._table.length[row])
                output = self._table.ids[row, start:end].tolist()
                logits_1V = process(
                    logits[i : i + 1].float(), continuation.processors, output, [end - start]
                )
                changed.append((i, logits_1V))
        if changed:
            logits = logits.float().clone()
            for i, logits_1V in changed:
                logits[i] = logits_1V[0]
        return logits

    def _take(
        self,
        rows: _Places,
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        watched: Sequence[tuple[int, StopWatch]],
    ) -> list[Continuation]:
        """Record a sampled token per row, and end finished rows."""
        table = self._table
        places = table.length[rows]
        table.ids[rows, places] = tokens
        table.logprobs[rows, places] = logprobs
        stopped = self._eos[tokens]
        for i, watch in watched:
            if not stopped[i] or watch.ignore_eos:
                stopped[i] = watch.feed(int(tokens[i]))
        done = stopped | (places + 1 >= table.limit[rows])
        return [self._finish(int(rows[i]), bool(stopped[i])) for i in np.flatnonzero(done)]

    def _finish(self, row: int, stopped: bool) -> Continuation:
        continuation = self._end(row)
        continuation.reason = "stop" if stopped else "length"
        return continuation

    def _end(self, row: int) -> Continuation:
        """Free a running row, whose continuation gets what was sampled."""
        table = self._table
        continuation = table.continuations[row]
        assert continuation is not None
        start = int(table.start[row])
        end = int(table.length[row]) + 1
        continuation.output = table.ids[row, start:end].tolist()
        continuation.logprobs = table.logprobs[row, start:end].tolist()
        continuation.row = None
        table.park(row)
        return continuation


def _groups(joiners: Sequence[_Joiner]) -> list[list[int]]:
    """Group joiners for prefill: fresh ones separately, with little padding."""
    order = sorted(range(len(joiners)), key=lambda i: (joiners[i].begin > 0, joiners[i].todo))
    groups: list[list[int]] = []
    real = 0
    for i in order:
        joiner = joiners[i]
        if groups and (joiners[groups[-1][0]].begin > 0) == (joiner.begin > 0):
            padded = (len(groups[-1]) + 1) * joiner.todo
            if padded <= _PREFILL_TOKENS and padded - real - joiner.todo <= max(
                _PADDING, real // 4
            ):
                groups[-1].append(i)
                real += joiner.todo
                continue
        groups.append([i])
        real = joiner.todo
    return groups
