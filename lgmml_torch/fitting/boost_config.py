"""Settings of boosted local metrics."""

from __future__ import annotations

from dataclasses import dataclass

from lgmml_torch.checks import LGMMLError, check_choice, check_positive, check_unit_interval

METRICS = ("gmml", "gmml-pooled", "identity")


@dataclass(frozen=True)
class BoostConfig:
    """Settings of `fit_boosted`; the defaults are the recipe of the method, not tuned any further.

    Attributes:
        rounds: at most so many.
        batch: metrics added in each round.
        shrinkage: ν, the share of a Newton step that is taken.
        candidates: subspaces tried in each round, shared out evenly over ``sizes``.
        sizes: numbers of features of the subspaces.
        anchors: documents tried as anchors in each subspace.
        steps: how far the mean anchor is moved away from the negatives, further anchors to try.
        bandwidths: times the mean distance, what distances are divided by.
        metric: ``"gmml"`` (pairs within queries), ``"gmml-pooled"`` (pairs of all queries) or ``"identity"``.
        lam: λ, regularisation of both scatters relative to their trace.
        t: weight on the geodesic from S⁻¹ to D.
        ridge: of the Newton system, relative to the total Hessian.
        min_deviation: kernels that vary less over the documents are rejected.
        subsample: share of the queries a round looks at.
        cap: documents a round fits to; the gradients come from whole lists of at most ``4 * cap`` documents.
        truncation: LambdaRank pairs need a document among the first so many places.
        sigma: slope of LambdaRank.
        hessian_floor: added to p(1 - p); without it a step has no bound.
        feature_floor: smallest sampling weight of a feature, relative to the mean.
        prior_power: exponent of the prior on features (see `feature_prior`); 0 turns it off.
        evaluate_every: rounds between two looks at NDCG.
        k: cutoff of that NDCG.
        smooth: evaluations averaged before they are compared.
        patience: rounds without a better average after which to stop.
    """

    rounds: int = 200
    batch: int = 4
    shrinkage: float = 0.1
    candidates: int = 24
    sizes: tuple[int, ...] = (1, 2, 3)
    anchors: int = 6
    steps: tuple[float, ...] = (2.0, 8.0)
    bandwidths: tuple[float, ...] = (0.3, 1.0, 3.0)
    metric: str = "gmml"
    lam: float = 0.1
    t: float = 0.5
    ridge: float = 0.05
    min_deviation: float = 0.01
    subsample: float = 0.7
    cap: int = 2500
    truncation: int = 30
    sigma: float = 1.0
    hessian_floor: float = 0.05
    feature_floor: float = 0.05
    prior_power: float = 0.0
    evaluate_every: int = 5
    k: int = 10
    smooth: int = 3
    patience: int = 40

    def __post_init__(self) -> None:
        # A configuration file gives lists; equal settings should compare equal.
        for name in ("sizes", "steps", "bandwidths"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_choice("metric", self.metric, METRICS)
        check_unit_interval("t", self.t)
        check_unit_interval("subsample", self.subsample)
        for name in (
            "rounds", "batch", "shrinkage", "candidates", "anchors", "ridge", "subsample", "cap", "truncation", "sigma",
            "hessian_floor", "feature_floor", "evaluate_every", "k", "smooth", "patience", "min_deviation",
        ):  # fmt: skip
            check_positive(name, getattr(self, name))
        for name in ("lam", "prior_power"):
            check_positive(name, getattr(self, name), zero=True)
        for name in ("sizes", "bandwidths"):
            values = getattr(self, name)
            if not values or min(values) <= 0:
                raise LGMMLError(f"`{name}` must hold positive numbers, got {list(values)}")
        if self.candidates < len(self.sizes):
            raise LGMMLError(
                f"`candidates` must be at least one for each of the {len(self.sizes)} sizes, got {self.candidates}"
            )
