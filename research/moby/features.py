"""The features of pairs of words: how they are written, and what WordNet says of them.

Nothing here knows the thesaurus, so no feature can tell anything about its lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from research.moby import spelling
from research.moby.families import stem, tokens
from research.moby.wordnet import PARTS, Floats, Matrix, WordNet, binary, climb, from_pairs, key

Places = NDArray[np.int64]
Columns = dict[str, NDArray[np.float64]]

FEATURES = {
    "edit_similarity": "1 − edit distance / letters of the longer word",
    "bigrams": "runs of two letters in both words / in either",
    "trigrams": "the same with three letters",
    "prefix": "letters both begin with",
    "suffix": "letters both end with",
    "shared_words": "stems of words in both / in either",
    "document_length": "letters of the document",
    "query_length": "letters of the query",
    "length_difference": "the difference of the two, without sign",
    "document_words": "words in the document",
    "query_words": "words in the query",
    "document_missing": "1 if WordNet does not know the document",
    "query_missing": "1 if WordNet does not know the query",
    "document_senses": "log(1 + senses of the document)",
    "query_senses": "log(1 + senses of the query)",
    "document_noun": "1 if the document has a sense as a noun",
    "document_verb": "1 if it has one as a verb",
    "document_adjective": "1 if it has one as an adjective",
    "document_adverb": "1 if it has one as an adverb",
    "part_overlap": "sum over parts of speech of the smaller share of senses",
    "document_frequency": "log(1 + times the document was met in WordNet's tagged texts)",
    "query_frequency": "log(1 + times the query was met)",
    "frequency_difference": "the difference of the two, without sign",
    "shared_synsets": "senses that are the same synset",
    "synset_share": "the same / senses of either",
    "shared_synonyms": "words in a synset with both / with either",
    "hypernym": "senses of the document right above a sense of the query",
    "hyponym": "senses of the query right above a sense of the document",
    "siblings": "synsets right above senses of both",
    "antonym": "1 if WordNet calls the words opposites",
    "similar": "senses of the document that are similar to a sense of the query",
    "similar_cluster": "synsets similar to senses of both",
    "derived": "1 if one word is derived from the other",
    "other_relation": "senses of the document one pointer of another kind away from a sense of the query",
    "neighbours": "synsets at most one pointer away from both / from either",
    "path_similarity": "1 / (1 + steps on the shortest way over a common hypernym)",
    "wu_palmer": "2 · depth of a common hypernym / (2 · depth + steps), the largest",
    "resnik": "information content of the most special common hypernym, by the number of synsets below",
    "document_depth": "mean depth of the document's senses as nouns and verbs",
    "query_in_gloss": "words of the query in the document's glosses / those in any gloss, weighted by rarity",
    "document_in_gloss": "words of the document in the query's glosses / those in any gloss, weighted by rarity",
    "gloss_cosine": "cosine of the glosses of all senses, weighted by rarity",
    "gloss_overlap": "stems in glosses of both / in those of the shorter, weighted by rarity",
    "sense_cosine": "largest cosine of the glosses of two senses",
    "wide_gloss_cosine": "cosine of the glosses of all senses and of the synsets one pointer away, but for those below",
}
LAYERED = 2  # the first parts of speech, nouns and verbs, have others above them
_NAMED = {"@", "@i", "~", "~i", "&", "!", "+"}  # pointers with features of their own


@dataclass
class Words:
    """What is known of each of some words; rows of all matrices are words.

    Attributes:
        letters: their letters, forwards and backwards.
        columns: what is one number for each word, by name.
        parts: ``(n, 4)`` shares of the parts of speech among the senses.
        sets: what is a set, or a weighted one, for each word, by name.
        glosses: ``(S, T)`` the gloss of each synset, of length 1.
        depths: ``(S,)`` see `WordNet`.
        information: ``(S,)`` see `WordNet`.
    """

    letters: tuple[spelling.Letters, spelling.Letters]
    columns: Columns
    parts: Floats
    sets: dict[str, Matrix]
    glosses: Matrix
    depths: Floats
    information: Floats


def know(words: Sequence[str], net: WordNet) -> Words:
    """Look up words in WordNet."""
    numbers = np.array([net.lemmas.get(key(word), -1) for word in words], np.int64)
    known = np.flatnonzero(numbers >= 0)
    own = from_pairs(list(zip(known.tolist(), numbers[known].tolist(), strict=True)), (len(words), len(net.lemmas)))
    senses = binary(own @ net.senses)
    every = dict.fromkeys(stem(token) for word in words for token in tokens(word))
    sets = _meaning_sets(net, own, senses) | {
        "bigrams": spelling.pieces(words, 2),
        "trigrams": spelling.pieces(words, 3),
        "stems": _stems(words, {term: number for number, term in enumerate(every)}),
        "word_terms": _scaled(_stems(words, net.terms), np.sqrt(net.rarity)),
        "terms": _scaled(binary(senses @ net.glosses), np.sqrt(net.rarity)),
    }
    by_part = senses @ from_pairs(list(enumerate(net.parts.tolist())), (len(net.synsets), len(PARTS)))
    counts = by_part.toarray()
    return Words(
        letters=(spelling.letters_of(words), spelling.letters_of([word[::-1] for word in words])),
        columns=_single_columns(words, net, numbers, senses, counts),
        parts=counts / np.maximum(counts.sum(1, keepdims=True), 1),
        sets=sets,
        glosses=_unit(_scaled(net.glosses, net.rarity)),
        depths=net.depths,
        information=net.information,
    )


def _stems(words: Sequence[str], number: dict[str, int]) -> Matrix:
    """``(n, T)`` 1 where a stem is in a word; stems without a number do not count."""
    pairs = [(row, number[s]) for row, word in enumerate(words) for s in map(stem, tokens(word)) if s in number]
    return from_pairs(pairs, (len(words), len(number)))


def _meaning_sets(net: WordNet, own: Matrix, senses: Matrix) -> dict[str, Matrix]:
    every = set(net.relations)
    aside = binary(sparse.eye_array(len(net.synsets), format="csr") + net.related(every - {"~", "~i"}))
    near = binary(sparse.eye_array(len(net.synsets), format="csr") + net.related(every))
    return {
        "own": own,
        "senses": senses,
        "synonyms": binary(senses @ net.senses.T),
        "hypernyms": binary(senses @ net.up),
        "similar": binary(senses @ net.related(["&"])),
        "others": binary(senses @ net.related(every - _NAMED)),
        "antonyms": binary(own @ net.words_related(["!"])),
        "derived": binary(own @ net.words_related(["+"])),
        "neighbours": binary(senses @ near),
        "above": climb(senses, net.up),
        "gloss": _unit(_scaled(senses @ net.glosses, net.rarity)),
        "wide_gloss": _unit(_scaled(binary(senses @ aside) @ net.glosses, net.rarity)),
    }


def _single_columns(
    words: Sequence[str], net: WordNet, numbers: Places, senses: Matrix, counts: NDArray[np.float64]
) -> Columns:
    layered = binary(_scaled(senses, (net.parts < LAYERED).astype(np.float64)))
    found = {
        "length": np.array([len(word) for word in words], np.float64),
        "words": np.array([len(tokens(word)) for word in words], np.float64),
        "missing": (numbers < 0).astype(np.float64),
        "senses": np.log1p(_sizes(senses)),
        "frequency": np.where(numbers < 0, 0, np.log1p(net.counts[numbers])),
        "depth": layered @ net.depths / np.maximum(_sizes(layered), 1),
    }
    for place, part in enumerate(("noun", "verb", "adjective", "adverb")):
        found[part] = (counts[:, place] > 0).astype(np.float64)
    return found


def pair_features(words: Words, query: Places, document: Places) -> NDArray[np.float32]:
    """``(n, len(FEATURES))`` of pairs, in the order of `FEATURES`; pairs of one query should follow one another."""
    found: Columns = {}
    for group in GROUPS:
        found |= group(words, query, document)
    return np.column_stack([found[name] for name in FEATURES]).astype(np.float32)


def _spelling(words: Words, query: Places, document: Places) -> Columns:
    forward, backward = words.letters
    longest = np.maximum(words.columns["length"][query], words.columns["length"][document])
    return {
        "edit_similarity": 1 - spelling.edit_distances(forward[query], forward[document]) / np.maximum(longest, 1),
        "bigrams": _jaccard(words.sets["bigrams"], query, document),
        "trigrams": _jaccard(words.sets["trigrams"], query, document),
        "prefix": spelling.prefix_lengths(forward[query], forward[document]).astype(np.float64),
        "suffix": spelling.prefix_lengths(backward[query], backward[document]).astype(np.float64),
        "shared_words": _jaccard(words.sets["stems"], query, document),
    }


def _single(words: Words, query: Places, document: Places) -> Columns:
    columns = words.columns
    found = {f"query_{name}": columns[name][query] for name in ("length", "words", "missing", "senses", "frequency")}
    found |= {f"document_{name}": column[document] for name, column in columns.items()}
    for name in ("length", "frequency"):
        found[f"{name}_difference"] = np.abs(columns[name][query] - columns[name][document])
    found["part_overlap"] = np.minimum(words.parts[query], words.parts[document]).sum(1)
    return found


def _relations(words: Words, query: Places, document: Places) -> Columns:
    sets = words.sets

    def shared(a: str, b: str) -> Floats:
        return _products(sets[a], sets[b], query, document)

    return {
        "shared_synsets": shared("senses", "senses"),
        "synset_share": _jaccard(sets["senses"], query, document),
        "shared_synonyms": _jaccard(sets["synonyms"], query, document),
        "hypernym": shared("hypernyms", "senses"),
        "hyponym": shared("senses", "hypernyms"),
        "siblings": shared("hypernyms", "hypernyms"),
        "antonym": shared("antonyms", "own"),
        "similar": shared("similar", "senses"),
        "similar_cluster": shared("similar", "similar"),
        "derived": shared("derived", "own"),
        "other_relation": shared("others", "senses"),
        "neighbours": _jaccard(sets["neighbours"], query, document),
    }


def _hierarchy(words: Words, query: Places, document: Places) -> Columns:
    """Over the synsets above both words, with the steps to them from the nearest sense of each."""
    above = words.sets["above"]
    a, b = above[query], above[document]
    there_a, there_b = binary(a), binary(b)
    left, right = a.multiply(there_b).tocsr(), there_a.multiply(b).tocsr()
    steps = left.data + right.data - 2  # both hold steps plus 1, in the same places
    depth = 2 * words.depths[left.indices]
    return {
        "path_similarity": _row_max(1 / (1 + steps), left.indptr),
        "wu_palmer": _row_max(depth / (depth + steps), left.indptr),
        "resnik": _row_max(words.information[left.indices], left.indptr),
    }


def _glosses(words: Words, query: Places, document: Places) -> Columns:
    sets, terms, own = words.sets, words.sets["terms"], words.sets["word_terms"]
    size, own_size = _squares(terms), _squares(own)
    shorter = np.minimum(size[query], size[document])
    return {
        "query_in_gloss": _ratio(_products(own, terms, query, document), own_size[query]),
        "document_in_gloss": _ratio(_products(terms, own, query, document), own_size[document]),
        "gloss_cosine": _products(sets["gloss"], sets["gloss"], query, document),
        "gloss_overlap": _ratio(_products(terms, terms, query, document), shorter),
        "sense_cosine": _sense_cosines(words, query, document),
        "wide_gloss_cosine": _products(sets["wide_gloss"], sets["wide_gloss"], query, document),
    }


def _sense_cosines(words: Words, query: Places, document: Places) -> Floats:
    """The largest product of the glosses of two senses, query by query."""
    senses = words.sets["senses"]
    out = np.zeros(len(query))
    borders = np.flatnonzero(np.diff(query)) + 1
    for start, stop in zip([0, *borders], [*borders, len(query)], strict=True):
        own = words.glosses[senses[query[[start]]].indices]
        others = senses[document[start:stop]]
        if own.shape[0] and others.nnz:
            best = (words.glosses[others.indices] @ own.T).max(axis=1).toarray().ravel()
            out[start:stop] = _row_max(best, others.indptr)
    return out


GROUPS: tuple[Callable[[Words, Places, Places], Columns], ...] = (
    _spelling, _single, _relations, _hierarchy, _glosses,
)  # fmt: skip


def _products(a: Matrix, b: Matrix, query: Places, document: Places) -> Floats:
    """Sums over columns of the products of rows of two matrices; of sets, the number of things in both."""
    return np.asarray(a[query].multiply(b[document]).sum(axis=1), np.float64).ravel()


def _jaccard(sets: Matrix, query: Places, document: Places) -> Floats:
    both, sizes = _products(sets, sets, query, document), _sizes(sets)
    return _ratio(both, sizes[query] + sizes[document] - both)


def _sizes(sets: Matrix) -> Floats:
    return np.asarray(np.diff(sets.indptr), np.float64)


def _squares(matrix: Matrix) -> Floats:
    return np.asarray(matrix.multiply(matrix).sum(axis=1), np.float64).ravel()


def _ratio(a: Floats, b: Floats) -> Floats:
    """The quotient, 0 where nothing is divided by nothing."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _scaled(matrix: Matrix, weights: Floats) -> Matrix:
    """Columns times their weights, in sorted rows."""
    out = sparse.csr_array(matrix, copy=True)
    out.sort_indices()
    out.data = out.data * weights[out.indices]
    return out


def _unit(matrix: Matrix) -> Matrix:
    """Rows made length 1; rows of zeros stay."""
    lengths = np.repeat(np.sqrt(_squares(matrix)), np.diff(matrix.indptr))
    matrix.data = _ratio(matrix.data, lengths)
    return matrix


def _row_max(values: Floats, starts: Places) -> Floats:
    """The largest value of each row, 0 of rows without any."""
    out = np.zeros(len(starts) - 1)
    filled = np.flatnonzero(np.diff(starts))
    if len(filled):
        out[filled] = np.maximum.reduceat(values, starts[filled])
    return out
