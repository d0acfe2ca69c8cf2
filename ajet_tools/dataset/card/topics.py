"""A map of what a dataset is about: TF-IDF, clusters named by their strongest words, and a place for each row.

It shows a few thousand rows and their coarse topics, with numpy alone. Words are compared as spelt: synonyms are far
apart. Of a number only its length counts; texts that differ in nothing else have no map.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
_WORD = re.compile(r"[^\W\d_]+|\d+|[-+*/^=<>%×÷√$€£]")
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
_VOCABULARY = 800
_FEWEST_WORDS = 3
_FEWEST_ROWS = 12
_MOST_TOPICS = 9
_AXES = 16
_ROUNDS = 50
_SPREAD = 0.13
"""Deviation within a topic, as a share of the mean distance between topics."""
_COMMON = 0.5
"""A word in a larger share of the rows tells nothing about one of them."""


@dataclass(frozen=True)
class Topic:
    """A cluster of rows."""

    words: tuple[str, ...]
    """The words that set it apart, the strongest first."""
    rows: int


@dataclass(frozen=True)
class Topics:
    """Topics, the largest first; for each text the number of its topic, and its place (N rows, x and y)."""

    topics: tuple[Topic, ...]
    labels_N: npt.NDArray[np.int64]
    places_N2: Matrix


def map_topics(texts: Sequence[str]) -> Topics | None:
    """The map of `texts`, the same for the same texts in the same order; None where there is too little to tell."""
    vocabulary, counts = _vocabulary(texts)
    if len(texts) < _FEWEST_ROWS or len(vocabulary) < _FEWEST_WORDS:
        return None
    weights = _weights(vocabulary, counts, len(texts))
    directions = _directions(weights)
    points = weights @ directions
    most = min(_MOST_TOPICS, max(2, len(points) // 6))
    found = [_clusters(points, count) for count in range(2, most + 1)]
    labels = max(found, key=lambda labels: _apartness(points, labels))
    order = [int(label) for label, _ in Counter(labels.tolist()).most_common()]
    labels = np.array([order.index(label) for label in labels.tolist()], dtype=np.int64)
    topics = tuple(_topic(weights, labels, number, vocabulary) for number in range(len(order)))
    return Topics(topics, labels, _places(points, labels))


def _words(text: str) -> list[str]:
    """Words in lower case; of scripts without spaces, pairs of characters; signs; of a number how long it is."""
    found = []
    for word in _WORD.findall(text.lower()):
        if word.isdecimal():
            found.append(f"{len(word)} digits" if len(word) > 1 else "1 digit")
        elif _UNSPACED.search(word):
            found += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        elif len(word) > 2 or not word.isalpha():
            found.append(word)
    return found


def _vocabulary(texts: Sequence[str]) -> tuple[list[str], list[Counter[str]]]:
    """The words that tell rows apart, the most frequent ones of them, and each text's count of words."""
    counts = [Counter(_words(text)) for text in texts]
    rows_with = Counter(word for count in counts for word in count)
    most = max(2.0, _COMMON * len(texts))
    telling = [(word, rows) for word, rows in rows_with.items() if 2 <= rows <= most]
    telling.sort(key=lambda pair: (-pair[1], pair[0]))
    return [word for word, _ in telling[:_VOCABULARY]], counts


def _weights(vocabulary: Sequence[str], counts: Sequence[Counter[str]], rows: int) -> Matrix:
    """TF-IDF with damped counts, each row of length 1 (of length 0 where it has none of the words)."""
    place = {word: column for column, word in enumerate(vocabulary)}
    weights = np.zeros((rows, len(vocabulary)))
    for row, count in enumerate(counts):
        for word, times in count.items():
            if word in place:
                weights[row, place[word]] = 1.0 + math.log(times)
    weights *= np.log(rows / np.count_nonzero(weights, axis=0))
    length = np.linalg.norm(weights, axis=1, keepdims=True)
    return np.asarray(weights / np.where(length > 0, length, 1.0))


def _directions(weights: Matrix) -> Matrix:
    """The directions of most variance, columns, each with its largest entry positive."""
    values, vectors = np.linalg.eigh(np.cov(weights, rowvar=False))
    chosen = vectors[:, np.argsort(-values, kind="stable")[: min(_AXES, len(values))]]
    signs = np.sign(chosen[np.abs(chosen).argmax(axis=0), np.arange(chosen.shape[1])])
    return np.asarray(chosen * np.where(signs == 0, 1.0, signs))


