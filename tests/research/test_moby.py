"""The set of thesaurus words: grades, features and families on a thesaurus and a WordNet written by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lgmml_torch.data.catalog import open_dataset
from research.moby import thesaurus as lists_module
from research.moby.__main__ import main
from research.moby.build import Part, build, sizes
from research.moby.families import families, family_stem, part_of, split_words
from research.moby.features import FEATURES, know, pair_features
from research.moby.spelling import edit_distances, letters_of
from research.moby.thesaurus import Thesaurus, read_thesaurus
from research.moby.wordnet import WordNet, read_wordnet

pytest.importorskip("pyarrow")

LICENCE = "  1 This software and database is being provided to you\n  2 without any warranty\n"
WORDNET = {
    "data.noun": """\
00000001 03 n 01 entity 0 002 ~ 00000002 n 0000 ~ 00000005 n 0000 | that which exists
00000002 03 n 02 animal 0 beast 0 003 @ 00000001 n 0000 ~ 00000003 n 0000 ~ 00000004 n 0000 | a living creature
00000003 05 n 01 dog 0 001 @ 00000002 n 0000 | an animal that barks
00000004 05 n 02 cat 0 true_cat 0 001 @ 00000002 n 0000 | an animal that purrs
00000005 11 n 01 barking 0 002 @ 00000001 n 0000 + 00000001 v 0101 | the noise of a dog
""",
    "data.verb": """\
00000001 32 v 01 bark 0 001 + 00000005 n 0101 01 + 02 00 | make the noise of a dog
00000002 30 v 01 restrain 0 001 @ 00000003 v 0000 00 | hold back
00000003 30 v 01 inhibit 0 001 @ 00000002 v 0000 00 | limit
""",
    "data.adj": """\
00000001 00 a 01 good(p) 0 003 ! 00000002 a 0101 & 00000003 a 0000 & 00000004 a 0000 | of high quality
00000002 00 a 01 bad 0 001 ! 00000001 a 0101 | of low quality
00000003 00 s 01 fine 0 001 & 00000001 a 0000 | better than most
00000004 00 s 01 first-rate 0 001 & 00000001 a 0000 | best of all
""",
    "data.adv": "00000001 02 r 01 well 0 001 \\ 00000001 a 0101 | in a good way\n",
    "index.sense": """\
