"""The stages of training one by one, with builders and trainers that only note what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import ConfigError, DataError, LGMMLError
from lgmml_torch.distributed import Spread
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.functional.ranking.custom import Measure
from lgmml_torch.models.encode import CategorySettings
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.lists import TrainingLists
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.ragged import RankingData
from lgmml_torch.sharing import pick_lists
from lgmml_torch.training import stages
from lgmml_torch.training.callbacks import KeepCheckpoints, Story
from lgmml_torch.training.checkpoints import CheckpointFiles
from lgmml_torch.training.losses import Softmax, Warp
from lgmml_torch.training.module import DEFAULT_OPTIMIZER, Dropout, LGMMLModule
from lgmml_torch.training.rows import OwnRows, OwnRowsFiles, OwnRowsStrategy
from lgmml_torch.training.stages import (
    PhiSettings,
    Prepared,
    Recipe,
    Surroundings,
    Trained,
    add_inputs,
    check_positions,
    make_module,
    make_trainer,
    prepare,
    rehearse,
    train_phi,
)
from lgmml_torch.training.start import Start
from lgmml_torch.training.views import Views

LABELS = [0, 1, 2, 0, 1, 0, 0, 1, 1]


def data(**more: Any) -> RankingData:
    X = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    return RankingData.from_arrays(X, LABELS, group=[3, 2, 4], **more)


def spread_over(lists: RankingData, size: int = 1) -> RankingData:
    """The lists of the first of so many processes."""
    spread = Spread(lists.sizes, torch.arange(lists.num_queries) % size, 0)
    return lists.select(spread.own).replace(spread=spread)


def metrics(count: int = 3) -> LocalMetrics:
    g = torch.Generator().manual_seed(1)
    return LocalMetrics(
        [MetricBlock(torch.randn(count, 2, generator=g), torch.randn(count, 2, 1, generator=g))], num_features=2
    )


def builder(asked: list[Any] | None = None, bank: Bank | None = None, rounds: int = 0, **marks: Any) -> Any:
    """A builder with attributes, which notes how it is called."""

    def build(
        data: RankingData,
        valid: RankingData | None = None,
        *,
        seed: int = 0,
        on_round: Any = None,
        **more: Any,
    ) -> Bank:
        if asked is not None:
            asked.append((data, valid, seed, more))
        for done in range(1, rounds + 1):
            on_round(done, SimpleNamespace(total=4))
        return bank or Bank(metrics())

    build.__dict__.update(marks)
    return build


def recipe(fit_bank: Any = None, **more: Any) -> Recipe:
    return Recipe(lambda: Chain([Standardize()]), fit_bank or builder(), **more)


def prepared(bank: Bank | None = None, splits: dict[str, RankingData] | None = None, **more: Any) -> Prepared:
    lists = data()
    preprocess = Chain([Standardize()]).fit(lists.features, lists.offsets)
    return Prepared(preprocess, bank or Bank(metrics()), splits or {"train": lists, "valid": lists}, **more)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What progress bars are told."""
    told: list[Any] = []

    @contextmanager
    def bar(title: str, total: float) -> Iterator[Callable[[float], None]]:
        told.append((title, total))
        yield told.append

    monkeypatch.setattr(stages, "progress_bar", bar)
    return told


