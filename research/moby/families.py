"""Stems, word families, and which family stands in which part of the set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from research.moby.thesaurus import digest

SHARES = {"train": 0.70, "vali": 0.15, "test": 0.15}  # of the families
FEWEST_LETTERS = 4  # that taking off an ending may leave
_ENDINGS = (
    "ability", "ibility", "ization", "isation", "fulness", "iveness", "ousness", "ically", "ation", "ition", "ingly",
    "edly", "ness", "ment", "able", "ible", "ance", "ence", "ancy", "ency", "ship", "hood", "less", "tion", "sion",
    "ally", "ical", "ful", "ing", "ity", "ion", "ive", "ous", "ate", "ize", "ise", "ify", "ism", "ist", "ant", "ent",
    "est", "ial", "ary", "ory", "ery", "dom", "al", "ed", "er", "or", "ly", "ic", "en", "y", "i", "e",
)  # fmt: skip
_WORD = re.compile(r"[a-z0-9]+")


def tokens(text: str) -> list[str]:
    """The words of a text, in lower case.

    >>> tokens("A self-made man's")
    ['a', 'self', 'made', 'man', 's']
    """
    return _WORD.findall(text.lower())


@cache
def stem(word: str) -> str:
    """A word without the ending of a plural, a tense or a participle, and without a last e.

    >>> [stem(word) for word in ("hopes", "hoped", "hoping", "cities", "city", "stopped", "glass")]
    ['hop', 'hop', 'hop', 'citi', 'citi', 'stop', 'glas']
    """
    return _last_letters(_uninflected(word))


@cache
def family_stem(word: str) -> str:
    """What is left of a word without endings, one after the other, as long as four letters remain.

    >>> {family_stem(word) for word in ("abandon", "abandoned", "abandonment", "abandons")}
    {'abandon'}
    >>> {family_stem(word) for word in ("happy", "happily", "happiness")}
    {'hap'}
    """
    word = _uninflected(word)
    while True:
        ending = next((e for e in _ENDINGS if word.endswith(e) and len(word) - len(e) >= FEWEST_LETTERS), None)
        if ending is None:
            return _last_letters(word)
        word = word.removesuffix(ending)


def _uninflected(word: str) -> str:
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3:
        word = word[:-1]
    ending = next((e for e in ("ing", "ed") if word.endswith(e) and len(word) - len(e) >= 3), "")
    return word.removesuffix(ending)


def _last_letters(word: str) -> str:
    """Spellings that change before an ending made equal: city and citi(es), stop and stopp(ed), hope and hop(ing)."""
    if len(word) > 3 and word.endswith("ie"):
        return word[:-1]
    if len(word) > 2 and word.endswith("y"):
        return word[:-1] + "i"
    if len(word) > 3 and word.endswith("e"):
        word = word[:-1]
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word


def families(words: Sequence[str], derived: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """The family of each word, called after its first member in the alphabet.

    Words whose first words have one stem are a family, and so are words that WordNet derives from one another if they
    start with the same three letters.
    """
    parent: dict[str, str] = {}

    def find(node: str) -> str:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    for a, b in derived:
        if a[:3] == b[:3]:
            parent[find(_root(a))] = find(_root(b))
    names: dict[str, str] = {}
    for word in sorted(words):
        names.setdefault(find(_root(word)), word)
    return {word: names[find(_root(word))] for word in words}


def _root(word: str) -> str:
    return family_stem(next(iter(tokens(word)), word))


def part_of(family: str, seed: int) -> str:
    """The part of the set a family stands in."""
    place = digest(seed, "part", family) / 2**64
    for part, share in SHARES.items():
        place -= share
        if place < 0:
            return part
    return part


def split_words(family: Mapping[str, str], seed: int) -> dict[str, list[str]]:
    """The words of each part, in an order that the seed draws."""
    found: dict[str, list[str]] = {part: [] for part in SHARES}
    for word in sorted(family, key=lambda word: digest(seed, "query", word)):
        found[part_of(family[word], seed)].append(word)
    return found
