"""WordNet's database files as sparse matrices: senses, relations, glosses and the hierarchy above them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lgmml_torch.checks import DataError
from research.moby.families import stem, tokens

PARTS = ("noun", "verb", "adj", "adv")
FILES = (*(f"data.{part}" for part in PARTS), "index.sense")
_PART = {"n": 0, "v": 1, "a": 2, "s": 2, "r": 3}
_MARKER = re.compile(r"\((?:a|p|ip)\)$")  # where an adjective may stand

Matrix = Any  # of scipy, in compressed rows
Floats = NDArray[np.float64]
Pointer = tuple[str, tuple[int, int], str]  # symbol, part of speech and offset, numbers of both words


def key(word: str) -> str:
    """How a word is looked up: blanks, hyphens and underscores are the same.

    >>> key("Avant-garde"), key("take part")
    ('avant_garde', 'take_part')
    """
    return word.lower().replace(" ", "_").replace("-", "_")


@dataclass
class Synset:
    """One meaning: its part of speech, its words, its pointers to others, and what its gloss says."""

    part: int
    words: list[str]
    pointers: list[Pointer]
    gloss: str


def parse_synset(line: str) -> tuple[int, Synset]:
    """The offset of a synset, and the synset, from a line of a data file.

    >>> parse_synset("00002137 03 n 02 cat 0 true_cat 0 001 @ 00001740 n 0000 | feline mammal")[1].words
    ['cat', 'true_cat']
    """
    fields, _, gloss = line.partition("|")
    cells = fields.split()
    part, count = _PART[cells[2]], int(cells[3], 16)
    words = [key(_MARKER.sub("", word)) for word in cells[4 : 4 + 2 * count : 2]]
    start = 5 + 2 * count
    quads = [cells[at : at + 4] for at in range(start, start + 4 * int(cells[start - 1]), 4)]
    pointers = [(symbol, (_PART[kind], int(offset)), ends) for symbol, offset, kind, ends in quads]
    return int(cells[0]), Synset(part, words, pointers, gloss.strip())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are no part of the licence, which is set in by two blanks, numbered from 1."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        yield from ((number, line) for number, line in enumerate(stream, 1) if line.strip() and line[:2] != "  ")


@dataclass
class WordNet:
    """All of WordNet.

    Attributes:
        synsets: meanings, in the order of the files.
        lemmas: the number of each word, by its `key`.
        counts: how often each was met in WordNet's tagged texts.
        relations: symbol to pairs of synsets.
        word_relations: symbol to pairs of words, for pointers between words.
    """

    synsets: list[Synset]
    lemmas: dict[str, int]
    counts: Floats
    relations: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    word_relations: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def related(self, symbols: Iterable[str]) -> Matrix:
        """``(S, S)`` 1 where a pointer of one of these kinds leads from a synset to another."""
        pairs = [pair for symbol in symbols for pair in self.relations.get(symbol, ())]
        return from_pairs(pairs, (len(self.synsets), len(self.synsets)))

    def words_related(self, symbols: Iterable[str]) -> Matrix:
        """``(L, L)`` the same between words."""
        pairs = [pair for symbol in symbols for pair in self.word_relations.get(symbol, ())]
        return from_pairs(pairs, (len(self.lemmas), len(self.lemmas)))

    def derived_words(self) -> Iterator[tuple[str, str]]:
        """Pairs of words that are derived from one another."""
        names = list(self.lemmas)
        for a, b in self.word_relations.get("+", ()):
            yield names[a], names[b]

    @cached_property
    def senses(self) -> Matrix:
        """``(L, S)`` 1 where a synset is a meaning of a word."""
        pairs = [(self.lemmas[word], number) for number, synset in enumerate(self.synsets) for word in synset.words]
        return from_pairs(pairs, (len(self.lemmas), len(self.synsets)))

    @cached_property
    def parts(self) -> NDArray[np.int64]:
        """``(S,)`` parts of speech, as positions in `PARTS`."""
        return np.array([synset.part for synset in self.synsets], np.int64)

    @cached_property
    def up(self) -> Matrix:
        """``(S, S)`` from synsets to those right above them."""
        return self.related(("@", "@i"))

    @cached_property
    def depths(self) -> Floats:
        """``(S,)`` the number of synsets on the shortest way from a top, both counted."""
        tops = np.flatnonzero(np.diff(self.up.indptr) == 0)
        found = climb(from_pairs([(0, int(top)) for top in tops], (1, len(self.synsets))), self.up.T.tocsr())
        return np.asarray(np.maximum(found.toarray()[0], 1), np.float64)

    @cached_property
    def information(self) -> Floats:
        """``(S,)`` information content by structure: 1 − log(synsets below, itself counted) / log(all of its kind)."""
        below = np.diff(climb(sparse.eye_array(len(self.synsets), format="csr"), self.up).tocsc().indptr)
        kinds = np.bincount(self.parts, minlength=len(PARTS))
        return np.asarray(1 - np.log(below) / np.log(np.maximum(kinds, 2))[self.parts], np.float64)

    @cached_property
    def terms(self) -> dict[str, int]:
        """The number of each stem in the glosses."""
        found: dict[str, int] = {}
        for synset in self.synsets:
            for token in tokens(synset.gloss):
                found.setdefault(stem(token), len(found))
        return found

    @cached_property
    def glosses(self) -> Matrix:
        """``(S, T)`` 1 where a stem is in a gloss."""
        terms = self.terms
        pairs = [(i, terms[stem(token)]) for i, synset in enumerate(self.synsets) for token in tokens(synset.gloss)]
        return from_pairs(pairs, (len(self.synsets), len(terms)))

    @cached_property
    def rarity(self) -> Floats:
        """``(T,)`` log((1 + glosses) / (1 + glosses with the stem)), the weight of each stem."""
        used = np.bincount(self.glosses.indices, minlength=len(self.terms))
        return np.asarray(np.log((1 + len(self.synsets)) / (1 + used)), np.float64)


def from_pairs(pairs: list[tuple[int, int]], shape: tuple[int, int]) -> Matrix:
    """A matrix of zeros with 1 in these places."""
    rows, columns = np.array(pairs, np.int64).reshape(-1, 2).T
    return binary(sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=shape))


def binary(matrix: Matrix) -> Matrix:
    """1 where something is, in compressed and sorted rows."""
    out = sparse.csr_array(matrix)
    out.sum_duplicates()
    out.eliminate_zeros()
    out.data = np.ones(len(out.data))
    return out


def climb(start: Matrix, up: Matrix) -> Matrix:
    """Fewest steps from any column of a row of ``start`` to each column, plus 1; circles do no harm."""
    reached = distances = frontier = binary(start)
    steps = 1
    while frontier.nnz:
        steps += 1
        frontier = binary(frontier @ up)
        frontier = binary(frontier - frontier.multiply(reached))
        reached = reached + frontier
        distances = distances + steps * frontier
    distances.sort_indices()
    return distances


def read_wordnet(folder: Path) -> WordNet:
    """Read the data files, and from ``index.sense`` how often words were met.

    Raises:
        DataError: the line that is none of WordNet's.
    """
    synsets: list[Synset] = []
    places: dict[tuple[int, int], int] = {}
    for file in FILES[:-1]:
        for number, line in _lines(folder / file):
            try:
                offset, synset = parse_synset(line)
            except (ValueError, IndexError, KeyError):
                raise DataError(f"{folder / file}:{number}: not a line of WordNet's data files") from None
            places[synset.part, offset] = len(synsets)
            synsets.append(synset)
    if not synsets:
        raise DataError(f"{folder}: the data files of WordNet hold no synset")
    lemmas: dict[str, int] = {}
    for synset in synsets:
        for word in synset.words:
            lemmas.setdefault(word, len(lemmas))
    found = WordNet(synsets, lemmas, _tag_counts(folder / FILES[-1], lemmas))
    _link(found, places, folder)
    return found


def _tag_counts(path: Path, lemmas: dict[str, int]) -> Floats:
    counts = np.zeros(len(lemmas))
    for number, line in _lines(path):
        cells = line.split()
        word = lemmas.get(key(cells[0].partition("%")[0]))
        if len(cells) != 4 or not cells[3].isdigit():
            raise DataError(f"{path}:{number}: not a line of WordNet's index of senses")
        if word is not None:
            counts[word] += int(cells[3])
    return counts


def _link(net: WordNet, places: dict[tuple[int, int], int], folder: Path) -> None:
    """Find the ends of all pointers."""
    for source, synset in enumerate(net.synsets):
        for symbol, place, ends in synset.pointers:
            target = places.get(place)
            if target is None:
                name = f"{place[1]:08d} in data.{PARTS[place[0]]}"
                raise DataError(f"{folder}: {synset.words[0]!r} points to synset {name}, which is not there")
            net.relations.setdefault(symbol, []).append((source, target))
            own, other = int(ends[:2], 16), int(ends[2:], 16)
            if own and other:
                pair = net.lemmas[synset.words[own - 1]], net.lemmas[net.synsets[target].words[other - 1]]
                net.word_relations.setdefault(symbol, []).append(pair)
