"""Files of tree libraries, looked through without the libraries: what is whole passes, and each fault is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lgmml_torch.checks import CheckpointError
from lgmml_torch.models.tree_files import OF_LEAVES, OF_NODES, check_content, file_kind, trees_of

HEAD = {
    "max_feature_idx": "2",
    "num_tree_per_iteration": "1",
    "feature_names": "a b c",
    "feature_infos": "[0:1] [0:1] none",
}
# Four leaves: node 0 leads to 1 and 2, these to the leaves −1 to −4.
TREE = {
    "num_leaves": "4",
    "num_cat": "0",
    "split_feature": "0 2 1",
    "split_gain": "3 2 1",
    "threshold": "0.5 -7.5 99",
    "decision_type": "2 2 10",
    "left_child": "1 -1 -3",
    "right_child": "2 -2 -4",
    "leaf_value": "0.1 -0.2 0.3 0",
    "leaf_weight": "1 1 1 1",
    "leaf_count": "5 5 5 5",
    "internal_value": "0 0 0",
    "internal_weight": "1 1 1",
    "internal_count": "20 10 10",
    "is_linear": "0",
    "shrinkage": "0.1",
}
LEAF = {"num_leaves": "1", "num_cat": "0", "leaf_value": "0.5", "shrinkage": "1"}
CATEGORIES = {
    "num_cat": "2",
    "decision_type": "1 2 9",
    "threshold": "0 -7.5 1",
    "cat_boundaries": "0 1 3",
    "cat_threshold": "6 1 2",
}
LINEAR = {
    "is_linear": "1",
    "leaf_const": "1 2 3 4",
    "num_features": "2 0 1 1",
    "leaf_features": "0 2 1 0",
    "leaf_coeff": "0.5 1.5 -1 2",
}
NOTES = "end of trees\n\nfeature_importances:\na=1\n\npandas_categorical:null\n"


def changed(fields: dict[str, str], change: dict[str, str | None]) -> dict[str, str]:
    """With other fields; None takes one away."""
    return {key: value for key, value in {**fields, **change}.items() if value is not None}


def tree_text(number: int, fields: dict[str, str], end: str = "\n\n") -> str:
    return f"Tree={number}\n" + "\n".join(f"{key}={value}" for key, value in fields.items()) + end


def lightgbm_text(*trees: dict[str, str], notes: str = NOTES, end: str = "\n\n", **head: str | None) -> bytes:
    texts = [tree_text(number, fields, end) for number, fields in enumerate(trees or (TREE,))]
    fields = changed({**HEAD, "tree_sizes": " ".join(str(len(text)) for text in texts)}, head)
    opening = "tree\n" + "\n".join(f"{key}={value}" for key, value in fields.items())
    return (opening + "\n\n" + "".join(texts) + notes).encode()


def refused(content: bytes, kind: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^m.txt cannot be used: .*{message}"):
        check_content(content, kind, "m.txt")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"tree\nversion=v4\n", "lightgbm"),
        (b"tree\n", "lightgbm"),
        (b"trees\n", None),
        (b"a tree\n", None),
        (b'{"learner": {}}', "xgboost"),
        (b'{ "learner": {}}', "xgboost"),
        (b'{\n"learner": {}}', "xgboost"),
        (b'{\r\n"learner": {}}', "xgboost"),
        (b'{\t"learner": {}}', "xgboost"),
        (b"{L\x00\x00\x00\x07learner", "xgboost-ubj"),
        (b'{"teacher": {}}', None),
        (b'["learner"]', None),
        (b'"learner"{', None),
        (b"", None),
    ],
)
def test_the_first_bytes_tell_the_kind(content: bytes, kind: str | None) -> None:
    assert file_kind(content) == kind


def test_what_follows_the_trees_is_left_out() -> None:
    assert trees_of(b"tree\nx\nend of trees\n\nnotes\nend of trees\n") == b"tree\nx\nend of trees\n"
    assert trees_of(b"tree\nx") == b"tree\nx\n"


class TestLightGBM:
    @pytest.mark.parametrize(
        "content",
        [
            lightgbm_text(),
            lightgbm_text(TREE, LEAF, TREE),
            lightgbm_text(LEAF),
            lightgbm_text(TREE, LEAF, num_tree_per_iteration="2"),
            lightgbm_text(changed(TREE, {"is_linear": None})),
            lightgbm_text(changed(TREE, {"split_gain": None, "leaf_weight": "", "internal_count": " "})),
            lightgbm_text(changed(TREE, {"decision_type": "4294967294 -4294967294 2"})),
            lightgbm_text(changed(TREE, CATEGORIES)),
            lightgbm_text(changed(TREE, LINEAR)),
            lightgbm_text(notes="end of trees\n"),
            lightgbm_text(notes="end of trees\n\npandas_categorical:[]\n"),
            lightgbm_text(notes="end of trees\n\nparameters:\n[metric: ndcg]\nend of parameters\n"),
            lightgbm_text(end="\n"),
        ],
        ids=[
            "one", "several", "a leaf", "two for each iteration", "no word of linear leaves", "without notes on nodes",
            "large numbers", "categories", "linear leaves", "nothing behind", "no categories by pandas",
            "another last line", "no blank lines",
        ],
    )  # fmt: skip
    def test_whole_trees_pass(self, content: bytes) -> None:
        check_content(content, "lightgbm", "m.txt")

    @pytest.mark.parametrize(
        ("head", "message"),
        [
            ({"max_feature_idx": "1"}, "`feature_names` is not one for each of 2 features"),
            ({"max_feature_idx": "3"}, "`feature_names` is not one for each of 4 features"),
            ({"feature_infos": "[0:1] none"}, "`feature_infos` is not one for each of 3 features"),
            ({"max_feature_idx": None}, "it is damaged .KeyError: b'max_feature_idx'"),
            ({"tree_sizes": ""}, "it has no trees"),
            ({"num_tree_per_iteration": "0"}, "its trees are not whole iterations"),
            ({"num_tree_per_iteration": "2"}, "its trees are not whole iterations"),
            ({"num_tree_per_iteration": "-1"}, "its trees are not whole iterations"),
            ({"tree_sizes": "5"}, "tree 1 of 1 is cut short"),
            ({"tree_sizes": "-5"}, "tree 1 of 1 is cut short"),
            ({"tree_sizes": "99999"}, "tree 1 of 1 is cut short"),
        ],
    )
    def test_a_wrong_head(self, head: dict[str, str | None], message: str) -> None:
        refused(lightgbm_text(**head), "lightgbm", message)

    def test_iterations_are_whole(self) -> None:
        trees = [LEAF] * 6
        for groups in (1, 2, 3, 6):
            check_content(lightgbm_text(*trees, num_tree_per_iteration=str(groups)), "lightgbm", "m.txt")
        for groups in (4, 5, 7, 12):
            wrong = lightgbm_text(*trees, num_tree_per_iteration=str(groups))
            refused(wrong, "lightgbm", "its trees are not whole iterations")

    def test_trees_stand_one_behind_the_other(self) -> None:
        content = lightgbm_text(LEAF, LEAF)
        refused(content.replace(b"Tree=1", b"Tree=2"), "lightgbm", "tree 2 of 2 is cut short")
        refused(content.replace(b"Tree=0", b"Tree_0"), "lightgbm", "tree 1 of 2 is cut short")
        refused(lightgbm_text(LEAF, end=""), "lightgbm", "tree 1 of 1 is cut short")
        refused(content.replace(b"end of trees", b"the end of trees"), "lightgbm", "the end of its trees is missing")
        refused(lightgbm_text(LEAF, notes=""), "lightgbm", "the end of its trees is missing")

    def test_every_line_of_a_tree_says_something(self) -> None:
        odd = "\n".join(["shrinkage=1", "nothing", "leaf_value=0.5"])
        content = lightgbm_text({"num_leaves": "1", "num_cat": "0", "notes": odd})
        refused(content, "lightgbm", "tree 1 of 1 has lines that say nothing")

    def test_categories_numbered_by_pandas(self) -> None:
        content = lightgbm_text(notes='end of trees\n\npandas_categorical:[["a", "b"]]\n')
        refused(content, "lightgbm", "its categories were numbered by pandas, which the data here are not")
        refused(lightgbm_text(notes="end of trees\n\npandas_categorical:[[\n"), "lightgbm", "it is damaged .JSONDecode")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_leaves": "0", "leaf_value": ""}, "a tree has no leaves"),
            ({"num_cat": "-1"}, "a tree has no leaves"),
            ({"leaf_value": "0.1 inf 0.3 0"}, "a leaf has no finite value"),
            ({"leaf_value": "0.1 0.3 0"}, "`leaf_value` of a tree is not complete"),
            ({"leaf_value": None}, "it is damaged .KeyError"),
            ({"shrinkage": None}, "it is damaged .KeyError"),
            ({"shrinkage": "much"}, "it is damaged .ValueError"),
            ({"split_feature": "0 2"}, "`split_feature` of a tree is not complete"),
            ({"split_feature": "0 3 1"}, "a tree asks for a feature beyond its 3"),
            ({"split_feature": "0 -1 1"}, "a tree asks for a feature beyond its 3"),
            ({"split_feature": "0 1.5 1"}, "`split_feature` has odd numbers"),
            ({"decision_type": "2 4294967296 2"}, "`decision_type` has odd numbers"),
            ({"decision_type": "2 -4294967296 2"}, "`decision_type` has odd numbers"),
            ({"decision_type": "2 2 2 2"}, "`decision_type` of a tree is not complete"),
            ({"left_child": "1 1 -3"}, "a tree has a branch that leads nowhere"),
            ({"left_child": "0 -1 -3"}, "a tree has a branch that leads nowhere"),
            ({"left_child": "1 0 -3"}, "a tree has a branch that leads nowhere"),
            ({"left_child": "1 -1 3"}, "a tree has a branch that leads nowhere"),
            ({"right_child": "2 -2 -5"}, "a tree has a branch that leads nowhere"),
            ({"right_child": "2 -2 2"}, "a tree has a branch that leads nowhere"),
            ({"threshold": "0.5 nan 99"}, "a tree has a threshold that is no number"),
            ({"threshold": "0.5 99"}, "`threshold` of a tree is not complete"),
        ],
    )
    def test_a_wrong_tree(self, change: dict[str, str | None], message: str) -> None:
        refused(lightgbm_text(LEAF, changed(TREE, change)), "lightgbm", message)

    @pytest.mark.parametrize("key", [key.decode() for key in (*OF_NODES, *OF_LEAVES)])
    def test_notes_on_nodes_and_leaves_are_one_for_each(self, key: str) -> None:
        right = 3 if key.encode() in OF_NODES else 4
        for count in (right - 1, right, right + 1):
            content = lightgbm_text(changed(TREE, {key: " ".join(["1"] * count)}))
            if count == right:
                check_content(content, "lightgbm", "m.txt")
            else:
                refused(content, "lightgbm", f"`{key}` of a tree is not complete")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"threshold": "0 -7.5 2"}, "a split by categories that are not there"),
            ({"threshold": "-1 -7.5 1"}, "a split by categories that are not there"),
            ({"num_cat": "1"}, "a split by categories that are not there"),
            ({"cat_boundaries": "0 1"}, "`cat_boundaries` of a tree is not complete"),
            ({"cat_boundaries": "1 2 3"}, "its categories do not fit"),
            ({"cat_boundaries": "0 1 2"}, "its categories do not fit"),
            ({"cat_boundaries": "0 1 4"}, "its categories do not fit"),
            ({"cat_boundaries": "0 0 3"}, "its categories do not fit"),
            ({"cat_boundaries": "0 4 3"}, "its categories do not fit"),
            ({"cat_threshold": "6 1"}, "its categories do not fit"),
            ({"cat_boundaries": "0 0 0", "cat_threshold": ""}, "its categories do not fit"),
            ({"cat_threshold": None}, "it is damaged .KeyError"),
        ],
    )
    def test_wrong_categories(self, change: dict[str, str | None], message: str) -> None:
        refused(lightgbm_text(changed(TREE, {**CATEGORIES, **change})), "lightgbm", message)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"leaf_const": None}, "it is damaged .KeyError"),
            ({"leaf_const": " "}, "`leaf_const` of a tree is not complete"),
            ({"num_features": None}, "it is damaged .KeyError"),
            ({"leaf_features": "0 2 1"}, "`leaf_features` of a tree is not complete"),
            ({"leaf_coeff": "0.5 1.5 -1"}, "`leaf_coeff` of a tree is not complete"),
            ({"leaf_features": "0 3 1 0"}, "a leaf asks for a feature beyond them"),
            ({"leaf_features": "0 -1 1 0"}, "a leaf asks for a feature beyond them"),
            ({"num_features": "3 -1 1 1"}, "a leaf asks for a feature beyond them"),
        ],
    )
    def test_wrong_linear_leaves(self, change: dict[str, str | None], message: str) -> None:
        refused(lightgbm_text(changed(TREE, {**LINEAR, **change})), "lightgbm", message)


def xgboost_tree(**change: Any) -> dict[str, Any]:
    """Five nodes: 0 leads to 1 and 2, and 2 to 3 and 4."""
    numbers = [0.0] * 5
    fields = {
        "tree_param": {"num_nodes": "5"},
        "left_children": [1, -1, 3, -1, -1],
        "right_children": [2, -1, 4, -1, -1],
        "parents": [2147483647, 0, 0, 2, 2],
        "split_indices": [0, 0, 2, 0, 0],
        "split_conditions": numbers,
        "default_left": [0] * 5,
        "base_weights": numbers,
        "loss_changes": numbers,
        "sum_hessian": numbers,
    }
    return {**fields, **change}


CATEGORICAL = {
    "split_type": [1, 0, 1, 0, 0],
    "categories": [4, 5, 6],
    "categories_nodes": [0, 2],
    "categories_segments": [0, 1],
    "categories_sizes": [1, 2],
}
ARRAYS = [key for key, value in xgboost_tree().items() if isinstance(value, list)]


def xgboost_json(
    *trees: dict[str, Any], name: str = "gbtree", shape: dict[str, str] | None = None, **change: Any
) -> bytes:
    trees = trees or (xgboost_tree(), xgboost_tree())
    model = {
        "trees": list(trees),
        "gbtree_model_param": {"num_trees": str(len(trees))},
        "tree_info": [0] * len(trees),
        **change,
    }
    booster: dict[str, Any] = {"name": name, "model": model}
    if name == "dart":
        booster = {"name": name, "gbtree": {"name": "gbtree", "model": model}, "weight_drop": [1.0, 0.5]}
    shape = {"num_feature": "3", "num_class": "0", **(shape or {})}
    return json.dumps({"learner": {"gradient_booster": booster, "learner_model_param": shape}}).encode()


class TestXGBoost:
    @pytest.mark.parametrize(
        "content",
        [
            xgboost_json(),
            xgboost_json(name="dart"),
            xgboost_json(iteration_indptr=[0, 1, 2]),
            xgboost_json(iteration_indptr=[0, 1, 1, 2]),
            xgboost_json(shape={"num_class": "2"}, tree_info=[0, 1]),
            xgboost_json(shape={"num_target": "2"}, tree_info=[0, 1]),
            xgboost_json(xgboost_tree(tree_param={"num_nodes": "5", "size_leaf_vector": "1"})),
            xgboost_json(xgboost_tree(tree_param={"num_nodes": "5", "size_leaf_vector": "0"})),
            xgboost_json(xgboost_tree(tree_param={"num_nodes": "1"}, **{key: [-1] for key in ARRAYS})),
            xgboost_json(xgboost_tree(split_type=[0] * 5, categories=[], categories_nodes=[])),
            xgboost_json(xgboost_tree(**CATEGORICAL)),
            xgboost_json(xgboost_tree(**{**CATEGORICAL, "categories_segments": [0, 3], "categories_sizes": [3, 0]})),
        ],
        ids=[
            "two", "dart", "iterations", "an empty iteration", "classes", "targets", "one value in a leaf",
            "no word of values", "a leaf", "no categories", "categories", "a category of none",
        ],
    )  # fmt: skip
    def test_whole_trees_pass(self, content: bytes) -> None:
        check_content(content, "xgboost", "m.txt")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (xgboost_json(name="gblinear"), "it has no trees but is of the kind 'gblinear'"),
            (xgboost_json(trees=[], gbtree_model_param={"num_trees": "0"}, tree_info=[]), "it has no trees"),
            (xgboost_json(gbtree_model_param={"num_trees": "3"}), "some of its trees are missing"),
            (xgboost_json(tree_info=[0]), "its trees have no place"),
            (xgboost_json(tree_info=[0, 1]), "its trees have no place"),
            (xgboost_json(tree_info=[-1, 0]), "its trees have no place"),
            (xgboost_json(shape={"num_class": "2"}, tree_info=[0, 2]), "its trees have no place"),
            (xgboost_json(iteration_indptr=[1, 2]), "its trees are not whole iterations"),
            (xgboost_json(iteration_indptr=[0, 1]), "its trees are not whole iterations"),
            (xgboost_json(iteration_indptr=[0, 3]), "its trees are not whole iterations"),
            (xgboost_json(iteration_indptr=[0, 2, 1, 2]), "its trees are not whole iterations"),
            (xgboost_json(xgboost_tree(), name="dart"), "weights of trees are missing"),
            (b"[]", "it is damaged .TypeError"),
            (b"{", "it is damaged .JSONDecodeError"),
        ],
    )
    def test_a_wrong_whole(self, content: bytes, message: str) -> None:
        refused(content, "xgboost", message)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tree_param": {"num_nodes": "5", "size_leaf_vector": "2"}}, "its leaves have several values"),
            ({"tree_param": {"num_nodes": "0"}, **{key: [] for key in ARRAYS}}, "a tree is not complete"),
            ({"left_children": [1, -1, 5, -1, -1]}, "a tree has a branch that leads nowhere"),
            ({"right_children": [2, -1, -1, -1, -1]}, "a tree has a branch that leads nowhere"),
            ({"right_children": [2.0, -1, 4, -1, -1]}, "a tree has a branch that leads nowhere"),
            ({"left_children": [1, -1, 0, -1, -1]}, "a tree has a branch that leads back"),
            ({"right_children": [2, -1, 3, -1, -1]}, "a tree has a branch that leads back"),
            ({"split_indices": [3, 0, 2, 0, 0]}, "a tree asks for a feature beyond its 3"),
            ({"split_indices": [0, 0, -1, 0, 0]}, "a tree asks for a feature beyond its 3"),
            ({"split_type": [0] * 4}, "its categories do not fit"),
            ({"split_type": [1, 0, 0, 0, 0]}, "its categories do not fit"),
            ({**CATEGORICAL, "split_type": [1, 0, 0, 0, 0]}, "its categories do not fit"),
            ({**CATEGORICAL, "split_type": None}, "its categories do not fit"),
            ({**CATEGORICAL, "categories_nodes": [0]}, "its categories do not fit"),
            ({**CATEGORICAL, "categories_segments": [0]}, "its categories do not fit"),
            ({**CATEGORICAL, "categories_sizes": [1]}, "its categories do not fit"),
            ({**CATEGORICAL, "categories_segments": [-1, 1]}, "its categories do not fit"),
            ({**CATEGORICAL, "categories_sizes": [-1, 2]}, "its categories do not fit"),
            ({**CATEGORICAL, "categories_sizes": [1, 3]}, "its categories do not fit"),
            ({**CATEGORICAL, "categories_segments": [0, 2]}, "its categories do not fit"),
            ({**CATEGORICAL, "categories": None}, "its categories do not fit"),
        ],
    )
    def test_a_wrong_tree(self, change: dict[str, Any], message: str) -> None:
        refused(xgboost_json(xgboost_tree(), xgboost_tree(**change)), "xgboost", message)

    @pytest.mark.parametrize("key", ARRAYS)
    def test_arrays_have_an_entry_for_each_node(self, key: str) -> None:
        for length in (4, 6):
            tree = xgboost_tree(**{key: [-1] * length})
            refused(xgboost_json(tree), "xgboost", "a tree is not complete")

    def test_a_leaf_asks_for_no_feature(self) -> None:
        check_content(xgboost_json(xgboost_tree(split_indices=[0, 99, 2, -5, 0])), "xgboost", "m.txt")


def test_a_long_reason_is_shortened_to_one_line() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_content(lightgbm_text(changed(TREE, {"shrinkage": "a\tb" * 100})), "lightgbm", "m.txt")
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith(")")
    assert len(said.partition("ValueError: ")[2]) == 101
