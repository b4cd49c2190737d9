"""Export of the whole scorer to ONNX: raw features of one list in, scores out."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from lgmml_torch.checks import LGMMLError, MissingDependencyError, check_choice
from lgmml_torch.files import write_bytes
from lgmml_torch.functional.distance import norm_factors
from lgmml_torch.functional.score import SPREAD_FLOOR, kernel
from lgmml_torch.models.local_metrics import MetricBlock
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION

OPSET = 18
GROUP = 32  # metrics in one product: bounds what a list needs beside its (N, K) distances


def export_onnx(model: LGMML, path: str | os.PathLike[str], *, policy: str | None = None) -> Path:
    """Write a model as one ONNX file: input ``features (documents, D)`` of one list, output ``scores (documents,)``.

    Preprocessing, distances, kernel and the policy for new queries are all inside, so the file needs nothing of this
    package. Steps that look at the list (ranks within it, gates) see the rows of the call: one list for each call, of
    any length. Scores agree with `LGMML.score` to rounding.

    Args:
        model: float32 or float64; features have its dtype.
        path: of the file, written atomically.
        policy: what the query gets; the model's own policy when None.

    Raises:
        MissingDependencyError: ``onnx`` or ``onnxscript`` is not installed.
        LGMMLError: an unknown policy, a model that adds to trees, or one too large for one ONNX file.
    """
    if model.base is not None:
        raise LGMMLError(
            f"`model` must not add to a {model.base.title} model to be exported; `model.base = None` leaves ours alone"
        )
    for package in ("onnx", "onnxscript"):
        _require(package)
    name = policy or model.phi.policy
    check_choice("policy", name, POLICIES[model.phi.mode])
    scorer = ListScorer(deepcopy(model).cpu(), name).eval()
    size = sum(tensor.numel() * tensor.element_size() for tensor in scorer.state_dict().values())
    if size >= 2**31:
        raise LGMMLError(f"`model` must be smaller than 2 GiB for one ONNX file, got {size} bytes; compress it first")
    example = torch.zeros(3, model.num_features, dtype=model.metrics.scales.dtype)
    with _quiet():
        program = torch.onnx.export(
            scorer,
            (example,),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=["features"],
            output_names=["scores"],
            dynamic_shapes=({0: torch.export.Dim("documents", min=1)},),
        )
    if program is None:
        raise LGMMLError("`model` could not be exported: the exporter gave no program")
    program.model.metadata_props.update(
        {"format": FORMAT, "version": str(VERSION), "num_features": str(model.num_features), "policy": name}
    )
    write_bytes(path, program.model_proto.SerializeToString())
    return Path(path)


class ListScorer(nn.Module):
    """Scores of one list, in operations whose shapes do not depend on values.

    The same numbers as the model's own `score`; only the order of the work differs, which there follows the cache.
    """

    def __init__(self, model: LGMML, policy: str) -> None:
        super().__init__()
        self.model = model.without_idle(policy)
        self.policy = policy
        for number, block in enumerate(self.model.metrics.iter_blocks()):
            self.register_buffer(f"lenses{number}", norm_factors(block.factors, self.model.metrics.norm))

    def forward(
        self,
        features: Tensor,  # (N, D)
    ) -> Tensor:  # (N,)
        """Scores; higher is better."""
        total = torch.scalar_tensor(features.shape[0], dtype=torch.long)
        prepared = self.model.preprocess(features, torch.stack([torch.zeros_like(total), total]))
        blocks = self.model.metrics.iter_blocks()
        parts = [self._distances(prepared, block, number) for number, block in enumerate(blocks)]
        kappa = kernel(torch.cat(parts, dim=1), self.model.kernel)
        summary = _summary(kappa)
        phi = self._neighbours(summary) if self.policy == "knn" else self.model.phi.for_new(summary, 1, self.policy)
        return -(kappa * phi).sum(dim=1)

    def _neighbours(self, summary: Tensor) -> Tensor:
        """`functional.summary.nearest_mean` for one list; ONNX has no operation for all pairs of distances."""
        phi = self.model.phi
        half = phi.num_metrics
        known = phi.summaries[:, :half]
        spread = known.std(0, unbiased=False)
        gaps = (summary[:, :half] - known) / torch.where(spread > 0, spread, torch.ones_like(spread))
        count = min(phi.neighbours, len(known))
        nearest = gaps.square().sum(dim=1).topk(count, largest=False).indices
        return phi.table.weight[nearest].mean(dim=0, keepdim=True)

    def _distances(self, features: Tensor, block: MetricBlock, number: int) -> Tensor:
        lenses = getattr(self, f"lenses{number}")
        parts = []
        for start in range(0, block.num_metrics, GROUP):
            group = slice(start, start + GROUP)
            rows = features.unsqueeze(1) if block.is_full else features[:, block.support[group]]
            gaps = (rows - block.anchors[group]).transpose(0, 1)  # (K, N, s)
            parts.append((gaps @ lenses[group]).square().sum(dim=2).sqrt())
        return torch.cat(parts).T / block.scales


def _summary(kappa: Tensor) -> Tensor:
    """`functional.summary.list_summary` of one list."""
    mean = kappa.mean(dim=0, keepdim=True)
    spread = (kappa - mean).square().mean(dim=0, keepdim=True).sqrt()
    return torch.cat([mean, (spread + SPREAD_FLOOR).log()], dim=1)


def _require(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"`{package}` is needed to export a model; install it with: pip install 'lgmml-torch[onnx]'"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what the exporter has to say about itself and about packages that play no part here."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