class TestSettings:
    def test_what_nobody_says(self) -> None:
        settings = PhiSettings()
        assert (settings.loss, settings.loader, settings.dropout) == (Warp(), {}, Dropout())
        assert (settings.optimizer, settings.step_size, settings.distances) == (DEFAULT_OPTIMIZER, None, None)
        assert (settings.deviation_penalty, settings.keep, settings.preset) == (0.0, "best", "default")
        found = recipe()
        assert (found.make_phi, found.phi, found.seed, found.categories) == (Phi, settings, 0, CategorySettings())
        assert (found.measure, found.grows, found.own_measure) == ("ndcg@10", False, None)
        around = Surroundings(Path("here"))
        assert (around.trainer, around.callbacks, around.loggers) == ({}, (), ())
        assert (around.cache, around.resume, around.every_n_steps) == (None, None, 500)
        assert prepared().inputs == {}
        assert prepared().encoder is None

    def test_a_measure_reaches_builders_that_take_one(self) -> None:
        own = Measure("map")
        for marks, measure, expected in (
            ({}, "map", {}),
            ({"takes_measure": True}, "map", {"measure": own}),
            ({"takes_measure": True}, "ndcg@10", {}),
            ({}, "ndcg@10", {}),
        ):
            asked: list[Any] = []
            found = recipe(builder(asked, **marks), measure=measure)
            assert found.own_measure == (own if measure == "map" else None)
            found.build_bank()(data())
            assert asked[0][3] == expected

    def test_a_start_reaches_the_builder(self) -> None:
        asked: list[Any] = []
        bank = Bank(metrics())
        recipe(builder(asked)).build_bank(bank)(data())
        assert asked[0][3] == {"start": bank}


