"""Model files of LightGBM and XGBoost: which of them it is, and whether it can be handed to the library.

Both libraries trust what they read: a cut or damaged file may end the whole process. So the trees are looked through
here first, without the libraries: every array as long as it must be, every index within bounds, no way in a circle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import CheckpointError

Fields = Mapping[bytes, bytes]


def file_kind(content: bytes) -> str | None:
    r"""``lightgbm`` (text), ``xgboost`` (JSON) or ``xgboost-ubj``; None for anything else.

    >>> file_kind(b"tree\nversion=v4\n"), file_kind(b'{"learner": {}}'), file_kind(b"PK")
    ('lightgbm', 'xgboost', None)
    """
    if content.startswith(b"tree\n"):
        return "lightgbm"
    if not content.startswith(b"{") or b"learner" not in content:
        return None
    return "xgboost" if content[1:2] in (b'"', b" ", b"\n", b"\r", b"\t") else "xgboost-ubj"


def check_content(content: bytes, kind: str, name: str) -> None:
    """Require whole and consistent trees.

    Raises:
        CheckpointError: what is wrong, about ``name``.
    """
    check: Callable[[bytes], None] = {"lightgbm": _check_lightgbm, "xgboost": _check_xgboost}[kind]
    try:
        check(content)
    except _UnfitError as error:
        raise CheckpointError(f"{name} cannot be used: {error}") from None
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{name} cannot be used: it is damaged ({_short(error)})") from error


def trees_of(content: bytes) -> bytes:
    """LightGBM's text without what follows the trees: notes about the training, on whose damage its reader ends too."""
    head, mark, _ = content.partition(b"\nend of trees")
    return head + mark + b"\n"


class _UnfitError(Exception):
    """The end of a sentence."""


def _require(holds: object, what: str) -> None:
    if not holds:
        raise _UnfitError(what)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def _check_lightgbm(content: bytes) -> None:
    head, _, _ = content.partition(b"\n\n")
    fields = _fields(head.split(b"\n")[1:])
    features = int(fields[b"max_feature_idx"]) + 1
    for key in (b"feature_names", b"feature_infos"):
        _require(len(fields[key].split()) == features, f"`{key.decode()}` is not one for each of {features} features")
    groups = int(fields[b"num_tree_per_iteration"])
    sizes = [int(word) for word in fields[b"tree_sizes"].split()]
    _require(sizes, "it has no trees")
    _require(0 < groups <= len(sizes) and len(sizes) % groups == 0, "its trees are not whole iterations")
    start = content.find(b"Tree=0\n", len(head))
    for number, size in enumerate(sizes):
        block = content[start : start + size]
        complete = len(block) == size and block.startswith(b"Tree=%d\n" % number)
        _require(complete and block.endswith(b"\n"), f"tree {number + 1} of {len(sizes)} is cut short")
        lines = block.rstrip(b"\n").split(b"\n")
        _require(all(b"=" in line for line in lines), f"tree {number + 1} of {len(sizes)} has lines that say nothing")
        _check_lightgbm_tree(_fields(lines), features)
        start += size
    _require(content[start:].startswith(b"end of trees"), "the end of its trees is missing")
    last = content.rstrip().rpartition(b"\n")[2]
    if last.startswith(b"pandas_categorical:"):
        mapped = json.loads(last.partition(b":")[2])
        _require(not mapped, "its categories were numbered by pandas, which the data here are not")


def _fields(lines: Iterable[bytes]) -> dict[bytes, bytes]:
    """``key=value`` lines; in the head, words without a value are switches."""
    pairs = [line.partition(b"=") for line in lines if line]
    return {key: value for key, _, value in pairs}


# What a tree may say of its nodes and leaves: numbers, one for each.
OF_NODES = (b"split_gain", b"internal_value", b"internal_weight", b"internal_count")
OF_LEAVES = (b"leaf_weight", b"leaf_count", b"leaf_const", b"num_features")


def _check_lightgbm_tree(fields: Fields, features: int) -> None:
    leaves, categorical = int(fields[b"num_leaves"]), int(fields[b"num_cat"])
    _require(leaves >= 1 and categorical >= 0, "a tree has no leaves")
    _require(np.isfinite(_numbers(fields, b"leaf_value", leaves)).all(), "a leaf has no finite value")
    float(fields[b"shrinkage"])
    for keys, count in ((OF_NODES, leaves - 1), (OF_LEAVES, leaves)):
        for key in keys:
            if fields.get(key, b"").strip():
                _numbers(fields, key, count)
    if int(fields.get(b"is_linear", b"0")):
        _check_linear(fields, leaves, features)
    if leaves == 1:
        return
    nodes = leaves - 1
    split, kinds = _whole(fields, b"split_feature", nodes), _whole(fields, b"decision_type", nodes)
    _require(((split >= 0) & (split < features)).all(), f"a tree asks for a feature beyond its {features}")
    children = np.stack([_whole(fields, key, nodes) for key in (b"left_child", b"right_child")], axis=1)
    # A node stands before its children; leaves count from −1 downwards.
    forward = (children < 0) | (children > np.arange(nodes)[:, None])
    _require((forward & (children >= -leaves) & (children < nodes)).all(), "a tree has a branch that leads nowhere")
    thresholds = _numbers(fields, b"threshold", nodes)
    _require(not np.isnan(thresholds).any(), "a tree has a threshold that is no number")
    picked = thresholds[(kinds & 1) == 1]
    _require(((picked >= 0) & (picked < categorical)).all(), "a tree has a split by categories that are not there")
    if categorical:
        bounds = _whole(fields, b"cat_boundaries", categorical + 1)
        total = len(_whole(fields, b"cat_threshold", None))
        _require(bounds[0] == 0 and bounds[-1] == total and (np.diff(bounds) > 0).all(), "its categories do not fit")


