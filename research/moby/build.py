"""From words to lists: queries drawn by family, their documents, grades and features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import DataError, check_positive
from lgmml_torch.progress import progress_bar
from research.moby.families import SHARES, families, split_words
from research.moby.features import FEATURES, Words, know, pair_features
from research.moby.thesaurus import Numbers, Thesaurus
from research.moby.wordnet import WordNet

QUERIES = 8000  # that train
HELD_OUT = 0.15  # of that number validate, and as many test
STEP = 100  # queries whose features are found at a time


@dataclass(frozen=True)
class Part:
    """Some lists, one after the other.

    Attributes:
        queries: ``(n,)`` the query of each row.
        documents: ``(n,)`` the document.
        labels: ``(n,)`` grades 0, 1 and 2.
        features: ``(n, len(FEATURES))``.
    """

    queries: list[str]
    documents: list[str]
    labels: NDArray[np.int8]
    features: NDArray[np.float32]

    @property
    def num_queries(self) -> int:
        """How many lists there are."""
        return len(set(self.queries))


def sizes(queries: int) -> dict[str, int]:
    """How many queries each part gets when so many train."""
    held_out = max(round(HELD_OUT * queries), 1)
    return {part: queries if part == "train" else held_out for part in SHARES}


def build(thesaurus: Thesaurus, net: WordNet, *, queries: int = QUERIES, seed: int = 0) -> dict[str, Part]:
    """Draw queries and documents, and find their features; a part that has fewer queries than asked gets all it has.

    Raises:
        DataError: if a part would be empty.
    """
    check_positive("queries", queries)
    names = thesaurus.words
    parts = split_words(families([names[root] for root in thesaurus.roots], net.derived_words()), seed)
    drawn = {part: _draw(thesaurus, parts[part], wanted, seed, part) for part, wanted in sizes(queries).items()}
    used = np.unique(np.concatenate([words for rows in drawn.values() for words in (rows.query, rows.document)]))
    known = know([names[word] for word in used], net)
    found = {}
    for part, rows in drawn.items():
        features = _features(known, np.searchsorted(used, rows.query), np.searchsorted(used, rows.document), part)
        words = [[names[word] for word in column] for column in (rows.query, rows.document)]
        found[part] = Part(words[0], words[1], rows.grades.astype(np.int8), features)
    return found


class _Rows(NamedTuple):
    """Query, document and grade of each row; words by their numbers in the thesaurus."""

    query: Numbers
    document: Numbers
    grades: Numbers


def _draw(thesaurus: Thesaurus, words: Sequence[str], wanted: int, seed: int, part: str) -> _Rows:
    """The rows of the first queries that have enough documents."""
    place = {thesaurus.words[root]: int(root) for root in thesaurus.roots}
    lists: list[_Rows] = []
    with progress_bar(f"Drawing documents for {part}", total=wanted) as report:
        for word in words:
            if len(lists) == wanted:
                break
            if (found := thesaurus.candidates(place[word], seed)) is not None:
                lists.append(_Rows(np.full(len(found.words), place[word]), found.words, found.grades))
                report(len(lists))
    if not lists:
        raise DataError(f"the thesaurus is too small: none of its root words can be a query of the part {part!r}")
    return _Rows(*(np.concatenate(columns) for columns in zip(*lists, strict=True)))


def _features(known: Words, query: Numbers, document: Numbers, part: str) -> NDArray[np.float32]:
    """Some whole lists at a time, because the sets of all would not fit into memory."""
    out = np.empty((len(query), len(FEATURES)), np.float32)
    borders = [0, *(np.flatnonzero(np.diff(query)) + 1).tolist(), len(query)]
    with progress_bar(f"Comparing words for {part}", total=len(query)) as report:
        for first in range(0, len(borders) - 1, STEP):
            rows = slice(borders[first], borders[min(first + STEP, len(borders) - 1)])
            out[rows] = pair_features(known, query[rows], document[rows])
            report(rows.stop)
    return out
