"""The thesaurus: its lists, the documents of a query and their grades."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import DataError

LISTED = 20  # at most so many documents that the query lists
DISTRACTORS = 60  # and so many that it does not
FEWEST_LISTED = 5  # queries with less are left out
FEWEST_DISTRACTORS = 20

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Candidates:
    """The documents of one query, in the order of the alphabet.

    Attributes:
        words: ``(n,)`` their numbers.
        grades: ``(n,)`` 2 where both list each other, 1 where only the query lists the document, else 0.
    """

    words: Numbers
    grades: Numbers


class Thesaurus:
    """Root words and the words each lists; capitals do not count.

    Attributes:
        words: all words in the order of the alphabet; everything else gives their positions here.
        roots: ``(R,)`` the root words.
        starts: ``(W + 1,)`` where the list of each word starts in ``listed``; words that are no root have none.
        listed: ``(P,)`` the lists one after the other, each ascending.
    """

    def __init__(self, lists: dict[str, set[str]]) -> None:
        self.words = sorted(set(lists).union(*lists.values()))
        place = {word: number for number, word in enumerate(self.words)}
        every = [sorted(place[word] for word in lists.get(root, ())) for root in self.words]
        self.roots: Numbers = np.array(sorted(place[root] for root in lists), np.int64)
        self.starts: Numbers = np.cumsum([0, *(len(one) for one in every)])
        self.listed: Numbers = np.fromiter((word for one in every for word in one), np.int64, self.starts[-1])

    def listed_by(self, root: int) -> Numbers:
        """The words a root word lists."""
        return self.listed[self.starts[root] : self.starts[root + 1]]

    @cached_property
    def _listing(self) -> tuple[Numbers, Numbers]:
        """The lists turned around: where each word's roots start, and the roots."""
        owners = np.repeat(np.arange(len(self.words)), np.diff(self.starts))
        order = np.argsort(self.listed, kind="stable")
        sizes = np.bincount(self.listed, minlength=len(self.words))
        return np.concatenate([[0], np.cumsum(sizes)]), owners[order]

    def listing(self, word: int) -> Numbers:
        """The root words that list a word."""
        starts, owners = self._listing
        return owners[starts[word] : starts[word + 1]]

    def two_steps(self, root: int) -> Numbers:
        """Words that are listed by words the root lists.

        Words of its own list, and words whose list holds the root, are none of them.
        """
        own = self.listed_by(root)
        reached = np.unique(np.concatenate([self.listed_by(word) for word in own]))
        return np.setdiff1d(reached, np.concatenate([own, self.listing(root), [root]]))

    def candidates(self, root: int, seed: int) -> Candidates | None:
        """Draw the documents of a query; None where there are too few.

        Words have equal chances among those listed and among the distractors. What is drawn depends on the seed, the
        query, its list, the lists of the words in it, and which words list the query, on nothing else.
        """
        own = self.listed_by(root)
        if len(own) < FEWEST_LISTED:
            return None
        far = self.two_steps(root)
        if len(far) < FEWEST_DISTRACTORS:
            return None
        rng = np.random.default_rng(digest(seed, "documents", self.words[root]))
        near = rng.choice(own, min(LISTED, len(own)), replace=False)
        far = rng.choice(far, min(DISTRACTORS, len(far)), replace=False)
        words = np.concatenate([near, far])
        grades = np.concatenate([1 + np.isin(near, self.listing(root)), np.zeros(len(far), np.int64)])
        order = np.argsort(words)
        return Candidates(words[order], grades[order])


def digest(seed: int, purpose: str, word: str) -> int:
    """A number below 2⁶⁴ that looks drawn at random, the same on every machine."""
    content = f"{seed} {purpose} {word}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def read_thesaurus(path: Path) -> Thesaurus:
    """Read lines ``root,word,word,…``; roots that differ by capitals only share one list, and no word lists itself.

    Raises:
        DataError: if the file holds no list.
    """
    lists: dict[str, set[str]] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path}: the thesaurus must be a text file in UTF-8") from None
    for line in text.splitlines():
        root, *rest = (" ".join(word.lower().split()) for word in line.split(","))
        if root:
            lists.setdefault(root, set()).update(word for word in rest if word and word != root)
    if not any(lists.values()):
        raise DataError(f"{path}: no line lists words for a root word, as in root,word,word")
    return Thesaurus(lists)
