"""`LGMMLRanker`: training and scoring behind scikit-learn's interface."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.estimator_inputs import (
    ACCELERATORS,
    Rows,
    check_columns,
    check_parameters,
    held_out,
    query_weights,
    surroundings,
    weighed,
)
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.functional.calibration import GradeMap
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.inputs import feature_names
from lgmml_torch.models.importance import structural_importance
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

if TYPE_CHECKING:
    from lgmml_torch.training.resume import Start
    from lgmml_torch.training.stages import Trained

log = logging.getLogger(__name__)


def _started(init_model: Any) -> Start | None:
    """What to go on from: of a fitted ranker, a model or the file of one."""
    from lgmml_torch.training.resume import Start  # Lightning takes its time to import

    if init_model is None:
        return None
    if isinstance(init_model, LGMMLRanker):
        check_is_fitted(init_model, "model_")
        init_model = init_model.model_
    if isinstance(init_model, (str, os.PathLike)):
        init_model = LGMML.load(init_model)
    if not isinstance(init_model, LGMML):
        kinds = "a model, its file or a fitted ranker"
        raise LGMMLError(f"`init_model` must be {kinds}, got {type(init_model).__name__}")
    return Start.of(init_model)


def _asked_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that differ from their defaults: what the user asked for."""
    usual = LGMMLRanker().get_params(deep=False)
    asked = {}
    for name, value in params.items():
        if value is not usual[name] and value != usual[name]:
            asked[name] = value
    return asked


def _fit_model(
    splits: Mapping[str, RankingData], params: Mapping[str, Any], seed: int, start: Start | None = None
) -> tuple[Trained, Bank]:
    """What the parameters ask for, fitted."""
    # Lightning takes its time to import.
    from lgmml_torch.training.callbacks import LogEpochs, log_rounds
    from lgmml_torch.training.defaults import make_recipe
    from lgmml_torch.training.stages import choose_kind, fit_chosen

    kind = None
    if start is not None:
        kind = start.kind
    chosen = choose_kind(splits, _asked_params(params), seed, measure=params["measure"], start=kind)
    log.info("%s", chosen.reason)
    recipe = replace(make_recipe(params, chosen, seed), grows=start is not None)
    further: dict[str, Any] = {"start": start}
    if params["verbose"]:
        further |= {"on_round": log_rounds, "callbacks": [LogEpochs()]}
    trainer = {**chosen.trainer, "accelerator": ACCELERATORS[params["device"]]}
    if params["epochs"] is not None:
        trainer["max_epochs"] = params["epochs"]
    return fit_chosen(splits, recipe, trainer, **further)