def _clusters(points: Matrix, count: int) -> npt.NDArray[np.int64]:
    """Lloyd's k-means from centres that are far apart, the first the row that is furthest from the middle."""
    centres = [points[np.linalg.norm(points - points.mean(axis=0), axis=1).argmax()]]
    while len(centres) < count:
        away = np.min([_distance(points, centre) for centre in centres], axis=0)
        if away.max() <= 1e-12:
            break
        centres.append(points[_farthest_inlier(away)])
    middle = np.array(centres)
    labels = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        now = np.argmin([_distance(points, centre) for centre in middle], axis=0)
        if (now == labels).all():
            break
        labels = now
        middle = np.array(
            [points[labels == i].mean(axis=0) if (labels == i).any() else middle[i] for i in range(len(middle))]
        )
    return labels.astype(np.int64)


def _apartness(points: Matrix, labels: npt.NDArray[np.int64]) -> float:
    """How well clusters set themselves apart: the silhouette to their centres (Hruschka et al. 2004)."""
    centres = [points[labels == i].mean(axis=0) for i in sorted(set(labels.tolist()))]
    if len(centres) < 2:
        return -1.0
    away = np.sort(np.sqrt([_distance(points, centre) for centre in centres]), axis=0)
    return round(float(np.mean(1 - away[0] / np.maximum(away[1], 1e-12))), 9)


def _farthest_inlier(away: npt.NDArray[np.float64]) -> int:
    """A row that is far from all centres and no outlier: at nine tenths of the distances."""
    order = np.argsort(away, kind="stable")
    beyond = order[away[order] > 1e-12]
    return int(beyond[int(0.9 * (len(beyond) - 1))])


def _distance(points: Matrix, centre: Any) -> npt.NDArray[np.float64]:
    return np.asarray(((points - centre) ** 2).sum(axis=1))


def _topic(weights: Matrix, labels: npt.NDArray[np.int64], number: int, vocabulary: Sequence[str]) -> Topic:
    mine = labels == number
    lead = weights[mine].mean(axis=0) - (weights[~mine].mean(axis=0) if (~mine).any() else 0.0)
    strongest = [int(column) for column in np.argsort(-lead, kind="stable")[:4] if lead[column] > 0]
    return Topic(tuple(vocabulary[column] for column in strongest), int(mine.sum()))


def _places(points: Matrix, labels: npt.NDArray[np.int64]) -> Matrix:
    """Two coordinates, rounded so that pictures repeat.

    The topics' centres are laid out so that near ones are near; a row lies between the centres as it does in full
    space, and spread around that place along the two directions in which its own topic varies most. Rows with the same
    words do not hide one another: each is a little off, along a spiral.
    """
    centres = np.array([points[labels == i].mean(axis=0) for i in range(int(labels.max()) + 1)])
    apart = np.sqrt(np.array([_distance(centres, centre) for centre in centres]))
    layout = _layout(apart)
    squares = np.array([_distance(points, centre) for centre in centres]).T
    scale = max(float(np.median(squares.min(axis=1))), 1e-12)
    near = np.exp(-(squares - squares.min(axis=1, keepdims=True)) / scale)
    placed = (near / near.sum(axis=1, keepdims=True)) @ layout
    spread = _SPREAD * float(apart[apart > 0].mean() if (apart > 0).any() else 1.0)
    for i in range(len(centres)):
        placed[labels == i] += spread * _spread(points[labels == i])
    turns, around = np.arange(len(points)) * 2.399963, spread / 3 * np.sqrt(np.arange(len(points)) / len(points))
    placed += np.column_stack((np.cos(turns), np.sin(turns))) * around[:, None]
    rounded: Matrix = np.round(placed, 6)
    return rounded


def _layout(apart: Matrix) -> Matrix:
    """Points of a plane whose distances are near `apart`: stress majorisation from a circle (de Leeuw 1977)."""
    count = len(apart)
    angles = 2 * np.pi * np.arange(count) / count
    places = np.column_stack((np.cos(angles), np.sin(angles))) * max(float(apart.max()), 1e-12) / 2
    for _ in range(_ROUNDS * 4):
        steps = places[:, None] - places[None]
        now = np.linalg.norm(steps, axis=2)
        ratio = np.where(now > 1e-12, apart / np.where(now > 1e-12, now, 1.0), 0.0)
        places = (ratio[..., None] * steps).sum(axis=1) / count
    return np.asarray(places)


def _spread(mine: Matrix) -> Matrix:
    """Rows of one topic in the two directions in which they vary most, with deviation 1 and no far outliers."""
    centred = mine - mine.mean(axis=0)
    flat = centred @ _directions(mine)[:, :2] if len(mine) > 2 else np.zeros((len(mine), 2))
    deviation = flat.std(axis=0)
    return np.asarray(np.clip(flat / np.where(deviation > 1e-9, deviation, 1.0), -2.5, 2.5))