class TestModel:
    def test_weights_begin_where_the_bank_says(self) -> None:
        assert prepared().model(Phi).phi.table.weight.tolist() == [[1.0, 1.0, 1.0]]
        bank = Bank(metrics(), phi=torch.tensor([0.5, 0.25, 2.0]))
        assert prepared(bank).model(Phi).phi.table.weight.tolist() == [[0.5, 0.25, 2.0]]

    def test_it_has_all_that_was_prepared(self) -> None:
        lists = data(feature_names=["x", "y"])
        found = prepared(Bank(metrics(), "distance"), {"train": lists})
        model = found.model(partial(Phi, mode="per_query"))
        assert (model.kernel, model.qids, model.feature_names) == ("distance", lists.qids, ("x", "y"))
        assert (model.encoder, model.training) == (None, True)
        assert (model.metrics, model.preprocess) == (found.bank.metrics, found.preprocess)
        assert model.phi.table.weight.shape == (3, 3)
        coded: Any = SimpleNamespace(columns=("x", "y"))
        assert replace(found, encoder=coded).model(Phi).encoder is coded
        double = replace(found, splits={"train": lists.to(dtype=torch.float64)})
        assert double.model(Phi).phi.table.weight.dtype == torch.float64

    def test_metrics_are_trained_on_a_copy(self) -> None:
        bank = Bank(metrics(), trained=True)
        found = prepared(bank)
        first, second = found.model(Phi), found.model(Phi)
        assert (first.metrics.trained, bank.metrics.trained) == (True, False)
        assert first.metrics is not second.metrics
        plain = prepared().model(Phi)
        assert plain.metrics.trained is False

    @pytest.mark.parametrize(("spread", "size"), [(False, 1), (False, 2), (True, 1), (True, 2), (True, 3)])
    @pytest.mark.parametrize("mode", ["shared", "per_query"])
    def test_where_processes_share_the_queries(
        self, spread: bool, size: int, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(distributed, "place", lambda: (0, size))
        lists = spread_over(data(), size) if spread else data()
        model = prepared(splits={"train": lists}).model(partial(Phi, mode=mode))
        elsewhere = spread and size > 1
        everyone = mode == "shared" and elsewhere
        assert model.phi.num_queries == (3 if everyone else lists.num_queries)
        assert model.qids == (() if everyone else lists.qids)
        near = partial(Phi, mode="per_query", policy="knn")
        if elsewhere:
            with pytest.raises(ConfigError, match=r"`phi.policy` 'knn' needs all training queries in one process"):
                prepared(splits={"train": lists}).model(near)
        else:
            assert prepared(splits={"train": lists}).model(near).phi.policy == "knn"

    def test_of_what_was_trained(self, tmp_path: Path) -> None:
        model, whole = object(), object()
        lists = data(positions=[1, 2, 3, 1, 2, 1, 2, 3, 4])
        module: Any = SimpleNamespace(model=model, rows=None, position_bias=None, data_of={"train": lists}.get)
        found = Trained(module, None, None)  # type: ignore[arg-type]
        assert found.model is found.whole_model(tmp_path) is model
        assert found.position_bias is None
        module.position_bias = torch.tensor([9.0, 0.5, 0.25, 1.0, 2.0])
        assert found.position_bias == {1: 0.0, 2: -0.25, 3: 0.5, 4: 1.5}
        module.rows = SimpleNamespace(whole=lambda *args: (*args, whole))
        assert found.whole_model(tmp_path) == (model, tmp_path, whole)  # type: ignore[comparison-overlap]


class TestRehearsal:
    def test_metrics_grow_where_they_can(self) -> None:
        message = "`grow` must be false for metrics that are neither boosted nor trained, got true"
        with pytest.raises(ConfigError, match=message):
            rehearse(recipe(grows=True))
        for marks in ({"grows": True}, {"trains_metrics": True}, {"grows": True, "trains_metrics": True}):
            rehearse(recipe(builder(**marks), grows=True))
        rehearse(recipe())

    @pytest.mark.parametrize(
        ("marks", "growing", "told"),
        [({"grows": True}, True, {"start": True}), ({"grows": True}, False, {}), ({"trains_metrics": True}, True, {})],
        ids=str,
    )
    def test_builders_are_told_whether_they_grow(
        self, marks: dict[str, bool], growing: bool, told: dict[str, bool]
    ) -> None:
        asked: list[Any] = []
        rehearse(recipe(builder(check_settings=lambda **settings: asked.append(settings), **marks), grows=growing))
        assert asked == [told]

    def test_the_smallest_of_everything_is_enough(self) -> None:
        asked: list[Any] = []

        def make_phi(*sizes: int) -> Phi:
            asked.append(sizes)
            return Phi(*sizes)

        def first_label(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
            asked.append((scores.tolist(), labels.tolist(), offsets.tolist()))
            return torch.ones(1)

        rehearse(recipe(make_phi=make_phi, measure=first_label))
        assert asked == [(1, 1), ([0.0, 1.0], [0.0, 1.0], [0, 2])]

    def test_a_measure_that_fails_is_noticed(self) -> None:
        def bad(*_: Tensor) -> Tensor:
            return torch.ones(7)

        with pytest.raises(LGMMLError, match="the measure 'bad' must give a tensor"):
            rehearse(recipe(measure=bad))

    def test_batches_and_loss_have_to_suit(self) -> None:
        triplets = {"batching": "triplets"}
        rehearse(recipe(phi=PhiSettings(loader=triplets)))
        with pytest.raises(ConfigError, match="`batching` must be 'lists' for a loss of whole lists"):
            rehearse(recipe(phi=PhiSettings(loader=triplets, loss=Softmax())))
        rehearse(recipe(phi=PhiSettings(loader={"num_workers": 0}, loss=Softmax())))

    def test_gradients_and_optimizer_have_to_suit(self) -> None:
        adam = PhiSettings(optimizer=partial(torch.optim.Adam, lr=0.1))
        rehearse(recipe(phi=adam))
        with pytest.raises(LGMMLError, match="Adam takes no sparse gradients"):
            rehearse(recipe(make_phi=partial(Phi, sparse=True), phi=adam))


class Notes:
    """Stands for `Unfinished`."""

    made: list[Any]
    kept: list[Any]

    def __init__(self, *args: Any) -> None:
        Notes.made.append(args)

    def found(self) -> dict[str, Any]:
        return {"resume": "state"}

    def keep(self, info: Any) -> None:
        Notes.kept.append(info.total)

    def done(self) -> None:
        Notes.kept.append("done")


class TestPreparing:
    @pytest.fixture
    def notes(self, monkeypatch: pytest.MonkeyPatch) -> type[Notes]:
        Notes.made, Notes.kept = [], []
        monkeypatch.setattr(stages, "Unfinished", Notes)
        return Notes

    def test_what_a_builder_is_given_and_who_is_told(self, notes: type[Notes], bars: list[Any], tmp_path: Path) -> None:
        asked: list[Any] = []
        told: list[int] = []
        lists = data()
        found = prepare(
            {"train": lists, "valid": lists.select([0])},
            recipe(builder(asked, rounds=2), seed=7),
            lambda done, info: told.append(done),
            tmp_path,
        )
        ((fitted, seen, seed, more),) = asked
        assert (seed, more) == (7, {"resume": "state"})
        expected = Chain([Standardize()]).fit(lists.features, lists.offsets)
        torch.testing.assert_close(fitted.features, expected(lists.features, lists.offsets))
        torch.testing.assert_close(seen.features, expected(lists.features[:3], torch.tensor([0, 3])))
        ((folder, build, data_, valid, seed, start),) = notes.made
        assert (folder, data_, valid, seed, start) == (tmp_path, fitted, seen, 7, None)
        assert build is not None
        assert told == [1, 2]
        assert notes.kept == [4, 4, "done"]
        assert bars == [("local metrics", 1.0), 0.25, 0.5]
        assert found.inputs == {}
        assert found.bank.metrics.num_metrics == 3
        assert found.splits["train"] is lists
        torch.testing.assert_close(found.preprocess(lists.features, lists.offsets), fitted.features)

    def test_without_a_total_progress_is_in_rounds(self, notes: type[Notes], bars: list[Any]) -> None:
        def build(lists: RankingData, valid: Any = None, *, seed: int = 0, on_round: Any, resume: Any) -> Bank:
            on_round(1, SimpleNamespace(total=0))
            on_round(1, SimpleNamespace(total=1))
            on_round(1, SimpleNamespace(total=2))
            return Bank(metrics())

        prepare({"train": data()}, recipe(build))
        assert bars[1:] == [1.0, 1.0, 0.5]

    @pytest.mark.parametrize("trained", [False, True])
    @pytest.mark.usefixtures("notes")
    def test_features_of_trained_metrics_are_kept(self, trained: bool) -> None:
        asked: list[Any] = []
        lists = data()
        build = builder(asked, Bank(metrics(), trained=trained), trains_metrics=trained)
        found = prepare({"train": lists, "valid": lists.select([1]), "test": lists}, recipe(build))
        fitted, seen = asked[0][:2]
        if not trained:
            assert found.inputs == {}
            return
        assert set(found.inputs) == {"train", "valid"}
        assert found.inputs["train"] is fitted.features
        assert found.inputs["valid"] is seen.features
        alone = prepare({"train": lists}, recipe(build))
        assert set(alone.inputs) == {"train"}
        assert asked[1][1] is None
        shared = prepare({"train": spread_over(lists), "valid": lists}, recipe(build))
        assert set(shared.inputs) == {"valid"}

    def test_a_recipe_is_rehearsed_first(self) -> None:
        with pytest.raises(LGMMLError, match="`batch_size` must be"):
            prepare({"train": data()}, recipe(phi=PhiSettings(loader={"batch_size": 0})))

    def test_positions_need_somebody_who_learns_from_them(self) -> None:
        lists = data(positions=range(9))
        with pytest.raises(ConfigError, match="positions need metrics that are boosted or trained in this fit"):
            prepare({"train": lists}, recipe())
        for marks in ({"takes_positions": True}, {"trains_metrics": True}):
            prepare({"train": lists}, recipe(builder(**marks)))
        prepare({"train": data()}, recipe())
        check_positions(lists, True)
        check_positions(data(), False)
        check_positions(data(), True)
        with pytest.raises(ConfigError, match="positions need metrics"):
            check_positions(lists, False)

    def test_with_a_start_its_preprocessing_stays_and_metrics_are_added(self, notes: type[Notes]) -> None:
        asked: list[Any] = []
        lists, other = data(), data().replace(features=data().features * 3 + 1)
        start = Start.of(prepared(Bank(metrics())).model(Phi))
        found = prepare({"train": other}, recipe(builder(asked, grows=True), grows=True), start=start)
        fitted, _, _, more = asked[0]
        assert found.preprocess is start.preprocess
        torch.testing.assert_close(fitted.features, prepared().preprocess(other.features, lists.offsets))
        assert more == {"start": start.bank, "resume": "state"}
        assert notes.made[0][-1] is start.bank
        assert found.encoder is None
        with pytest.raises(LGMMLError, match="must have weights Φ shared by all queries"):
            prepare({"train": other}, recipe(), start=replace(start, shared=False))
        with pytest.raises(ConfigError, match="the model to start from has 2 features, the data has 3"):
            prepare({"train": other.replace(features=torch.ones(9, 3))}, recipe(), start=start)


class Seen(Preprocess):
    """Adds 1 when it is fitted, and 10 whenever it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def fit_transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        self.calls.append(f"fit {len(features)}")
        return features + 1

    def fit_lists(self, lists: TrainingLists) -> Self:
        self.calls.append(f"fit {lists.num_documents} of all")
        return self

    def forward(self, features: Tensor, offsets: Tensor) -> Tensor:
        if len(features):
            self.calls.append(f"use {len(features)}")
        return features + 10


class TestThrough:
    """A sample stands for many lists, unless the builder takes them all where they are."""

    @pytest.fixture(autouse=True)
    def sampled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def sample_of(lists: RankingData, seed: int, folder: Path | None) -> RankingData:
            assert seed == 3
            return lists if lists.spread is None else pick_lists(lists, torch.tensor([0]))

        monkeypatch.setattr(stages, "sample_of", sample_of)

    @pytest.mark.parametrize(
        ("spread", "everywhere", "trains", "known", "calls", "added", "judged"),
        [
            (False, False, False, False, ["fit 9", "use 9"], 1, 9),
            (False, True, False, False, ["fit 9", "use 9"], 1, 9),
            (False, False, False, True, ["use 9", "use 9"], 10, 9),
            (False, True, False, True, ["use 9", "use 9"], 10, 9),
            (True, False, False, False, ["fit 3 of all", "use 3", "use 3"], 10, 3),
            (True, True, False, False, ["fit 3 of all", "use 9", "use 9"], 10, 9),
            (True, False, False, True, ["use 3", "use 3"], 10, 3),
            (True, True, False, True, ["use 9", "use 9"], 10, 9),
            (False, True, True, False, ["fit 9", "use 9"], 1, 9),
            (True, True, True, False, ["fit 3 of all", "use 3"], 10, None),
        ],
    )
    def test_what_is_fitted_and_what_is_seen(
        self,
        spread: bool,
        everywhere: bool,
        trains: bool,
        known: bool,
        calls: list[str],
        added: int,
        judged: int | None,
        tmp_path: Path,
    ) -> None:
        lists = spread_over(data()) if spread else data()
        found = recipe(builder(takes_spread=everywhere, trains_metrics=trains), seed=3)
        preprocess = Seen()
        fitted, seen = stages._through(preprocess, {"train": lists, "valid": lists}, found, tmp_path, known=known)
        assert preprocess.calls == calls
        torch.testing.assert_close(fitted.features, lists.features[: fitted.num_documents] + added)
        assert fitted.num_documents == (9 if (everywhere and not trains) or not spread else 3)
        assert (fitted.spread is None) == (not spread or not everywhere)
        if judged is None:
            assert seen is None
        else:
            assert seen is not None
            torch.testing.assert_close(seen.features, lists.features[:judged] + 10)
        preprocess = Seen()
        assert stages._through(preprocess, {"train": lists}, found, None, known=known)[1] is None


class TestInputs:
    def test_distances_of_what_has_none(self, monkeypatch: pytest.MonkeyPatch, bars: list[Any]) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(stages, "compute_distances", lambda *args, **how: asked.append((args, how)) or len(asked))
        found = prepared(inputs={"valid": "there"})
        found.splits["test"] = data().select([1])  # type: ignore[index]
        model, cache = object(), object()
        add_inputs(found, model, cache, torch.float16)  # type: ignore[arg-type]
        assert found.inputs == {"valid": "there", "train": 1, "test": 2}
        assert [args for args, _ in asked] == [(model, found.splits["train"]), (model, found.splits["test"])]
        assert [(how["cache"], how["dtype"]) for _, how in asked] == [(cache, torch.float16)] * 2
        assert bars == [("distances, train", 9), ("distances, test", 2)]
        asked[0][1]["progress"](5)
        assert bars[-1] == 5

    def test_features_of_trained_metrics_or_views_of_them(self) -> None:
        lists = data()
        found = prepared(Bank(metrics(), trained=True), {"train": spread_over(lists), "valid": lists})
        model = found.model(Phi)
        add_inputs(found, model)
        views, features = found.inputs["train"], found.inputs["valid"]
        assert isinstance(views, Views)
        assert (views.preprocess, views.dtype) == (found.preprocess, torch.float32)
        torch.testing.assert_close(features, found.preprocess(lists.features, lists.offsets))
        torch.testing.assert_close(views.of(slice(None), lists.offsets), features)


class TestModule:
    def test_settings_reach_the_module(self) -> None:
        optimizer, rule = partial(torch.optim.SGD, lr=0.5), lambda updates, horizon: 1.0
        settings = PhiSettings(
            loss=Softmax(0.5), optimizer=optimizer, step_size=rule, dropout=Dropout(0.25, 0.5), deviation_penalty=2.0,
            preset="letor4", distances=torch.float16,
        )  # fmt: skip
        found = prepared()
        module = make_module(
            found, recipe(phi=settings, seed=8, measure="map", make_phi=partial(Phi, mode="per_query"))
        )
        assert (module.loss, module._optimizer, module._step_size) == (Softmax(0.5), optimizer, rule)
        assert (module.dropout, module.deviation_penalty, module.seed) == (Dropout(0.25, 0.5), 2.0, 8)
        assert module.hparams["preset"] == "letor4"
        assert module.hparams["model_spec"] == module.model.spec()
        assert module.model.phi.mode == "per_query"
        assert module.position_bias is None
        assert module.valid_metrics.names[-1] == "map"
        for name in ("train", "valid"):
            assert module.data_of(name) is found.splits[name]
            assert module.lists(name).inputs.dtype == torch.float16  # type: ignore[union-attr]
        assert module.rows is None
        usual = make_module(prepared(), recipe())
        assert len(usual.valid_metrics.names) == 4
        other = make_module(prepared(), recipe(measure="precision@2"))
        assert other.valid_metrics.names[-1] == "precision@2"

    def test_a_cache_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        def compute(model: Any, lists: RankingData, **how: Any) -> Tensor:
            asked.append(how["cache"])
            return torch.zeros(lists.num_documents, 3)

        monkeypatch.setattr(stages, "compute_distances", compute)
        make_module(prepared(), recipe(), "cache")  # type: ignore[arg-type]
        assert asked == ["cache", "cache"]

    def test_biases_of_positions_are_the_banks_or_begin_at_zero(self) -> None:
        lists = data(positions=[0, 1, 2, 0, 1, 0, 1, 2, 5])
        bias = torch.tensor([0.5, 0.25])
        module = make_module(prepared(Bank(metrics(), position_bias=bias), {"train": lists}), recipe())
        assert module.position_bias is not None
        assert module.position_bias.tolist() == [0.5, 0.25]
        module = make_module(prepared(splits={"train": lists}), recipe())
        assert module.position_bias is not None
        assert module.position_bias.tolist() == [0.0] * 6

    @pytest.mark.parametrize(("spread", "mode", "kept"), [
        (True, "per_query", True), (True, "shared", False), (False, "per_query", False), (False, "shared", False),
    ])  # fmt: skip
    def test_rows_stay_where_their_lists_are(self, spread: bool, mode: str, kept: bool) -> None:
        lists = spread_over(data()) if spread else data()
        module = make_module(prepared(splits={"train": lists}), recipe(make_phi=partial(Phi, mode=mode)))
        assert (module.rows is not None) == kept
        if kept:
            assert isinstance(module.rows, OwnRows)
            assert module.rows.spread is lists.spread


class Lightning:
    """A trainer that only notes what it is asked."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.strategy = SimpleNamespace(checkpoint_io=None)
        self.max_epochs, self.current_epoch, self.world_size, self.gradient_clip_val = 3, 2, 1, None
        self.fits: list[Any] = []
        self.after: Any = None

    def fit(self, module: LGMMLModule, data_module: Any, **how: Any) -> None:
        self.fits.append((module, data_module, how))
        if self.after is not None:
            self.after(self)


class TestTrainer:
    def keeper(self) -> KeepCheckpoints:
        return KeepCheckpoints("somewhere")

    def test_settings_go_to_lightning_with_those_that_keep_it_quiet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stages.pl, "Trainer", Lightning)
        keeper, story, logger = self.keeper(), Story(), object()
        around = Surroundings(
            Path("x"),
            {"max_epochs": 3, "devices": 5},
            callbacks=(story,),
            loggers=(logger,),  # type: ignore[arg-type]
        )
        trainer: Any = make_trainer(around, keeper, validated=True)
        assert trainer.settings == {
            **stages.QUIET,
            "max_epochs": 3,
            "devices": 5,
            "callbacks": [story, keeper],
            "logger": [logger],
        }
        assert type(trainer.strategy.checkpoint_io) is CheckpointFiles
        without: Any = make_trainer(around, keeper, validated=False)
        assert without.settings["limit_val_batches"] == 0

    def test_it_can_be_made_by_somebody_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        left: list[int] = []
        monkeypatch.setattr(distributed, "leave_in_the_end", lambda: left.append(1))
        keeper = self.keeper()
        trainer: Any = make_trainer(Surroundings(Path("x"), Lightning), keeper, validated=True)  # type: ignore[arg-type]
        assert trainer.settings == {"callbacks": [keeper], "logger": []}
        assert left == [1]

    @pytest.mark.parametrize("rows", [False, True])
    @pytest.mark.parametrize("others", [False, True])
    @pytest.mark.parametrize("nothing", [False, True])
    def test_where_others_are_there(
        self, rows: bool, others: bool, nothing: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stages, "trainer_settings", lambda: {"strategy": "ddp", "devices": 2} if others else {})
        own: Any = SimpleNamespace(shares_nothing=nothing) if rows else None
        around = Surroundings(Path("x"), Lightning)  # type: ignore[arg-type]
        trainer: Any = make_trainer(around, self.keeper(), own, validated=False)
        strategy = trainer.settings.get("strategy")
        if others and rows:
            assert isinstance(strategy, OwnRowsStrategy)
            assert strategy.shares_nothing == nothing
        else:
            assert strategy == ("ddp" if others else None)
        assert trainer.settings["limit_val_batches"] == 0
        assert trainer.settings.get("devices") == (2 if others else None)
        files = trainer.strategy.checkpoint_io
        assert type(files) is (OwnRowsFiles if rows else CheckpointFiles)
        assert getattr(files, "rows", None) is own

    @pytest.mark.parametrize("rows", [False, True])
    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("clip", [None, 0.0, 1.5])
    def test_gradients_are_clipped_where_their_size_is_known(self, rows: bool, size: int, clip: float | None) -> None:
        def make(**settings: Any) -> Lightning:
            found = Lightning(**settings)
            found.world_size, found.gradient_clip_val = size, clip  # type: ignore[assignment]
            return found

        own: Any = SimpleNamespace(shares_nothing=True) if rows else None
        around = Surroundings(Path("x"), make)  # type: ignore[arg-type]
        if rows and size == 2 and clip:
            with pytest.raises(ConfigError, match=r"`trainer.gradient_clip_val` must be null where .*, got 1\.5"):
                make_trainer(around, self.keeper(), own, validated=True)
        else:
            make_trainer(around, self.keeper(), own, validated=True)


class TestTraining:
    @pytest.fixture
    def kept(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        told: list[Any] = []
        for name in ("take_kept", "keep_start", "bring_best"):
            monkeypatch.setattr(stages, name, lambda *args, name=name: told.append((name, *args)))
        return told

    def run(self, settings: PhiSettings, around: dict[str, Any], splits: Any = None, **more: Any) -> Any:
        made: list[Lightning] = []
        state = more.pop("trainer", {})

        def make(**given: Any) -> Lightning:
            made.append(Lightning(**given))
            made[0].__dict__.update(state)
            return made[0]

        trained = train_phi(
            prepared(splits=splits, bank=more.pop("bank", None)),
            recipe(phi=settings, **more),
            Surroundings(Path("here"), make, **around),  # type: ignore[arg-type]
        )
        assert trained.trainer is made[0]  # type: ignore[comparison-overlap]
        return trained, made[0]

    def test_what_lightning_is_given(self, kept: list[Any]) -> None:
        lists = data()
        splits = {"train": lists, "valid": lists.select([0]), "test": lists.select([1])}
        settings = PhiSettings(loss=Softmax(), loader={"batch_size": 2})
        trained, lightning = self.run(settings, {"every_n_steps": 7}, splits, seed=4, measure="map")
        ((module, data_module, how),) = lightning.fits
        assert how == {"ckpt_path": None, "weights_only": True}
        assert data_module.splits == splits
        batches = data_module.batches
        assert (batches.seed, batches.draws, batches.batch_size) == (4, False, 2)
        assert trained.module is module
        keeper = lightning.settings["callbacks"][-1]
        assert trained.keeper is keeper
        assert (keeper.monitor, keeper.every_n_steps, keeper.best_file) == ("val/map", 7, Path("here/best.ckpt"))
        assert "limit_val_batches" not in lightning.settings
        assert kept == [("take_kept", module, Path("here/best.ckpt"), keeper.run)]
        assert module.model.training is False
        without = self.run(PhiSettings(), {}, {"train": lists})[1]
        assert without.settings["limit_val_batches"] == 0
        assert without.fits[0][1].splits == {"train": lists, "valid": None, "test": None}
        assert without.settings["callbacks"][-1].monitor == "val/ndcg@10"

    def test_a_run_goes_on_with_the_best_so_far(self, kept: list[Any]) -> None:
        file = Path("there/last.ckpt")
        _, lightning = self.run(PhiSettings(), {"resume": file})
        assert kept[0] == ("bring_best", file, Path("here/best.ckpt"))
        assert lightning.fits[0][2] == {"ckpt_path": file, "weights_only": True}

    @pytest.mark.parametrize(("keep", "file", "shown"), [("best", "best.ckpt", 1), ("last", "last.ckpt", 2)])
    def test_weights_to_come_back_with(
        self, keep: str, file: str, shown: int, kept: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[Any] = []
        monkeypatch.setattr(Story, "show_kept", lambda self, *args: told.append(args))

        def after(lightning: Lightning) -> None:
            lightning.settings["callbacks"][-1].best_epoch = 1

        around = {"callbacks": (stages.Callback(), Story())}
        trained, lightning = self.run(PhiSettings(keep=keep), around, trainer={"after": after})
        assert [call[2] for call in kept] == [Path("here") / file]
        assert told == [(lightning, trained.module, shown)]

    @pytest.mark.parametrize("epochs", [0, 1])
    def test_without_epochs_the_start_is_kept(self, epochs: int, kept: list[Any]) -> None:
        trained, _ = self.run(PhiSettings(), {}, measure="map", trainer={"max_epochs": epochs})
        assert [name for name, *_ in kept] == (["take_kept"] if epochs else ["keep_start"])
        if not epochs:
            _, module, keeper, valid, measure = kept[0]
            assert (module, keeper, measure) == (trained.module, trained.keeper, Measure("map"))
            assert valid.num_documents == 9

    @pytest.mark.usefixtures("kept")
    def test_metrics_are_trained_no_longer(self) -> None:
        trained, _ = self.run(PhiSettings(loss=Softmax()), {}, bank=Bank(metrics(), trained=True))
        assert trained.model.metrics.trained is False
        assert trained.model.training is False


def test_nothing_to_learn_from_is_said_by_the_batches() -> None:
    lists = data().replace(labels=torch.zeros(9))
    with pytest.raises(DataError, match="nothing to learn from"):
        train_phi(prepared(splits={"train": lists}), recipe(), Surroundings(Path("here"), Lightning))  # type: ignore[arg-type]
