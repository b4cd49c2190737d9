"""`LGMMLRanker`: training and scoring behind scikit-learn's interface."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from lgmml_torch.checks import DataError, DataWarning, LGMMLError, check_choice, check_positive, check_unit_interval
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.fitting.boosted.fit import fit_boosted
from lgmml_torch.fitting.sampled import fit_sampled
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.inputs import check_length, float_vector
from lgmml_torch.models.phi import POLICIES, Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import build_preprocess, list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_max, segment_min

if TYPE_CHECKING:
    from lgmml_torch.training.stages import Recipe, Trained
    from lgmml_torch.training.ways import Way

log = logging.getLogger(__name__)


def feature_names(X: Any) -> NDArray[np.object_] | None:
    """Names of the columns of a frame, if all of them are text."""
    columns = getattr(X, "columns", None)
    if columns is None or not all(isinstance(name, str) for name in columns):
        return None
    return np.asarray(list(columns), dtype=object)


def check_names(got: NDArray[np.object_] | None, fitted: NDArray[np.object_] | None, what: str) -> None:
    """Require the columns of `fit`, in their order, where both have names."""
    if got is None or fitted is None or list(got) == list(fitted):
        return
    new, gone = [name for name in got if name not in fitted], [name for name in fitted if name not in got]
    how = f"unknown {new[:3]}, missing {gone[:3]}" if new or gone else "the same names in another order"
    raise DataError(f"`{what}` must have the columns it had in `fit`, got {how}")


def query_weights(
    sample_weight: Any,  # (N,) in the caller's order
    data: RankingData,
) -> Tensor:  # (Q,)
    """One weight per query from weights of rows, which must agree within a query.

    Raises:
        DataError: for weights that are negative, not finite, all zero, or different within a query.

    >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0]], [0, 1, 0], qid=["b", "b", "a"])
    >>> query_weights([2.0, 2.0, 0.5], data)
    tensor([0.5000, 2.0000])
    """
    given = torch.from_numpy(float_vector("sample_weight", sample_weight))
    check_length("sample_weight", len(given), data.num_documents)
    if not bool(((given >= 0) & given.isfinite()).all()):
        bad = given[~((given >= 0) & given.isfinite())][0]
        raise DataError(f"`sample_weight` must be finite and at least 0, got {float(bad):g}")
    rows = given[data.order]
    low, high = segment_min(rows, data.offsets), segment_max(rows, data.offsets)
    if bool((low != high).any()):
        query = int((low != high).nonzero()[0])
        raise DataError(
            "`sample_weight` must be the same for all rows of a query, because queries are what is weighted, got "
            f"{float(low[query]):g} and {float(high[query]):g} for qid {data.qids[query]!r}"
        )
    if not bool((high > 0).any()):
        raise DataError("`sample_weight` must be above 0 for some query, got 0 for all")
    return high


def has_relevant(data: RankingData) -> bool:
    """Whether validation can measure anything."""
    return bool((data.labels > 0).any())


def held_out(data: RankingData, fraction: float, seed: int) -> tuple[RankingData, RankingData | None]:
    """The data cut by query into training and validation; without the latter when that would be of no use.

    Queries with different labels are shared out apart from the others, so that both parts have some of them.
    """
    if fraction == 0:
        return data, None
    varied = segment_max(data.labels, data.offsets) > segment_min(data.labels, data.offsets)
    useful, others = varied.nonzero()[:, 0], (~varied).nonzero()[:, 0]
    if len(useful) < 2:
        warnings.warn(
            f"of {data.num_queries} queries, {len(useful)} have documents of different labels: none can be held out "
            "for validation; training on all of them, to the end",
            DataWarning,
            stacklevel=3,
        )
        return data, None
    generator = torch.Generator().manual_seed(seed)
    count = min(max(1, round(fraction * len(useful))), len(useful) - 1)
    chosen = torch.zeros(data.num_queries, dtype=torch.bool)
    chosen[useful[torch.randperm(len(useful), generator=generator)[:count]]] = True
    chosen[others[torch.randperm(len(others), generator=generator)[: round(fraction * len(others))]]] = True
    return data.select((~chosen).nonzero()[:, 0]), data.select(chosen.nonzero()[:, 0])


@contextmanager
def surroundings(threads: int | None, verbose: int) -> Iterator[None]:
    """So many threads, and no more talk than asked for; both as before in the end."""
    talkers = [logging.getLogger(name) for name in ("lgmml_torch", "pytorch_lightning", "lightning")]
    levels = [talker.level for talker in talkers]
    before = torch.get_num_threads()
    for talker in talkers:
        talker.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        if threads is not None and threads > 0:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
        for talker, level in zip(talkers, levels, strict=True):
            talker.setLevel(level)


BANKS = ("auto", "boosted", "trained", "sampled")
WARP_EPOCHS, WARP_RATE = 10, 0.001
ACCELERATORS = {"cpu": "cpu", "cuda": "gpu", "auto": "auto"}  # and what Lightning calls them


def settled(params: Mapping[str, Any], train: RankingData) -> tuple[dict[str, Any], Way]:
    """The parameters with a bank and epochs of their own, as the size of the data has them, and why."""
    from lgmml_torch.training.ways import choose_way  # Lightning takes its time to import

    budget, bank = params["budget"], params["bank"]
    way = choose_way(train.num_queries, train.num_documents, train.num_features, budget, trained=bank == "trained")
    if bank == "auto":
        plain = params["phi"] == "shared" and params["preprocess"] is None and not params["bank_options"]
        bank = way.bank if plain else "boosted"
    trained = bank == "trained"
    epochs = params["epochs"] if params["epochs"] is not None else way.epochs if trained else WARP_EPOCHS
    rounds = params["rounds"] if params["rounds"] is not None else way.rounds
    return {**params, "bank": bank, "epochs": epochs, "rounds": rounds}, way


def make_recipe(params: Mapping[str, Any], seed: int, way: Way | None = None) -> Recipe:
    """What the parameters of `LGMMLRanker` want fitted."""
    from lgmml_torch.training.losses import Warp
    from lgmml_torch.training.stages import PhiSettings, Recipe  # Lightning takes its time to import
    from lgmml_torch.training.ways import trained_recipe

    if way is not None and params["bank"] == "trained":
        return trained_recipe(
            way, seed, preprocess=params["preprocess"] and partial(new_preprocess, params["preprocess"]),
            rate=params["learning_rate"], options={"kernel": params["kernel"], **(params["bank_options"] or {})},
            loader={"batch_size": params["batch_size"]}, mode=params["phi"], policy=params["policy"],
        )  # fmt: skip
    options = {"kernel": params["kernel"], **(params["bank_options"] or {})}
    banks = {
        "sampled": partial(fit_sampled, num_metrics=params["num_metrics"], **options),
        "boosted": partial(fit_boosted, rounds=params["rounds"], **options),
    }
    return Recipe(
        preprocess=partial(new_preprocess, params["preprocess"]),
        fit_bank=banks[params["bank"]],
        make_phi=partial(Phi, mode=params["phi"], policy=params["policy"]),
        phi=PhiSettings(
            loss=Warp(params["margin"]),
            loader={"batch_size": params["batch_size"], "max_draws": params["max_draws"]},
            optimizer=partial(torch.optim.SGD, lr=params["learning_rate"] or WARP_RATE),
        ),
        seed=seed,
    )


def fit_model(splits: Mapping[str, RankingData], params: Mapping[str, Any], seed: int) -> tuple[Trained, Bank]:
    """Preprocessing, metrics, then Φ; nothing stays on disk."""
    from lgmml_torch.training.stages import Surroundings, prepare, train_phi
    from lgmml_torch.training.ways import GRADIENT_CLIP

    params, way = settled(params, splits["train"])
    log.info("%s", way.reason if params["bank"] == way.bank else f"{params['bank']} metrics, as asked for")
    recipe = make_recipe(params, seed, way)
    prepared = prepare(splits, recipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = {
            "max_epochs": params["epochs"], "accelerator": ACCELERATORS[params["device"]], "default_root_dir": folder,
            "gradient_clip_val": GRADIENT_CLIP if params["bank"] == "trained" else None,
        }  # fmt: skip
        trained = train_phi(prepared, recipe, Surroundings(Path(folder), trainer))
    return trained, prepared.bank


def new_preprocess(given: Preprocess | Mapping[str, Any] | None) -> Preprocess:
    """An unfitted copy: fitting must not change what was passed in."""
    if given is None:
        return list_rank_features()
    return build_preprocess(given.spec() if isinstance(given, Preprocess) else given)


def check_parameters(params: Mapping[str, Any]) -> None:
    """Refuse what is unknown or out of range before any work is done."""
    from lgmml_torch.training.ways import find_budget

    phi = params["phi"]
    check_choice("bank", params["bank"], BANKS)
    check_choice("kernel", params["kernel"], KERNELS)
    check_choice("device", params["device"], ACCELERATORS)
    check_choice("phi", phi, POLICIES)
    check_choice("precision", params["precision"], ("float32", "float64"))
    if params["policy"] is not None:
        check_choice("policy", params["policy"], POLICIES[phi])
    for name in ("num_metrics", "margin", "batch_size"):
        check_positive(name, params[name])
    for name in ("rounds", "learning_rate", "epochs"):
        if params[name] is not None:
            check_positive(name, params[name], zero=name == "epochs")
    find_budget(params["budget"], 0, 0)
    check_unit_interval("validation_fraction", params["validation_fraction"])
    if params["validation_fraction"] == 1:
        raise LGMMLError("`validation_fraction` must leave queries to train on, got 1")
    if params["n_jobs"] not in (None, -1):
        check_positive("n_jobs", params["n_jobs"])


class LGMMLRanker(BaseEstimator):  # type: ignore[misc]
    """A ranker for lists of documents, ``fit(X, y, qid=…)`` and ``predict(X, qid=…)``.

    Args:
        bank: how the local metrics are built: ``"boosted"`` stage by stage, ``"trained"`` by gradient, ``"sampled"``
            (the paper's regions), or ``"auto"``: boosted or trained, by the size of the data.
        budget: how much work: ``"fast"``, ``"normal"``, ``"thorough"``, or a time of one core such as ``"10m"``.
        rounds: at most so many rounds of boosting; by the budget when None.
        num_metrics: K, for a sampled bank.
        bank_options: further settings of `fit_boosted`, `start_trained` or `fit_sampled`.
        preprocess: what happens to raw features: a `Preprocess` or its description; `list_rank_features`, or
            `all_views` for trained metrics, when None.
        kernel: κ, see `lgmml_torch.functional.score.kernel`.
        phi: how Φ is trained: ``"shared"``, ``"per_query"`` or ``"amortized"``.
        policy: what new queries get; the way's own default when None.
        epochs: of sampled WARP, 10 when None; 0 keeps the bank's own Φ₀. Of trained metrics, by the budget when None.
        learning_rate: of plain SGD on Φ, .001 when None; of trained metrics, .002.
        margin: ζ.
        batch_size: lists in a batch.
        max_draws: negatives drawn for each positive.
        validation_fraction: share of the queries held out in `fit` when it gets no ``eval_set``; they decide when
            boosting stops and which epoch is kept. 0 trains on all of them, to the end.
        precision: ``"float32"`` or ``"float64"``.
        random_state: a seed, a `numpy.random.RandomState`, or None for a different one each time.
        n_jobs: cores to use; all when None.
        device: where Φ is trained and lists are scored: ``"cpu"``, ``"cuda"``, or ``"auto"`` for the best there is.
        verbose: 0 is silent, 1 tells the stages through logging.

    Attributes:
        model_: the fitted `LGMML`.
        n_features_in_: number of features.
        feature_names_in_: their names, when ``X`` was a frame with text as column names.
        bank_history_: how building the metrics went.
        validation_curve_: validation NDCG@10 by epoch, epoch 0 being the untrained Φ; empty without validation.
        best_epoch_: the epoch whose Φ was kept.

    >>> X = np.linspace(0, 1, 60)[:, None] ** [1, 2]
    >>> ranker = LGMMLRanker(rounds=2, epochs=0, random_state=0)
    >>> _ = ranker.fit(X, X[:, 0] > 0.8, qid=np.arange(60) % 6)
    >>> ranker.predict(X[:12], qid=[0] * 12).shape
    (12,)
    """

    # What scikit-learn's metadata routing passes on without being asked.
    __metadata_request__fit: ClassVar[dict[str, bool]] = {"qid": True}
    __metadata_request__predict: ClassVar[dict[str, bool]] = {"qid": True}
    __metadata_request__score: ClassVar[dict[str, bool]] = {"qid": True}

    def __init__(
        self,
        *,
        bank: str = "auto",
        budget: str = "normal",
        rounds: int | None = None,
        num_metrics: int = 500,
        bank_options: Mapping[str, Any] | None = None,
        preprocess: Preprocess | Mapping[str, Any] | None = None,
        kernel: str = "paper",
        phi: str = "shared",
        policy: str | None = None,
        epochs: int | None = None,
        learning_rate: float | None = None,
        margin: float = 0.1,
        batch_size: int = 32,
        max_draws: int | None = 10,
        validation_fraction: float = 0.2,
        precision: str = "float32",
        random_state: Any = None,
        n_jobs: int | None = None,
        device: str = "cpu",
        verbose: int = 0,
    ) -> None:
        self.bank = bank
        self.budget = budget
        self.rounds = rounds
        self.num_metrics = num_metrics
        self.bank_options = bank_options
        self.preprocess = preprocess
        self.kernel = kernel
        self.phi = phi
        self.policy = policy
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.margin = margin
        self.batch_size = batch_size
        self.max_draws = max_draws
        self.validation_fraction = validation_fraction
        self.precision = precision
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.device = device
        self.verbose = verbose

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        qid: Any = None,
        sample_weight: Any = None,
        eval_set: tuple[Any, Any, Any] | None = None,
    ) -> Self:
        """Build the metrics and train Φ.

        Args:
            X: ``(N, D)`` numpy, torch, pandas or scipy sparse; rows in any order.
            y: ``(N,)`` relevance, higher is better.
            qid: ``(N,)`` the query of each row. Required.
            sample_weight: ``(N,)`` at least 0, the same for all rows of a query: queries are what is weighted. The
                loss of Φ is multiplied by it, and a query of weight 0 is left out altogether; between other weights
                the closed-form metrics make no difference.
            eval_set: ``(X, y, qid)`` of validation queries, instead of a share of the training queries.

        Raises:
            DataError: for data that does not fit together or holds nothing to learn.
            LGMMLError: for a parameter that does not exist or lies outside its range.
        """
        check_parameters(self.get_params(deep=False))
        seed = self._seed()
        data = self._data(X, y, qid)
        weights = None if sample_weight is None else query_weights(sample_weight, data)
        names = feature_names(X)
        if eval_set is not None and len(eval_set) != 3:
            raise DataError(f"`eval_set` must be (X, y, qid), got {len(eval_set)} parts")
        if weights is not None:
            data = data.replace(query_weights=weights).select((weights > 0).nonzero()[:, 0])
        if eval_set is None:
            train, valid = held_out(data, self.validation_fraction, seed)
        else:
            train, valid = data, self._data(*eval_set)
            check_names(feature_names(eval_set[0]), names, "eval_set")
            if valid.num_features != data.num_features:
                got = valid.num_features
                raise DataError(f"`eval_set` must have {data.num_features} features as `X`, got {got}")
            if not has_relevant(valid):
                raise DataError("`eval_set` must have a query with a relevant document, got none")
        with surroundings(self.n_jobs, self.verbose):
            splits = {"train": train} if valid is None else {"train": train, "valid": valid}
            trained, bank = fit_model(splits, self.get_params(deep=False), seed)
        self.model_ = trained.model.to(trained.trainer.strategy.root_device)
        self.bank_history_, self.validation_curve_ = bank.history, dict(trained.keeper.curve)
        self.best_epoch_ = trained.keeper.best_epoch
        self.n_features_in_ = data.num_features
        if names is not None:
            self.feature_names_in_ = names
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return self

    def predict(self, X: Any, *, qid: Any = None) -> NDArray[Any]:
        """Scores, one per row in the order of the rows; higher is better. Whole lists belong in one call.

        Args:
            X: as in `fit`.
            qid: the query of each row. Required: a document's score may depend on its list.
        """
        check_is_fitted(self, "model_")
        data = self._features(X, np.zeros(X.shape[0] if hasattr(X, "shape") else len(X), np.float32), qid)
        return self.model_.score_in_caller_order(data)

    def score(self, X: Any, y: Any, *, qid: Any = None) -> float:
        """Mean NDCG@10 over the queries; those without a relevant document are left out."""
        check_is_fitted(self, "model_")
        data = self._features(X, y, qid)
        return mean_ndcg(self.model_.score(data), data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model, see `LGMML.save`."""
        check_is_fitted(self, "model_")
        self.model_.save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A ranker that predicts with a stored model; its training parameters are the defaults."""
        model = LGMML.load(path)
        ranker = cls(kernel=model.kernel, phi=model.phi.mode, policy=model.phi.policy)
        ranker.model_, ranker.n_features_in_ = model, model.num_features
        return ranker

    def _data(self, X: Any, y: Any, qid: Any) -> RankingData:
        if qid is None:
            raise DataError("`qid` must name the query of each row, got None")
        return RankingData.from_arrays(X, y, qid=qid, dtype=getattr(torch, self.precision))

    def _features(self, X: Any, y: Any, qid: Any) -> RankingData:
        """Data for the fitted model."""
        check_names(feature_names(X), getattr(self, "feature_names_in_", None), "X")
        data = self._data(X, y, qid)
        if data.num_features != self.n_features_in_:
            raise DataError(f"`X` must have {self.n_features_in_} features as in `fit`, got {data.num_features}")
        return data

    def _seed(self) -> int:
        if isinstance(self.random_state, (int, np.integer)):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))
