"""Export of the whole scorer, to ONNX or to a program of torch: raw features of lists in, scores out."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lgmml_torch.checks import LGMMLError, check_choice, require
from lgmml_torch.files import write_bytes
from lgmml_torch.functional.distance import norm_factors
from lgmml_torch.functional.features import list_ids
from lgmml_torch.functional.score import SPREAD_FLOOR, kernel
from lgmml_torch.models.local_metrics import MetricBlock
from lgmml_torch.models.phi import POLICIES, RULES
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION
from lgmml_torch.ragged import RankingData

_OPSET = 18
_GROUP = 32  # metrics in one product: bounds what a list needs beside its (N, K) distances


def export_onnx(model: LGMML, path: str | os.PathLike[str], *, policy: str | None = None, batch: bool = False) -> Path:
    """Write a model as one ONNX file: input ``features (documents, D)`` of one list, output ``scores (documents,)``.

    Preprocessing, distances, kernel and the policy for new queries are all inside, so the file needs nothing of this
    package. Steps that look at the list (ranks within it, gates) see the rows of the call: one list for each call, of
    any length, or with ``batch`` many lists, one after the other, and a second input ``offsets (lists + 1,)`` of
    int64: list q is rows ``offsets[q]:offsets[q + 1]``. Scores agree with `LGMML.score` to rounding.

    A category is a feature like any other, whose values are the places of its words, from 0, in the vocabulary that the
    file's metadata holds for it under ``categories`` (JSON, by name); -1 is a missing word or any other one.

    Args:
        model: float32 or float64; features have its dtype.
        path: of the file, written atomically.
        policy: what the query gets; the model's own policy when None.
        batch: many lists in one call.

    Raises:
        MissingDependencyError: ``onnx`` or ``onnxscript`` is not installed.
        LGMMLError: an unknown policy, a model that adds to trees, or one too large for one file.
    """
    scorer, inputs, shapes = _to_export(model, policy, batch)
    for package in ("onnx", "onnxscript"):
        require(package, "to export a model", "onnx")
    size = sum(tensor.numel() * tensor.element_size() for tensor in scorer.state_dict().values())
    if size >= 2**31:
        raise LGMMLError(f"`model` must be smaller than 2 GiB for one ONNX file, got {size} bytes; fit fewer metrics")
    with _quiet():
        program = torch.onnx.export(
            scorer,
            inputs,
            dynamo=True,
            verbose=False,
            opset_version=_OPSET,
            input_names=["features", "offsets"][: len(inputs)],
            output_names=["scores"],
            dynamic_shapes=shapes,
        )
    if program is None:
        raise LGMMLError("`model` could not be exported: the exporter gave no program")
    program.model.metadata_props.update(_facts(model, scorer))
    write_bytes(path, program.model_proto.SerializeToString())
    return Path(path)


def export_program(
    model: LGMML, path: str | os.PathLike[str], *, policy: str | None = None, batch: bool = False
) -> Path:
    """The same as a program of `torch.export`, ``.pt2``: ``torch.export.load(path).module()(features)``.

    It needs torch and nothing of this package; arguments and errors are those of `export_onnx`, without its limit of
    size.
    """
    scorer, inputs, shapes = _to_export(model, policy, batch)
    stream = io.BytesIO()
    with _quiet(), torch.no_grad():
        program = torch.export.export(scorer, inputs, dynamic_shapes=shapes)
        torch.export.save(program, stream, extra_files={"lgmml.json": json.dumps(_facts(model, scorer))})
    write_bytes(path, stream.getvalue())
    return Path(path)


EXPORTERS = {".onnx": export_onnx, ".pt2": export_program}
"""What writes a file, by the end of its name."""


class _Parity(NamedTuple):
    """How near an exported file comes to the model."""

    largest: float  # difference of two scores
    size: float  # of the model's own scores, the largest
    lists: int  # number of lists tried
    documents: int  # number of documents in them
    engine: str  # what computed the scores of the file, with its version


def compare_exported(
    path: str | os.PathLike[str], model: LGMML, data: RankingData, *, policy: str | None = None, batch: bool = False
) -> _Parity:
    """Score lists with an exported file, one by one or with ``batch`` all in one call, and with the model itself.

    Raises:
        MissingDependencyError: for an ONNX file, when ``onnxruntime`` is not installed.
    """
    run, engine = _open_exported(Path(path))
    features = data.features.to(model.dtype)
    if model.encoder is not None:
        features = model.encoder.recoded(data).features.to(model.dtype)
    if batch:
        found = run(features, data.offsets)
    else:
        parts = []
        for start, stop in pairwise(data.offsets.tolist()):
            if start < stop:
                parts.append(run(features[start:stop]))
        found = torch.cat(parts)
    expected = model.score(data, policy=policy)
    largest, size = float((found - expected).abs().max()), float(expected.abs().max())
    return _Parity(largest, size, data.num_queries, data.num_documents, engine)


def _open_exported(path: Path) -> tuple[Callable[..., Tensor], str]:
    """What scores with an exported file, and its name."""
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        return cast("Callable[..., Tensor]", program), f"torch {torch.__version__}"
    onnxruntime = require("onnxruntime", "to try an exported model", "onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor:
        given = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(["scores"], given)[0])

    return run, f"onnxruntime {onnxruntime.__version__}"


def _to_export(
    model: LGMML, policy: str | None, batch: bool
) -> tuple[_ListScorer, tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """What computes, inputs to trace it with, and which of their sizes are free."""
    if model.base is not None:
        raise LGMMLError(
            f"`model` must not add to a {model.base.title} model to be exported; `model.base = None` leaves ours alone"
        )
    name = policy or model.phi.policy
    check_choice("policy", name, POLICIES[model.phi.mode])
    scorer = _ListScorer(deepcopy(model).cpu(), name).eval().requires_grad_(False)
    features = torch.zeros(7, model.reading["num_features"], dtype=model.dtype)
    documents = {0: torch.export.Dim("documents", min=1)}
    if not batch:
        return scorer, (features,), (documents,)
    return scorer, (features, torch.tensor([0, 3, 5, 7])), (documents, {0: torch.export.Dim("bounds", min=2)})


def _facts(model: LGMML, scorer: _ListScorer) -> dict[str, str]:
    """What the file says of itself."""
    known = model.reading
    facts = {"format": FORMAT, "version": str(VERSION), "num_features": str(known["num_features"])}
    facts["policy"] = scorer.policy
    for name in ("feature_names", "categories"):
        if known[name]:
            facts[name] = json.dumps(known[name])
    return facts


class _ListScorer(nn.Module):
    """Scores of lists, in operations whose shapes do not depend on values.

    The same numbers as the model's own `score`; only the order of the work differs, which there follows the cache.
    """

    def __init__(self, model: LGMML, policy: str) -> None:
        super().__init__()
        self.model = model.without_idle(policy)
        self.policy = policy
        if policy == "amortized":
            self.model.phi.keep_regression_()
        for number, block in enumerate(self.model.metrics.iter_blocks()):
            self.register_buffer(f"lenses{number}", norm_factors(block.factors, self.model.metrics.norm))

    def forward(self, features: Tensor, offsets: Tensor | None = None) -> Tensor:  # (N, D), (Q+1,) -> (N,)
        """Scores; higher is better. All rows are one list without ``offsets``."""
        if offsets is None:
            total = torch.scalar_tensor(features.shape[0], dtype=torch.long)
            offsets = torch.stack([torch.zeros_like(total), total])
        if self.model.encoder is not None:
            features = self.model.encoder.numbers(features)
        prepared = self.model.preprocess(features, offsets)
        blocks = self.model.metrics.iter_blocks()
        parts = []
        for number, block in enumerate(blocks):
            parts.append(self._distances(prepared, block, number))
        kappa = kernel(torch.cat(parts, dim=1), self.model.kernel)
        if not RULES[self.policy].looks:
            return -(kappa * self.model.phi.for_new(None, 1, self.policy)).sum(dim=1)
        lists = list_ids(offsets, features.shape[0])
        summaries = _summaries(kappa, offsets, lists)
        return -(kappa * self.model.phi.for_new(summaries, summaries.shape[0], self.policy)[lists]).sum(dim=1)

    def _distances(self, features: Tensor, block: MetricBlock, number: int) -> Tensor:
        lenses = getattr(self, f"lenses{number}")
        parts = []
        for start in range(0, block.num_metrics, _GROUP):
            group = slice(start, start + _GROUP)
            rows = features.unsqueeze(1) if block.is_full else features[:, block.support[group]]
            gaps = (rows - block.anchors[group]).transpose(0, 1)  # (K, N, s)
            parts.append((gaps @ lenses[group]).square().sum(dim=2).sqrt())
        return torch.cat(parts).T / block.scales


# One row more than there are lists keeps the exported program free of assumptions about a single list.
def _summaries(kappa: Tensor, offsets: Tensor, lists: Tensor) -> Tensor:  # (N, K), (Q+1,), (N,) -> (Q+1, 2K)
    """`functional.score.list_summary`."""
    sums = kappa.new_zeros((offsets.shape[0], kappa.shape[1]))
    counts = kappa.new_zeros((offsets.shape[0], 1)).index_add(0, lists, torch.ones_like(kappa[:, :1])).clamp_min(1)
    mean = sums.index_add(0, lists, kappa) / counts
    spread = (sums.index_add(0, lists, (kappa - mean[lists]).square()) / counts).sqrt()
    return torch.cat([mean, (spread + SPREAD_FLOOR).log()], dim=1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what the exporter has to say about itself and about packages that play no part here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