def _check_linear(fields: Fields, leaves: int, features: int) -> None:
    counts = _whole(fields, b"num_features", leaves)
    _numbers(fields, b"leaf_const", leaves)
    named = _whole(fields, b"leaf_features", int(counts.sum()))
    _numbers(fields, b"leaf_coeff", int(counts.sum()))
    _require((counts >= 0).all() and ((named >= 0) & (named < features)).all(), "a leaf asks for a feature beyond them")


def _numbers(fields: Fields, key: bytes, count: int | None) -> NDArray[np.float64]:
    words = fields[key].split()
    _require(count is None or len(words) == count, f"`{key.decode()}` of a tree is not complete")
    return np.array(words, dtype=np.float64)


def _whole(fields: Fields, key: bytes, count: int | None) -> NDArray[np.int64]:
    found = _numbers(fields, key, count)
    _require((found == np.trunc(found)).all() and (np.abs(found) < 2**32).all(), f"`{key.decode()}` has odd numbers")
    return found.astype(np.int64)


def _check_xgboost(content: bytes) -> None:
    learner = json.loads(content)["learner"]
    booster = learner["gradient_booster"]
    _require(booster.get("name") in ("gbtree", "dart"), f"it has no trees but is of the kind {booster.get('name')!r}")
    inner = booster["gbtree"] if booster["name"] == "dart" else booster
    model, shape = inner["model"], learner["learner_model_param"]
    trees, features = model["trees"], int(shape["num_feature"])
    groups = max(int(shape["num_class"]), int(shape.get("num_target", 1)), 1)
    _require(trees, "it has no trees")
    _require(len(trees) == int(model["gbtree_model_param"]["num_trees"]), "some of its trees are missing")
    owners = model["tree_info"]
    _require(len(owners) == len(trees) and all(0 <= owner < groups for owner in owners), "its trees have no place")
    bounds = model.get("iteration_indptr", [0, len(trees)])
    ordered = all(a <= b for a, b in pairwise(bounds))
    _require(bounds[0] == 0 and bounds[-1] == len(trees) and ordered, "its trees are not whole iterations")
    if booster["name"] == "dart":
        _require(len(booster["weight_drop"]) == len(trees), "weights of trees are missing")
    for tree in trees:
        _check_xgboost_tree(tree, features)


def _check_xgboost_tree(tree: Mapping[str, Any], features: int) -> None:
    count = int(tree["tree_param"]["num_nodes"])
    _require(int(tree["tree_param"].get("size_leaf_vector", "1")) <= 1, "its leaves have several values")
    keys = ("left_children", "right_children", "parents", "split_indices", "split_conditions", "default_left",
            "base_weights", "loss_changes", "sum_hessian")  # fmt: skip
    _require(count > 0 and all(len(tree[key]) == count for key in keys), "a tree is not complete")
    left, right, split = tree["left_children"], tree["right_children"], tree["split_indices"]
    seen, todo = set(), [0]
    while todo:
        node = todo.pop()
        _require(isinstance(node, int) and 0 <= node < count, "a tree has a branch that leads nowhere")
        _require(node not in seen, "a tree has a branch that leads back")
        seen.add(node)
        if left[node] == -1:
            continue
        _require(0 <= split[node] < features, f"a tree asks for a feature beyond its {features}")
        todo += [left[node], right[node]]
    _check_xgboost_categories(tree, count)


def _check_xgboost_categories(tree: Mapping[str, Any], count: int) -> None:
    kinds = tree.get("split_type") or [0] * count
    nodes, starts, sizes = (tree.get(f"categories_{key}") or [] for key in ("nodes", "segments", "sizes"))
    total = len(tree.get("categories") or [])
    fitting = len(kinds) == count and len(nodes) == len(starts) == len(sizes)
    fitting = fitting and all(a >= 0 and n >= 0 and a + n <= total for a, n in zip(starts, sizes, strict=True))
    _require(fitting and {node for node, kind in enumerate(kinds) if kind} == set(nodes), "its categories do not fit")
