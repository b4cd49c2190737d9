"""How alike words are written: letters, pieces of words, edits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from research.moby.wordnet import Matrix, from_pairs

Letters = NDArray[np.int32]  # (n, L) code points, 0 behind the end


def letters_of(words: Sequence[str]) -> Letters:
    """The letters of each word."""
    longest = max((len(word) for word in words), default=0)
    return np.array([[ord(letter) for letter in word.ljust(longest, "\0")] for word in words], np.int32)


def pieces(words: Sequence[str], size: int) -> Matrix:
    """``(n, P)`` 1 where a run of so many letters is in a word, which begins and ends with a mark of its own."""
    number: dict[str, int] = {}
    pairs = []
    for row, word in enumerate(words):
        text = f"^{word}$"
        pairs += [
            (row, number.setdefault(text[at : at + size], len(number))) for at in range(max(len(text) - size + 1, 0))
        ]
    return from_pairs(pairs, (len(words), len(number)))


def prefix_lengths(a: Letters, b: Letters) -> NDArray[np.int64]:
    """How many letters the words begin with in common."""
    same = (a == b) & (a > 0)
    return np.asarray(np.cumprod(same, axis=1).sum(1), np.int64)


def edit_distances(a: Letters, b: Letters) -> NDArray[np.int64]:
    """Fewest letters to put in, take out or change to make one word the other (Levenshtein), row by row.

    >>> edit_distances(letters_of(["kitten", "abc"]), letters_of(["sitting", ""])).tolist()
    [3, 3]
    """
    ends_a, ends_b = (a > 0).sum(1), (b > 0).sum(1)
    a, b = a[:, : ends_a.max(initial=0)], b[:, : ends_b.max(initial=0)]
    places = np.arange(b.shape[1] + 1, dtype=np.int16)
    row = np.tile(places, (len(a), 1))
    out = np.where(ends_a == 0, ends_b, 0)
    for step in range(1, a.shape[1] + 1):
        fresh = np.empty_like(row)
        fresh[:, 0] = step
        fresh[:, 1:] = np.minimum(row[:, 1:] + 1, row[:, :-1] + (a[:, step - 1, None] != b))
        row = np.minimum.accumulate(fresh - places, axis=1) + places  # taking out letters, from left to right
        done = ends_a == step
        out[done] = row[done, ends_b[done]]
    return np.asarray(out, np.int64)
