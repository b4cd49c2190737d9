"""``lgmml info``: what is in a model file."""

from __future__ import annotations

import json
import sys
import zipfile
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import safe_open

from lgmml_torch.models.encode import OneHot
from lgmml_torch.models.importance import feature_label, structural_importance
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, load_checkpoint


def run(args: Namespace) -> None:
    """Print one line for each fact."""
    model = LGMML.load(args.model)
    facts = describe_model(model, Path(args.model))
    if args.json:
        sys.stdout.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        return
    width = max(len(name) for name in facts)
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in facts.items() if value is not None))


def describe_model(model: LGMML, file: Path) -> dict[str, Any]:
    """The facts people ask for, as primitives."""
    kind, version = file_kind(file)
    phi = model.phi.table.weight.detach()
    quality = model.metrics.quality[~model.metrics.quality.isnan()]
    sources = Counter(source.feature for source in model.preprocess.sources())
    base = model.base
    blocks = [
        f"{block.num_metrics} on {'all' if block.is_full else block.anchors.shape[1]} features"
        for block in model.metrics.iter_blocks()
    ]
    return {
        "file": str(file),
        "size": f"{file.stat().st_size / 1024:.1f} KiB",
        "kind": kind,
        "format version": version,
        "local metrics (K)": model.metrics.num_metrics,
        "of which": ", ".join(blocks),
        "norm": model.metrics.norm,
        "kernel": model.kernel,
        "mean anchor NDCG": round(float(quality.mean()), 4) if len(quality) else None,
        "raw features": model.reading["num_features"],
        "categories": words(model),
        "features used": f"{len(sources)} in {model.metrics.num_features} columns",
        "preprocessing": steps(model.preprocess),
        "weights Φ": model.phi.mode + (" with deviations" if model.phi.deviations else ""),
        "policy for new queries": model.phi.policy,
        "training queries": len(model.qids),
        "mean Φ": float(f"{float(phi.mean()):.6g}"),
        "share of Φ that is zero": round(float((phi == 0).double().mean()), 4),
        "precision": str(model.dtype).removeprefix("torch."),
        "adds to": None if base is None else f"a {base.title} model of {len(base.content) / 1024:.1f} KiB",
        "score": None if base is None else f"{base.own_weight:.6g} · own + {base.weight:.6g} · that of the trees",
        "needs": None if base is None else base.needs,
        "features that count most": ", ".join(
            f"{feature_label(model.feature_names, feature)} {share:.1%}"
            for feature, share in structural_importance(model).leading(8)
        ),
        **told(model.about or {}),
    }


def words(model: LGMML) -> str | None:
    """The categories and what becomes of their words."""
    if model.encoder is None:
        return None
    pairs = zip(model.encoder.names, model.encoder.categories, model.encoder.steps, strict=True)
    found = [
        f"{name} ({len(known)} words, {'a column each' if isinstance(step, OneHot) else 'mean label'})"
        for name, known, step in pairs
        if known is not None
    ]
    return ", ".join(found)


def told(about: dict[str, Any]) -> dict[str, Any]:
    """What the file says of where the model comes from, one fact each: ``data``, ``seed`` and so on."""
    facts = {}
    for name, value in about.items():
        if name == "version":  # of this block, not of anything people ask for
            continue
        inner = value.items() if isinstance(value, dict) else ()
        facts[name] = ", ".join(f"{key} {item}" for key, item in inner) if inner else value
    return facts


def file_kind(file: Path) -> tuple[str, int]:
    """What the file is, and the version of its format."""
    if zipfile.is_zipfile(file):
        return "checkpoint of a training run", int(load_checkpoint(file)[FORMAT]["version"])
    with safe_open(file, framework="pt") as content:
        return "model", int(content.metadata()["version"])


def steps(preprocess: Preprocess | dict[str, Any]) -> str:
    """The steps in one line: ``remove_constant → (quantile + list_rank) → standardize``."""
    spec = preprocess.spec() if isinstance(preprocess, Preprocess) else preprocess
    inner = [steps(step) for step in spec["args"].get("steps", [])]
    if spec["name"] == "chain":
        return " → ".join(inner) or "none"
    return f"({' + '.join(inner)})" if spec["name"] == "concat" else str(spec["name"])