bark%2:32:00:: 00000001 1 3
dog%1:05:00:: 00000003 1 42
first-rate%5:00:00:good:00 00000004 1 2
""",
}
STEMS = [a + b for a in ("bar", "cor", "dun", "fel", "gim", "hol") for b in ("dock", "lump", "gorp", "zund", "mik")]
FORMS = [base + ending for base in STEMS for ending in ("", "s", "ing", "ment")]
JUMPS = (1, 2, 5, 9, 14, 20, 27, -1, -5)  # from a word to those it lists; two steps lead to about forty others


def ring() -> dict[str, set[str]]:
    """A thesaurus whose every word lists those some jumps away, in an order that has families apart."""
    order = sorted(FORMS, key=lambda word: word[::-1])
    return {word: {order[(at + jump) % len(order)] for jump in JUMPS} for at, word in enumerate(order)}


def write_lines(path: Path, lists: Mapping[str, set[str]]) -> Path:
    path.write_text("".join(",".join([root, *sorted(rest)]) + "\r\n" for root, rest in lists.items()))
    return path


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    folder = tmp_path / "dict"
    folder.mkdir()
    for name, text in WORDNET.items():
        (folder / name).write_text(("" if name == "index.sense" else LICENCE) + text)
    return folder


@pytest.fixture
def net(wordnet: Path) -> WordNet:
    return read_wordnet(wordnet)


def compare(net: WordNet, query: str, document: str) -> dict[str, float]:
    found = pair_features(know([query, document], net), np.array([0]), np.array([1]))
    return dict(zip(FEATURES, found[0].tolist(), strict=True))


def rows_of(parts: Mapping[str, Part]) -> dict[str, dict[str, tuple[int, bytes]]]:
    """Query to document to grade and features."""
    found: dict[str, dict[str, tuple[int, bytes]]] = {}
    for part in parts.values():
        for query, document, label, row in zip(part.queries, part.documents, part.labels, part.features, strict=True):
            found.setdefault(query, {})[document] = int(label), row.tobytes()
    return found


LISTS = {
    "glad": {"happy", "merry", "blithe", "Glad"},
    "Happy": {"glad", "lucky", "content"},
    "merry": {"drunk", "happy", "jolly"},
    "jolly": {"glad", "fat"},
}


class TestGrades:
    @pytest.fixture
    def thesaurus(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Thesaurus:
        monkeypatch.setattr(lists_module, "FEWEST_LISTED", 2)
        monkeypatch.setattr(lists_module, "FEWEST_DISTRACTORS", 1)
        return read_thesaurus(write_lines(tmp_path / "words.txt", LISTS))

    def test_mutual_one_way_and_two_steps(self, thesaurus: Thesaurus) -> None:
        found = thesaurus.candidates(thesaurus.words.index("glad"), seed=0)
        assert found is not None
        graded = {thesaurus.words[word]: grade for word, grade in zip(found.words, found.grades, strict=True)}
        # jolly lists glad without being listed, and fat is three steps away: neither is a document
        assert graded == {"happy": 2, "merry": 1, "blithe": 1, "lucky": 0, "content": 0, "drunk": 0}
        assert [thesaurus.words[word] for word in found.words] == sorted(graded)


class TestFeatures:
    def test_the_hierarchy(self, net: WordNet) -> None:
        found = compare(net, "dog", "cat")
        assert found["path_similarity"] == pytest.approx(1 / 3)
        assert found["wu_palmer"] == pytest.approx(2 * 2 / (2 * 2 + 2))  # animal is the second below the top
        assert found["resnik"] == pytest.approx(1 - math.log(3) / math.log(5))  # three of five nouns
        assert (found["siblings"], found["hypernym"], found["shared_synsets"]) == (1, 0, 0)
        assert found["document_depth"] == 3
        assert compare(net, "restrain", "inhibit")["path_similarity"] == pytest.approx(1 / 2)  # a circle

    def test_relations(self, net: WordNet) -> None:
        assert compare(net, "dog", "animal")["hypernym"] == compare(net, "animal", "dog")["hyponym"] == 1
        assert compare(net, "dog", "animal")["hyponym"] == 0
        assert compare(net, "good", "bad")["antonym"] == 1
        assert compare(net, "good", "fine")["similar"] == 1
        assert compare(net, "fine", "first rate")["similar_cluster"] == 1
        assert compare(net, "bark", "barking")["derived"] == 1
        assert compare(net, "well", "good")["other_relation"] == 1
        same = compare(net, "Animal", "beast")
        assert [same[name] for name in ("shared_synsets", "synset_share", "shared_synonyms")] == [1, 1, 1]
        assert same["path_similarity"] == same["sense_cosine"] == pytest.approx(1)
        # at most one pointer from dog: itself, animal; from cat: itself, animal
        assert compare(net, "dog", "cat")["neighbours"] == pytest.approx(1 / 3)

    def test_spelling(self, net: WordNet) -> None:
        found = compare(net, "bark", "barking")
        assert (found["prefix"], found["suffix"], found["length_difference"]) == (4, 0, 3)
        assert found["edit_similarity"] == pytest.approx(1 - 3 / 7)
        assert found["bigrams"] == pytest.approx(4 / 9)  # ^b ba ar rk of these and k$ ki in ng g$
        assert found["shared_words"] == 1
        words = ["", "a", "kitten", "sitting", "mitten"]
        pairs = [(a, b) for a in words for b in words]
        found_all = edit_distances(letters_of([a for a, _ in pairs]), letters_of([b for _, b in pairs]))
        assert found_all.reshape(5, 5)[2].tolist() == [6, 6, 0, 3, 1]
        assert (found_all.reshape(5, 5) == found_all.reshape(5, 5).T).all()


class TestSets:
    def test_features_depend_on_the_two_words_only(self, net: WordNet) -> None:
        lists = ring()
        order = list(lists)
        moved = {word: lists[order[at - 7]] - {word} for at, word in enumerate(order)}  # every list at another word
        before, after = (rows_of(build(Thesaurus(found), net, queries=500)) for found in (lists, moved))
        both = [(query, document) for query in before for document in before[query] if document in after[query]]
        grades = [(before[query][document][0], after[query][document][0]) for query, document in both]
        assert any(a != b for a, b in grades)
        assert all(before[query][document][1] == after[query][document][1] for query, document in both)

    def test_families_never_cross(self, net: WordNet) -> None:
        parts = build(Thesaurus(ring()), net, queries=500)
        found = {name: {family_stem(query) for query in part.queries} for name, part in parts.items()}
        assert sum(len(stems) for stems in found.values()) == len(set().union(*found.values())) == len(STEMS)
        assert all(found.values())

    def test_families(self) -> None:
        words = ["abandon", "abandoned", "abandonment", "happy", "happiness", "decide", "decision", "sun"]
        found = families(words, [("decide", "decision"), ("sun", "solar")])
        assert [found[word] for word in words] == ["abandon"] * 3 + ["happiness"] * 2 + ["decide"] * 2 + ["sun"]

    def test_parts_have_their_shares_and_take_the_seed(self) -> None:
        own = {f"word{n}": f"word{n}" for n in range(2000)}
        found = split_words(own, seed=0)
        assert [len(found[part]) / 2000 for part in ("train", "vali", "test")] == pytest.approx(
            [0.7, 0.15, 0.15], abs=0.03
        )
        assert all(part_of(word, 0) == part for part, words in found.items() for word in words)
        assert found != split_words(own, seed=1)
        assert sizes(8000) == {"train": 8000, "vali": 1200, "test": 1200}


class TestCommand:
    def test_the_package_reads_the_folder(self, tmp_path: Path, wordnet: Path) -> None:
        moby, folder = write_lines(tmp_path / "words.txt", ring()), tmp_path / "set"
        words = ["--output", str(folder), "--moby", str(moby), "--wordnet", str(wordnet), "--queries", "40"]
        assert main(words) == 0
        parts = open_dataset(folder)
        assert list(parts) == ["train", "valid", "test"]
        assert parts["train"].feature_names == tuple(FEATURES) == tuple((folder / "features.txt").read_text().split())
        assert [part.num_queries for part in parts.values()] == [40, 6, 6]
        assert set(parts["train"].labels.tolist()) == {0, 1, 2}
        assert set(parts["train"].qids) <= set(FORMS)
        assert set(parts["train"].doc_ids or ()) <= set(FORMS)