@dataclass(kw_only=True, eq=False, repr=False)
class LGMMLRanker(BaseEstimator):  # type: ignore[misc]
    """A ranker for lists of documents, ``fit(X, y, qid=…)`` and ``predict(X, qid=…)``.

    A frame may hold the query of each row in a column ``qid`` instead, which then goes wherever ``X`` goes: through
    pipelines and searches.

    Args:
        bank: how the local metrics are built: ``"boosted"`` stage by stage, ``"trained"`` by gradient, ``"sampled"``
            (the paper's regions), or ``"auto"``: boosted or trained, by the size of the data and, where that
            leaves it open, by validation queries. A parameter without effect on what is fitted is refused.
        budget: how much work: ``"fast"``, ``"normal"``, ``"thorough"``, or a time of one core such as ``"10m"``.
        rounds: the most rounds of boosting; by the budget when None.
        num_metrics: K of a sampled or trained bank; 500 or by the budget when None.
        bank_options: further settings of `fit_boosted`, `start_trained` or `fit_sampled`.
        preprocess: what happens to raw features: a `Preprocess` or its description; `list_rank_features`, or
            `all_views` for trained metrics, when None.
        features: raw features that boosted and trained metrics see: ``"auto"`` sets aside those that mean nothing where
            most do, ``"all"`` keeps them.
        categories: columns of a frame whose words are categories, besides those whose type says so.
        missing: what NaN stands for, in `fit` and, by the fitted model, in `predict`: ``"error"``, ``"zero"``,
            ``"query-min"`` or ``"query-mean"``; see `RankingData.from_arrays`.
        max_one_hot: a category of up to so many words gets a column for each; of more, the mean label of each word.
        kernel: κ, see `lgmml_torch.functional.score.kernel`.
        phi: how Φ is trained: ``"shared"``, ``"per_query"``, ``"amortized"``, or ``"deviations"``: shared, and a
            deviation from it for each training query; see `Phi`.
        policy: what new queries get; the default of ``phi`` when None.
        epochs: of sampled WARP, 10 when None; 0 keeps the bank's own Φ₀. Of trained metrics, by the budget when None.
        learning_rate: of plain SGD on Φ, .001 when None; of trained metrics, .002.
        loss: a name such as ``"spearman"``, or, for sampled and trained metrics, a differentiable function ``(scores,
            labels, offsets) -> (Q,)`` of tensors; ``"warp"``, or ``"softmax"`` for trained metrics, when None.
        margin: ζ.
        measure: what decides on validation queries when to stop and which epoch is kept, and what `score` gives: a name
            such as ``"ndcg@10"``, or a function ``(scores, labels, offsets) -> (Q,)`` of tensors with NaN for a query
            that does not count.
        batch_size: lists in a batch; 32, or 16 for trained metrics of fewer than 400,000 documents, when None.
        max_draws: negatives drawn for each positive.
        validation_fraction: share of the queries held out in `fit` when it gets no ``eval_set``; they decide when
            boosting stops and which epoch is kept. 0 trains on all of them, to the end.
        precision: ``"float32"`` or ``"float64"``.
        random_state: a seed, a `numpy.random.RandomState`, or None for a different one each time.
        n_jobs: cores to use; all when None.
        device: where Φ is trained and lists are scored: ``"cpu"``, ``"cuda"``, or ``"auto"`` for the best there is.
        verbose: 0 is silent, 1 tells stages, rounds and epochs: through logging, or on standard error where the
            program has set up none.

    Attributes:
        model_: the fitted `LGMML`.
        n_features_in_: number of features.
        feature_names_in_: their names, when ``X`` was a frame with text as column names.
        bank_history_: how building the metrics went.
        validation_curve_: ``measure`` on validation by epoch, epoch 0 being the untrained Φ; empty without validation.
        best_epoch_: the epoch whose Φ was kept.
        position_bias_: what being shown at each position added to a score in training; None without positions.
        classes_: the grades that `predict_proba` has columns for: the labels of the validation queries.
        feature_importances_: a share of each feature, adding up to 1, by the structure of the model.

    >>> X = np.linspace(0, 1, 60)[:, None] ** [1, 2]
    >>> ranker = LGMMLRanker(rounds=2, epochs=0, random_state=0)
    >>> _ = ranker.fit(X, X[:, 0] > 0.8, qid=np.arange(60) % 6)
    >>> ranker.predict(X[:12], qid=[0] * 12).shape
    (12,)
    """

    # What scikit-learn's metadata routing passes on without being asked.
    __metadata_request__fit: ClassVar[dict[str, bool]] = {"qid": True}
    __metadata_request__predict: ClassVar[dict[str, bool]] = {"qid": True}
    __metadata_request__predict_proba: ClassVar[dict[str, bool]] = {"qid": True}
    __metadata_request__score: ClassVar[dict[str, bool]] = {"qid": True}

    bank: str = "auto"
    budget: str = "normal"
    rounds: int | None = None
    num_metrics: int | None = None
    bank_options: Mapping[str, Any] | None = None
    preprocess: Preprocess | Mapping[str, Any] | None = None
    features: str = "auto"
    categories: Sequence[str] | None = None
    missing: str = "error"
    max_one_hot: int = 12
    kernel: str = "paper"
    phi: str = "shared"
    policy: str | None = None
    epochs: int | None = None
    learning_rate: float | None = None
    loss: Any = None
    margin: float = 0.1
    measure: Any = "ndcg@10"
    batch_size: int | None = None
    max_draws: int | None = 10
    validation_fraction: float = 0.2
    precision: str = "float32"
    random_state: Any = None
    n_jobs: int | None = None
    device: str = "cpu"
    verbose: int = 0

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        qid: Any = None,
        group: Any = None,
        sample_weight: Any = None,
        eval_set: Any = None,
        eval_qid: Any = None,
        eval_group: Any = None,
        position: Any = None,
        init_model: Any = None,
    ) -> Self:
        """Build the metrics and train Φ.

        Args:
            X: ``(N, D)`` numpy, torch, scipy sparse, or a frame of pandas, polars or pyarrow; rows in any order.
            y: ``(N,)`` relevance, higher is better.
            qid: ``(N,)`` the query of each row.
            group: sizes of consecutive queries instead, as LightGBM has it.
            sample_weight: ``(N,)`` at least 0: what the relevance of each row counts, such as one over the chance that
                a clicked document was looked at. The same for all rows of a query, it is the weight of the query, and
                one of weight 0 is left out altogether. Metrics of a sampled bank make no difference between weights.
            eval_set: ``(X, y, qid)`` of validation queries, instead of a share of the training queries; or, as
                LightGBM and XGBoost have it, ``[(X, y)]``, of several such pairs the last.
            eval_qid: ``[qid]`` of these pairs.
            eval_group: ``[group]`` of these pairs instead.
            position: ``(N,)`` where each row was shown when its clicks were logged, whole numbers: what a position adds
                to a score is learned along and left out of scores. Queries held out of ``X`` are judged with it.
            init_model: a model, its file or a fitted ranker to go on from: boosted metrics get ``rounds`` more, trained
                ones go on being trained, sampled ones stay; its preprocessing stays in any case.

        Raises:
            DataError: for data that does not fit together or holds nothing to learn.
            LGMMLError: for a parameter that does not exist or lies outside its range.
        """
        check_parameters(self.get_params(deep=False), grows=init_model is not None)
        seed, start = self._seed(), _started(init_model)
        rows = Rows(X, y, qid, group).with_queries()
        reading = {"categories": self.categories, "missing": self.missing}
        data = weighed(self._data(rows, **reading, positions=position), sample_weight)
        judged = Rows.to_validate_on(eval_set, eval_qid, eval_group)
        if judged is None:
            train, valid = held_out(data, self.validation_fraction, seed)
        else:
            train, valid = data, self._data(judged, **reading)
            check_columns(feature_names(judged.X), feature_names(rows.X), "eval_set")
            if valid.num_features != data.num_features:
                got = valid.num_features
                raise DataError(f"`eval_set` must have {data.num_features} features as `X`, got {got}")
            if not (valid.labels > 0).any():
                raise DataError("`eval_set` must have a query with a relevant document, got none")
        splits = {"train": train}
        if valid is not None:
            splits["valid"] = valid
        with surroundings(self.n_jobs, self.verbose):
            trained, bank = _fit_model(splits, self.get_params(deep=False), seed, start)
        self.model_ = trained.model.to(trained.trainer.strategy.root_device)
        self.bank_history_, self.validation_curve_ = bank.history, dict(trained.keeper.curve)
        self.best_epoch_, self.position_bias_ = trained.keeper.best_epoch, trained.position_bias
        self.n_features_in_ = data.num_features
        self._keep_names(feature_names(rows.X))
        return self

    def _keep_names(self, names: Sequence[str] | None) -> None:
        if names is not None:
            self.feature_names_in_ = np.asarray(names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    def predict(self, X: Any, *, qid: Any = None, group: Any = None) -> NDArray[Any]:
        """Scores, one per row in the order of the rows; higher is better. Whole lists belong in one call.

        Args:
            X: as in `fit`.
            qid: the query of each row: a document's score may depend on its list.
            group: sizes of consecutive queries instead.
        """
        rows = Rows(X, None, qid, group)
        scores = rows.score_one_list(getattr(self, "model_", None), getattr(torch, self.precision))
        if scores is None:
            check_is_fitted(self, "model_")
            unlabelled = np.zeros(X.shape[0] if hasattr(X, "shape") else len(X), np.float32)
            scores = self.model_.score_in_caller_order(self._features(rows._replace(y=unlabelled)))
        return scores

    @property
    def predict_proba(self) -> Callable[..., NDArray[np.float64]]:
        """``predict_proba(X, qid=…)``: ``(N, G)`` chances of the grades ``classes_``, by the order of the rows.

        They mean the same in every list, and there are none without validation queries that have grades.
        """
        grade_map = self._grade_map()
        return lambda X, *, qid=None, group=None: grade_map.chances(self.predict(X, qid=qid, group=group)).numpy()

    def expected_label(self, X: Any, *, qid: Any = None, group: Any = None) -> NDArray[np.float64]:
        """The mean label of documents of such a score, one per row, from the chances of `predict_proba`."""
        return self._grade_map().expected(self.predict(X, qid=qid, group=group)).numpy()

    @property
    def classes_(self) -> NDArray[np.float64]:  # (G,)
        """The grades."""
        return np.array(self._grade_map().grades)

    def _grade_map(self) -> GradeMap:
        """As an attribute that is missing, for scikit-learn asks with ``hasattr``."""
        check_is_fitted(self, "model_")
        try:
            return self.model_.calibrated
        except LGMMLError as error:
            raise AttributeError(str(error)) from error

    def score(self, X: Any, y: Any, *, qid: Any = None, group: Any = None, sample_weight: Any = None) -> float:
        """Mean of ``measure`` over the queries; NDCG@10 leaves those without a relevant document out.

        ``sample_weight``, the same for all rows of a query, weighs the queries.
        """
        check_is_fitted(self, "model_")
        data = self._features(Rows(X, y, qid, group))
        weights = None
        if sample_weight is not None:
            weights = query_weights(sample_weight, data)
        return mean_measure(self.model_.score(data), data, self.measure, weights=weights)

    @property
    def feature_importances_(self) -> NDArray[np.float64]:  # (D,)
        """How much of the distances that scores are made of comes from each feature, see `structural_importance`.

        The share of a category is that of all columns that its words became.
        """
        check_is_fitted(self, "model_")
        columns = structural_importance(self.model_).features
        encoder = self.model_.encoder
        if encoder is None:
            return np.asarray(columns)
        return np.array([float(part.sum()) for part in torch.split(columns, encoder.widths)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model, see `LGMML.save`."""
        check_is_fitted(self, "model_")
        self.model_.save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A ranker that predicts with a stored model; its training parameters are the defaults."""
        model = LGMML.load(path)
        phi = model.phi.mode
        if model.phi.deviations:
            phi = "deviations"
        ranker = cls(kernel=model.kernel, phi=phi, policy=model.phi.policy, missing=model.reading["missing"])
        ranker.model_, ranker.n_features_in_ = model, model.reading["num_features"]
        ranker._keep_names(model.reading["feature_names"])
        return ranker

    def _data(self, rows: Rows, **reading: Any) -> RankingData:
        return RankingData.from_arrays(**rows._asdict(), dtype=getattr(torch, self.precision), **reading)

    def _features(self, rows: Rows) -> RankingData:
        """Data for the fitted model."""
        rows = rows.with_queries()
        check_columns(feature_names(rows.X), getattr(self, "feature_names_in_", None), "X")
        known = self.model_.reading
        data = self._data(rows, categories=known["categories"], missing=known["missing"])
        if data.num_features != self.n_features_in_:
            raise DataError(f"`X` must have {self.n_features_in_} features as in `fit`, got {data.num_features}")
        return data

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn may expect: sparse features are taken, labels are needed."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        return tags

    def _seed(self) -> int:
        if isinstance(self.random_state, (int, np.integer)):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))
