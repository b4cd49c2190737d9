"""`LGMML`: raw features in, scores out; all that scoring needs, in one module and one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lgmml_torch.checks import CheckpointError, LGMMLError, check_choice, check_offsets, check_shape
from lgmml_torch.functional.calibration import GradeMap, fit_grade_map
from lgmml_torch.functional.score import KERNELS, kernel, list_summary, tie_equal_rows
from lgmml_torch.functional.score import score as score_kappa
from lgmml_torch.models.encode import CategoryEncoder, check_same_table
from lgmml_torch.models.frozen import FrozenScorer
from lgmml_torch.models.local_metrics import Kept, LocalMetrics
from lgmml_torch.models.phi import RULES, Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import build_preprocess
from lgmml_torch.models.storage import plain_qid, read_model, write_model
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks

if TYPE_CHECKING:
    from lgmml_torch.models.explain import Explanation
    from lgmml_torch.models.trees import TreeBase

_SHORT = 2048  # documents that are scored by the frozen form: of more, starting operations is a small part of the work
_SCORING = ("preprocess", "metrics", "phi", "kernel", "base")  # arguments of a model that scores are made of
_OTHER_PARTS = ("qids", "feature_names", "encoder", "table")


class LGMML(nn.Module):
    """f_q(p) = −Σᵣ Φ_q[r]·κ(dᵣ(p)): preprocessing, local metrics and their weights.

    Args:
        preprocess: fitted on the training data.
        metrics: the bank, on preprocessed features.
        phi: the weights.
        kernel: κ, see `lgmml_torch.functional.score.kernel`.
        qids: ids of the training queries, in the order of Φ's rows; only for ``known_queries``.
        feature_names: of the raw features, where they have names; tables to be scored are matched by them.
        encoder: what makes numbers of categories, where there are any; the raw features are then its columns.
        base: trees whose scores are added by `score`, with weights; training and `forward` do without them.
        table: how the training lists were read, see `RankingData`.
        grade_map: from scores to chances of grades, where there is one.

    Attributes:
        about: what the model comes from, for readers of its file: primitives only, or None.
    """

    def __init__(
        self,
        preprocess: Preprocess,
        metrics: LocalMetrics,
        phi: Phi,
        *,
        kernel: str = "paper",
        qids: tuple[Hashable, ...] = (),
        feature_names: tuple[str, ...] | None = None,
        encoder: CategoryEncoder | None = None,
        base: TreeBase | None = None,
        table: Mapping[str, Any] | None = None,
        grade_map: GradeMap | None = None,
    ) -> None:
        super().__init__()
        check_choice("kernel", kernel, KERNELS)
        if phi.num_metrics != metrics.num_metrics:
            raise LGMMLError(f"`phi` must weigh {metrics.num_metrics} metrics, got {phi.num_metrics}")
        self.preprocess, self.metrics, self.phi = preprocess, metrics, phi
        self.kernel, self.qids, self.feature_names = kernel, qids, feature_names
        if feature_names is not None and preprocess.fitted and len(feature_names) != preprocess.num_features_in:
            raise LGMMLError(
                f"`feature_names` must name {preprocess.num_features_in} features, got {len(feature_names)}"
            )
        if encoder is not None and feature_names != encoder.columns:
            raise LGMMLError("`feature_names` must be the columns of the encoder, got others")
        self.encoder, self.base, self.table, self.grade_map = encoder, base, table, grade_map
        self.about: dict[str, Any] | None = None
        self._frozen = Kept()

    @property
    def dtype(self) -> torch.dtype:
        """The precision the model computes in."""
        return self.metrics.scales.dtype

    @property
    def device(self) -> torch.device:
        """The device the model computes on."""
        return self.metrics.scales.device

    def replace(self, **changes: Any) -> LGMML:
        """A model with other parts, named as arguments of `LGMML`, which shares all others; ``about`` is not kept.

        The map to chances of grades is kept unless a part that scores are made of is exchanged.
        """
        parts = {name: getattr(self, name) for name in (*_SCORING, *_OTHER_PARTS)}
        if not changes.keys() & set(_SCORING):
            parts["grade_map"] = self.grade_map
        return LGMML(**{**parts, **changes})

    @property
    def num_features(self) -> int:
        """Features a raw document must have."""
        return self.preprocess.num_features_in

    @property
    def reading(self) -> dict[str, Any]:
        """Number and names of the features, words of categories and rules for missing values, for readers of files."""
        table = self.table or {}
        found: dict[str, Any] = {"num_features": self.num_features, "feature_names": self.feature_names}
        found["categories"] = {}
        if self.encoder is not None:
            names = self.encoder.names
            found = {"num_features": len(names), "feature_names": names, "categories": self.encoder.vocabularies}
        for rule, usual in (("missing", "error"), ("absent", "zero")):
            found[rule] = table.get(rule, usual)
        return found

    def encoded(self, data: RankingData) -> RankingData:
        """The lists with numbers in place of categories; unchanged where they hold numbers only.

        Raises:
            LGMMLError: categories that the model does not know, or none where it expects some.
        """
        if self.encoder is not None and (data.categories is not None or data.feature_names != self.feature_names):
            return self.encoder.encode(data)
        if data.categories is not None:
            raise LGMMLError("`data` must hold numbers only, as the model was trained on, got categories")
        return data

    def distances(self, features: Tensor, offsets: Tensor) -> Tensor:  # (N, D), (Q+1,) -> (N, K)
        """Scaled distances of raw documents to the anchors."""
        out: Tensor = self.metrics(self.preprocess(features, offsets))
        return out

    def forward(
        self,
        features: Tensor,  # (N, D)
        offsets: Tensor,  # (Q+1,)
        *,
        policy: str | None = None,
        rows: Tensor | None = None,  # (Q,) row of Φ for each query, −1 for new ones
    ) -> Tensor:  # (N,)
        """Scores of whole lists, without those of a base; higher is better."""
        kappa = kernel(self.distances(features, offsets), self.kernel)
        return score_kappa(kappa, self.weights(kappa, offsets, policy=policy, rows=rows), offsets)

    def weights(
        self, kappa: Tensor, offsets: Tensor, *, policy: str | None = None, rows: Tensor | None = None
    ) -> Tensor:  # (N, K), (Q+1,), (Q,) -> (Q, K) or (1, K)
        """Φ of each list: by the policy for new queries, or its own row where ``rows`` names one."""
        count = len(offsets) - 1
        name = policy or self.phi.policy
        summaries = list_summary(kappa, offsets) if RULES[name].looks else None
        phi = self.phi.for_new(summaries, count, name)
        if rows is None or not bool((rows >= 0).any()):
            return phi
        own: Tensor = self.phi(rows.clamp_min(0))
        return torch.where((rows >= 0).unsqueeze(1), own, phi.expand(count, -1))

    @torch.no_grad()
    def score(
        self,
        data: RankingData,
        *,
        known_queries: bool = False,
        policy: str | None = None,
        documents_at_once: int = 32_768,
        alone: bool = False,
    ) -> Tensor:  # (N,)
        """Scores of all documents, in the order of the rows of ``data``, as its labels and offsets are.

        `score_in_caller_order` gives them in the order in which the rows were handed in.

        Args:
            data: raw features, as many as the model was trained on, with its categories.
            known_queries: use the trained Φ of queries whose id was in the training data. Off by default: ids are
                often just counters, and a new list numbered 7 must not pick up training query 7's weights.
            policy: what other queries get, instead of the model's own policy.
            documents_at_once: most documents that are scored together, in whole lists.
            alone: leave out the base.
        """
        data = self.encoded(data)
        check_shape("features", data.features, (None, self.num_features))
        check_offsets(data.offsets, data.num_documents)
        check_same_table(self.feature_names, self.table, data)
        rows = None
        if known_queries:
            rows = self.known_rows(data.qids).to(self.device)
            if not bool((rows >= 0).any()):
                rows = None
        policy = policy or self.phi.policy
        frozen = None
        if rows is None and data.num_documents <= _SHORT:
            frozen = self._kept_frozen(policy)
        if frozen is None:
            scores = self._in_blocks(data, policy=policy, rows=rows, documents_at_once=documents_at_once)
        else:
            scores = torch.from_numpy(frozen.of_lists(data.features.cpu().numpy(), data.offsets.tolist()))
        if alone or self.base is None:
            return scores
        return self.base.add_to(scores, data)

    def _in_blocks(
        self, data: RankingData, *, policy: str, rows: Tensor | None, documents_at_once: int
    ) -> Tensor:  # rows (Q,) -> (N,)
        """Scores without those of a base, whole lists at a time."""
        scores = torch.empty(data.num_documents, dtype=self.dtype, device="cpu")
        scorer = self.without_idle(policy)
        for first, last in list_blocks(data.offsets, documents_at_once):
            start, stop = int(data.offsets[first]), int(data.offsets[last])
            features, offsets = data.features[start:stop], data.offsets[first : last + 1] - start
            own = scorer._scores(
                features.to(device=self.device, dtype=self.dtype),
                offsets.to(self.device),
                policy=policy,
                rows=None if rows is None else rows[first:last],
            ).cpu()
            # Before trees are added: parts of either sign may cancel, and equal rows would not be level.
            scores[start:stop] = tie_equal_rows(own, features, offsets)
        return scores

    def freeze(self, policy: str | None = None) -> FrozenScorer:
        """The scores as a light function of arrays, for short lists: ``frozen(features, offsets)``.

        `score` makes and keeps one by itself for a call with few documents.

        Args:
            policy: what queries get, instead of the model's own policy.

        Raises:
            LGMMLError: a model with categories or a base, or one that `FrozenScorer` does not take.
        """
        for name, part in (("categories", self.encoder), ("a base", self.base)):
            if part is not None:
                raise LGMMLError(f"a model must be without categories and base to be frozen, got one with {name}")
        return FrozenScorer(self, policy)

    def score_list(self, features: NDArray[Any]) -> NDArray[Any] | None:  # (N, D) -> (N,)
        """Scores of one list of raw features by the frozen form; None where `score` has to be asked."""
        plain = self.encoder is None and self.base is None and features.shape[1] == self.num_features
        if not plain or len(features) > _SHORT or not np.isfinite(features).all():
            return None
        frozen = self._kept_frozen(self.phi.policy)
        if frozen is None:
            return None
        return frozen.of_lists(features, [0, len(features)])

    def _kept_frozen(self, policy: str) -> FrozenScorer | None:
        """The frozen form; None while metrics are trained, on other devices, and where there is none."""
        modules: list[nn.Module] = [self]
        tensors: list[Tensor] = []
        for part in modules:  # by hand: torch's own iterators take a fifth of the time of a short list
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    tensors.append(tensor)
            for child in part._modules.values():
                if child is not None:
                    modules.append(child)
        parts = (*map(id, modules), *map(id, tensors))

        def freeze() -> FrozenScorer | None:
            if self.device.type == "cpu" and not self.metrics.trained:
                with suppress(LGMMLError):
                    return FrozenScorer(self, policy)
            return None

        return self._frozen.get(freeze, tensors, policy, self.kernel, *parts)

    def score_in_caller_order(self, data: RankingData, **options: Any) -> NDArray[Any]:  # (N,)
        """The scores in the order in which the caller gave the rows; ``options`` are those of `score`.

        An array, not a tensor: the package computes in the order of its own rows, and its measures refuse arrays.
        """
        found: NDArray[Any] = data.in_caller_order(self.score(data, **options)).numpy()
        return found

    def calibrate(self, data: RankingData) -> None:
        """Fit the map to chances of grades to lists not trained on, as training does with its validation lists."""
        self.grade_map = fit_grade_map(self.score(data), data.labels)

    @property
    def calibrated(self) -> GradeMap:
        """The map from scores to chances of grades; a model without one refuses, and says how to get one."""
        if self.grade_map is None:
            raise LGMMLError(
                "the model has no map from scores to chances: train it with validation queries whose labels are "
                "grades that rise with its scores, or give `LGMML.calibrate` labelled lists that it was not trained on"
            )
        return self.grade_map

    def predict_proba(self, data: RankingData) -> Tensor:  # (N, G)
        """The chance of each of ``calibrated.grades``, in the order of the rows of ``data``."""
        return self.calibrated.chances(self.score(data))

    def _scores(
        self, features: Tensor, offsets: Tensor, *, policy: str, rows: Tensor | None
    ) -> Tensor:  # (N, D), (Q+1,), (Q,) -> (N,)
        """`forward` without gradients; where all lists have one Φ, without the matrix of distances either."""
        if RULES[policy].looks or rows is not None:
            scores: Tensor = self(features, offsets, policy=policy, rows=rows)
            return scores
        phi = self.phi.for_new(None, len(offsets) - 1, policy)[0]
        return -self.metrics.weighted_sum(self.preprocess(features, offsets), phi, self.kernel)

    def without_idle(self, policy: str) -> LGMML:
        """The model without the metrics that no query gives any weight, where the policy makes no other use of them."""
        if policy not in ("shared", "mean") or not len(self.phi.table.weight):
            return self
        most = self.phi.table.weight.amax(dim=0)
        if self.phi.deviation is not None:
            most = self.phi.table.weight[0] + self.phi.deviation.weight.amax(dim=0)
        used = (most > 0).nonzero()[:, 0]
        if len(used) == self.metrics.num_metrics or len(used) == 0:
            return self
        return self.replace(metrics=self.metrics.select(used), phi=self.phi.select(used))

    def known_rows(self, qids: tuple[Hashable, ...]) -> Tensor:  # (Q,)
        """Row of Φ of each query id, −1 where it was not in the training data."""
        if self.phi.mode != "per_query" and not self.phi.deviations:
            raise LGMMLError(f"`known_queries` needs weights for each query; this model's are {self.phi.mode!r}")
        place = {qid: row for row, qid in enumerate(self.qids)}
        return torch.tensor([place.get(qid, -1) for qid in qids], dtype=torch.long)

    @torch.no_grad()
    def summarize(
        self, dists: Tensor, offsets: Tensor, gather: Callable[[Tensor], Tensor] | None = None
    ) -> None:  # (N, K), (Q+1,)
        """Store summaries of the training lists in Φ, where its mode needs them.

        ``gather`` adds the summaries of the lists that other processes have.
        """
        if not self.phi.needs_summaries:
            return
        blocks = [self.metrics.scales.new_zeros(0, 2 * self.phi.num_metrics)]
        for first, last in list_blocks(offsets, 32_768):
            start, stop = int(offsets[first]), int(offsets[last])
            kappa = kernel(dists[start:stop].to(self.dtype), self.kernel)
            blocks.append(list_summary(kappa, offsets[first : last + 1] - start))
        summaries = torch.cat(blocks)
        if gather is not None:
            summaries = gather(summaries)
        self.phi.set_summaries(summaries)

    def explain(self, data: RankingData, *, qid: Hashable, document: str | int, over: str | int) -> Explanation:
        """Why one document of a list stands above another, see `lgmml_torch.models.explain.explain`."""
        from lgmml_torch.models.explain import explain

        return explain(self, data, qid=qid, document=document, over=over)

    def spec(self) -> dict[str, Any]:
        """All that is needed, besides the tensors, to build the model again: primitives only."""
        spec: dict[str, Any] = {
            "preprocess": self.preprocess.spec(),
            "metrics": self.metrics.spec(),
            "phi": self.phi.spec(),
            "kernel": self.kernel,
            "dtype": str(self.dtype).removeprefix("torch."),
            "feature_names": None,
            "qids": list(map(plain_qid, self.qids)),
        }
        if self.feature_names is not None:
            spec["feature_names"] = list(self.feature_names)
        for name, part in (("categories", self.encoder), ("base", self.base)):
            if part is not None:
                spec[name] = part.spec()
        if self.table is not None:
            spec["table"] = dict(self.table)
        if self.grade_map is not None:
            spec["grade_map"] = asdict(self.grade_map)
        if self.about is not None:
            spec["about"] = self.about
        return spec

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        """A model of the right shapes, to be filled by ``load_state_dict``."""
        parts: dict[str, Any] = {"kernel": spec["kernel"], "qids": tuple(spec["qids"]), "table": spec.get("table")}
        if spec.get("feature_names") is not None:
            parts["feature_names"] = tuple(spec["feature_names"])
        if spec.get("categories") is not None:
            parts["encoder"] = CategoryEncoder.from_spec(spec["categories"])
        if spec.get("base") is not None:
            from lgmml_torch.models.trees import TreeBase  # models without one do not need it

            parts["base"] = TreeBase.from_spec(spec["base"])
        if spec.get("grade_map") is not None:
            parts["grade_map"] = GradeMap.from_spec(spec["grade_map"])
        metrics, phi = LocalMetrics.from_spec(spec["metrics"]), Phi(**spec["phi"])
        model = cls(build_preprocess(spec["preprocess"]), metrics, phi, **parts)
        model.about = spec.get("about")
        return model.to(getattr(torch, spec["dtype"]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file: tensors and primitives only, atomically.

        Raises:
            LGMMLError: weights Φ that are negative or not finite; nothing is written then.
        """
        self.phi.check()
        write_model(path, self.spec(), self.state_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a model that `save` or a training run wrote.

        Raises:
            CheckpointError: for a missing, foreign, damaged or newer file.
        """
        spec, tensors = read_model(path)
        try:
            model = cls.from_spec(spec)
            model.load_state_dict(tensors)
        except LGMMLError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{path} is damaged: its description does not fit ({reason})") from error
        model.metrics.train_metrics_(False)  # a checkpoint may be from the middle of training
        return model.eval()
