"""Small parts of training: a start, views, states of unfinished fits, step sizes, budgets, distances, quiet."""

from __future__ import annotations

import logging
import math
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lgmml_torch.training.ways import BUDGETS, Budget, Way, budget_seconds, choose_way, find_budget, trained_recipe

from lgmml_torch import distributed
from lgmml_torch.checks import ConfigError, DataWarning, LGMMLError
from lgmml_torch.distributed import Spread
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.fitting.trained import start_trained
from lgmml_torch.models.encode import CategorySettings
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess import lists as preprocess_lists
from lgmml_torch.models.preprocess.compose import all_views, list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import write_checkpoint
from lgmml_torch.ragged import RankingData
from lgmml_torch.sharing import pick_lists
from lgmml_torch.training import unfinished, views, ways
from lgmml_torch.training.callbacks import KeepCheckpoints
from lgmml_torch.training.distances import compute_distances, distance_key
from lgmml_torch.training.losses import Softmax
from lgmml_torch.training.module import Dropout
from lgmml_torch.training.quiet import QUIET, SIGNALS, quiet_lightning
from lgmml_torch.training.start import Start
from lgmml_torch.training.step_size import Horizon, Logistic, OneCycle, constant
from lgmml_torch.training.stopping import StopAtStep
from lgmml_torch.training.telling import TellEpochs, tell_rounds
from lgmml_torch.training.unfinished import Unfinished
from lgmml_torch.training.views import Views, fit_through, sample_of, seen_through
from tests.pretend import DEVICE, pretend
from tests.training.test_module_by_hand import make_model

LISTS = RankingData.from_arrays(torch.arange(18.0).view(9, 2).square(), [0, 1, 2, 0, 1, 0, 0, 1, 1], group=[3, 2, 4])


class TestStart:
    def test_it_is_a_copy_of_the_parts(self) -> None:
        model = make_model("shared")
        start = Start.of(model)
        assert start.preprocess is not model.preprocess
        assert start.bank.metrics is not model.metrics
        assert torch.equal(start.bank.metrics.scales, model.metrics.scales)
        assert (start.bank.kernel, start.bank.trained) == (model.kernel, False)
        assert start.bank.phi.tolist() == model.phi.table.weight[0].tolist()  # type: ignore[union-attr]
        assert (start.encoder, start.feature_names, start.shared, start.based) == (None, None, True, False)
        assert Start.of(model, trained=True).bank.trained is True
        model.feature_names = ("x", "y")
        assert Start.of(model).feature_names == ("x", "y")

    def test_weights_of_queries_become_their_mean(self) -> None:
        model = make_model("per_query")
        start = Start.of(model)
        torch.testing.assert_close(start.bank.phi, model.phi.table.weight.detach().mean(0))
        assert start.shared is False
        model.phi.table = torch.nn.Embedding(0, 4, _weight=torch.zeros(0, 4))
        assert Start.of(model).bank.phi.tolist() == [1.0] * 4  # type: ignore[union-attr]

    def test_what_metrics_cannot_be_added_to(self) -> None:
        Start.of(make_model("shared")).check_growing()
        for model in (make_model("per_query"), make_model("amortized"), make_model("shared", deviations=True)):
            with pytest.raises(LGMMLError, match="must have weights Φ shared by all queries"):
                Start.of(model).check_growing()
        model = make_model("shared")
        model.base = SimpleNamespace()  # type: ignore[assignment]
        assert Start.of(model).based is True
        with pytest.raises(LGMMLError, match="must stand alone, got one that adds to a tree model"):
            Start.of(model).check_growing()

    def test_metrics_look_like_trained_ones_or_not(self) -> None:
        def start(*blocks: MetricBlock) -> Start:
            model = make_model("shared")
            return Start(model.preprocess, Bank(LocalMetrics(list(blocks), num_features=3)), None, None, True, False)

        low = MetricBlock(torch.zeros(2, 3), torch.ones(2, 3, 2))
        full = MetricBlock(torch.zeros(2, 3), torch.ones(2, 3, 3))
        wide = MetricBlock(torch.zeros(2, 3), torch.ones(2, 3, 4))
        few = MetricBlock(torch.zeros(2, 2), torch.ones(2, 2, 1), support=torch.tensor([[0, 1], [1, 2]]))
        assert start(low).low_rank
        assert start(low, low).low_rank
        for others in ((full,), (wide,), (few,), (low, full), (few, low)):
            assert not start(*others).low_rank

    def test_lists_are_read_as_the_model_reads_them(self) -> None:
        model, settings = make_model("shared"), CategorySettings()
        start = Start.of(model)
        assert start.read({"train": LISTS}, settings)["train"].feature_names is None
        with pytest.raises(ConfigError, match="the model to start from has 2 features, the data has 3"):
            start.read({"train": LISTS.replace(features=torch.ones(9, 3))}, settings)
        model.feature_names = ("x", "y")
        start = Start.of(model)
        found = start.read({"train": LISTS, "valid": LISTS}, settings)
        assert [part.feature_names for part in found.values()] == [("x", "y")] * 2
        same = LISTS.replace(feature_names=("x", "y"))
        assert start.read({"train": same}, settings)["train"].feature_names == ("x", "y")
        named = Start.of(make_model("shared")).read({"train": same}, settings)
        assert named["train"].feature_names == ("x", "y")
        with pytest.raises(ConfigError, match="in their order, got the same names in another order"):
            start.read({"train": LISTS.replace(feature_names=("y", "x"))}, settings)
        with pytest.raises(ConfigError, match=r"in their order, got unknown \['a', 'z'\]"):
            start.read({"train": LISTS.replace(feature_names=("z", "a"))}, settings)

    def test_categories_that_the_model_does_not_know_are_refused(self) -> None:
        frame = torch.tensor([[0.0, 1.0], [1.0, 2.0], [0.0, 3.0]])
        worded = RankingData.from_arrays(frame, [0, 1, 0], group=[3], feature_names=["c", "x"]).replace(
            categories=(("red", "blue"), None)
        )
        with pytest.raises(LGMMLError, match="the model to start from has 2 features, the data has"):
            Start.of(make_model("shared")).read({"train": worded}, CategorySettings(max_one_hot=1))


class TestViews:
    def test_a_sample_has_so_many_values(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(views, "sample_lists", lambda data, n, **how: asked.append((n, how)) or "sample")
        for features in (0, 1, 8, 100):
            assert sample_of(SimpleNamespace(num_features=features), 3, tmp_path) == "sample"  # type: ignore[arg-type]
        assert [count for count, _ in asked] == [134_217_728, 134_217_728, 16_777_216, 1_342_177]
        assert all(how == {"seed": 3, "folder": tmp_path} for _, how in asked)

    @pytest.mark.parametrize("spread", [None, Spread(LISTS.sizes, torch.zeros(3, dtype=torch.long))])
    def test_lists_are_fitted_on_and_others_seen(self, spread: Spread | None) -> None:
        """Whatever is shown decides, in memory and from shards alike."""
        lists = LISTS.replace(spread=spread)
        some = pick_lists(lists, torch.tensor([0, 2]))
        expected = list_rank_features().fit(LISTS.select([0, 2]).features, torch.tensor([0, 3, 7]))
        for shown, wanted in ((some, some), (some, lists), (lists, lists)):
            preprocess = list_rank_features()
            found = fit_through(preprocess, shown, wanted)
            if shown is some:
                assert all(value.equal(expected.state_dict()[name]) for name, value in preprocess.state_dict().items())
            assert found.features.equal(preprocess(wanted.features, wanted.offsets))
            assert found.spread is wanted.spread

    @pytest.mark.parametrize("at_once", [1, 4, 5, 100])
    def test_lists_of_shards_are_seen_block_by_block(
        self, at_once: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A preprocessing that looks at the list sees whole ones, and the same as all at once."""
        files: list[Any] = []
        real = views.scratch_array
        monkeypatch.setattr(views, "scratch_array", lambda *args: files.append(args[2]) or real(*args))
        monkeypatch.setattr(preprocess_lists, "BLOCK_VALUES", 2 * at_once)
        preprocess = list_rank_features().fit(LISTS.features, LISTS.offsets)
        plain = seen_through(preprocess, LISTS)
        assert files == []
        assert torch.equal(plain.features, preprocess(LISTS.features, LISTS.offsets))
        shards = LISTS.replace(spread=Spread(LISTS.sizes, torch.zeros(3, dtype=torch.long)))
        found = seen_through(preprocess, shards, tmp_path)
        assert files == [tmp_path]
        assert torch.equal(found.features, plain.features)
        assert found.features.dtype == plain.features.dtype
        assert found.labels is shards.labels

    def test_rows_come_from_where_they_are(self) -> None:
        preprocess = list_rank_features().fit(LISTS.features, LISTS.offsets)
        seen = Views(LISTS.features, preprocess, torch.float64)
        expected = preprocess(LISTS.features.double(), LISTS.offsets)
        rows, offsets = torch.tensor([5, 6, 7, 8, 0, 1, 2]), torch.tensor([0, 4, 7])
        assert seen.of(rows, offsets).dtype == torch.float64
        torch.testing.assert_close(seen.of(rows, offsets), expected[rows])
        torch.testing.assert_close(seen.of(slice(0, 3), torch.tensor([0, 3])), expected[:3])
        with pretend():  # batches may be elsewhere
            torch.testing.assert_close(seen.of(rows.to(DEVICE), offsets), expected[rows])
        moved = seen.to(torch.device("cpu"))
        assert (moved.device, moved.features is seen.features) == (torch.device("cpu"), True)


class State:
    """How far a fit has come."""

    def __init__(self, number: int) -> None:
        self.round = number

    def export(self) -> dict[str, int]:
        return {"round": self.round}


def load(state: dict[str, Any]) -> State:
    return State(state["round"])


def builder(data: RankingData, valid: Any = None, *, seed: int = 0, on_round: Any = None, size: int = 1) -> Any: ...


builder.load_state = load  # type: ignore[attr-defined]


class TestUnfinished:
    def make(self, folder: Path | None, **changes: Any) -> Unfinished:
        given: dict[str, Any] = {"builder": builder, "data": LISTS, "valid": None, "seed": 0, **changes}
        return Unfinished(folder, **given)

    def test_a_fit_is_known_by_all_it_depends_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bank = Bank(LocalMetrics([MetricBlock(torch.zeros(1, 2), torch.eye(2)[None])], num_features=2))
        other = LISTS.replace(labels=1 - LISTS.labels)
        found = [
            self.make(tmp_path, **changes).path
            for changes in (
                {},
                {"seed": 1},
                {"builder": partial(builder, size=2)},
                {"data": other},
                {"data": LISTS.replace(features=LISTS.features + 1)},
                {"data": LISTS.replace(offsets=torch.tensor([0, 2, 5, 9]))},
                {"data": LISTS.replace(query_weights=torch.ones(3))},
                {"data": LISTS.replace(document_weights=torch.ones(9))},
                {"valid": LISTS},
                {"valid": other},
                {"start": bank},
            )
        ]
        monkeypatch.setattr(distributed, "place", lambda: (0, 2))
        monkeypatch.setattr(distributed, "agreed", lambda name: name)
        found.append(self.make(tmp_path).path)
        monkeypatch.undo()
        assert len(set(found)) == 12
        assert self.make(tmp_path).path == found[0]
        assert all(path is not None and path.parent == tmp_path and path.suffix == ".bank" for path in found)
        assert all(len(path.stem) == 32 for path in found if path is not None)

    def test_who_has_no_states_or_no_folder_keeps_nothing(self, tmp_path: Path) -> None:
        def plain(data: RankingData, valid: Any = None, *, seed: int = 0, on_round: Any = None) -> Any: ...

        for state in (self.make(None), self.make(tmp_path, builder=plain)):
            assert (state.path, state.found()) == (None, {})
            state._written -= 1e9
            state.keep(SimpleNamespace(state=State(1)))
            state.done()
        assert not list(tmp_path.iterdir())

    def test_it_is_written_now_and_then_and_found_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [100.0]
        monkeypatch.setattr(unfinished.time, "monotonic", lambda: now[0])
        state = self.make(tmp_path)
        assert state.found() == {}
        written = []
        for seconds in (9.75, 10.0, 19.75, 20.0, 30.5):
            now[0] = 100.0 + seconds
            state.keep(SimpleNamespace(state=State(int(4 * seconds))))
            written.append(state.found()["resume"].round if state.found() else None)
        assert written == [None, 40, 40, 80, 122]
        assert self.make(tmp_path).found()["resume"].round == 122
        assert self.make(tmp_path, seed=1).found() == {}
        state.done()
        assert state.found() == {}
        assert not list(tmp_path.iterdir())
        state.done()

    def test_only_the_first_process_writes_and_removes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        state = self.make(tmp_path)
        state._written -= 1e9
        assert state.path is not None
        monkeypatch.setattr(distributed, "place", lambda: (1, 2))
        state.keep(SimpleNamespace(state=State(3)))
        assert not state.path.exists()
        state.path.write_text("there")
        state.done()
        assert state.path.exists()
        monkeypatch.setattr(distributed, "place", lambda: (0, 2))
        state.done()
        assert not state.path.exists()

    def test_what_cannot_be_read_is_told(self, tmp_path: Path) -> None:
        def broken(state: dict[str, Any]) -> State:
            raise TypeError("long " * 60)

        state = self.make(tmp_path)
        assert state.path is not None
        torch.save({"fit": state.path.stem, "state": {"round": 1}}, state.path)  # nobody can tell what it was
        with pytest.warns(DataWarning, match=r"\.bank is damaged .*; the fit begins anew"):
            assert state.found() == {}
        write_checkpoint(state.path, {"fit": "another", "state": {"round": 1}})
        with pytest.warns(DataWarning, match=r"is damaged \(it is of another fit\); the fit begins anew"):
            assert state.found() == {}
        write_checkpoint(state.path, {"fit": state.path.stem, "state": {"round": 1}})
        assert state.found()["resume"].round == 1
        state._load = broken
        said = ("long " * 60)[:100]
        with pytest.warns(DataWarning, match=rf"is damaged \({said}\); the fit begins anew"):
            assert state.found() == {}

    def test_a_new_one_waits_before_it_writes(self, tmp_path: Path) -> None:
        state = self.make(tmp_path)
        assert abs(time.monotonic() - state._written) < 5
        state.keep(SimpleNamespace(state=State(1)))
        assert not list(tmp_path.iterdir())


class TestStepSizes:
    def test_what_nobody_says(self) -> None:
        assert OneCycle() == OneCycle(warmup=0.15, start=0.04)
        assert constant() is None  # type: ignore[func-returns-value]

    def test_a_cycle_of_one_update_and_of_none(self) -> None:
        assert OneCycle(warmup=0.0)(1, Horizon(1, 1)) == pytest.approx(0.0)
        assert OneCycle(warmup=0.0)(0, Horizon(1, 0)) == 1.0
        assert OneCycle(warmup=0.0)(1, Horizon(1, 2)) == pytest.approx(0.5)

    @pytest.mark.parametrize("updates", [0, 1, 7, 15, 16, 40, 99, 100, 101])
    def test_by_the_formula(self, updates: int) -> None:
        rule, horizon = OneCycle(warmup=0.15, start=0.3), Horizon(3, 100)
        done = min(updates, 100) / 100
        if done < 0.15:
            expected = 0.3 + 0.7 * (1 - math.cos(math.pi * done / 0.15)) / 2
        else:
            expected = (1 + math.cos(math.pi * (done - 0.15) / 0.85)) / 2
        assert rule(updates, horizon) == pytest.approx(expected, abs=1e-12)
        assert Logistic()(updates, horizon) == pytest.approx(1 / (1 + math.exp(updates / 300)))


class TestBudgets:
    def test_their_sizes(self) -> None:
        found = {name: find_budget(name, 100, 10) for name in BUDGETS}
        assert found == {
            "fast": Budget(100, 512, 2.5e6, (4, 10)),
            "normal": Budget(200, 1024, 7.5e6, (6, 15)),
            "thorough": Budget(400, 2048, 2e7, (10, 20)),
        }
        assert Way("boosted", "why") == Way("boosted", "why", 200, 128, 8, 6, 15, Dropout(0.0, 0.0))
        assert ways.GRADIENT_CLIP == 10.0

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("90s", 90.0), ("1.5m", 90.0), ("2h", 7200.0), (" 10m ", 600.0), ("fast", None), ("thorough", None)],
    )
    def test_times(self, text: str, seconds: float | None) -> None:
        assert budget_seconds(text) == seconds

    def test_what_is_neither_is_refused_with_a_hint(self) -> None:
        with pytest.raises(LGMMLError, match=r"or a time such as 60s or 10m, got 'norml'; did you mean 'normal'\?"):
            budget_seconds("norml")
        with pytest.raises(LGMMLError, match=r"got \['fast'\]"):
            budget_seconds(["fast"])  # type: ignore[arg-type]

    def test_seconds_are_two_products_of_all_visits(self) -> None:
        """750,000 documents are visited 10 times: 10 · 750,000 · 1,000 · 1,024 · 4 operations are 1,024 seconds."""
        assert ways._seconds(BUDGETS["normal"], 750_000, 1_000) == 1024.0
        assert find_budget("1024s", 750_000, 1_000) == BUDGETS["normal"]
        assert find_budget("1023.9s", 750_000, 1_000) == BUDGETS["fast"]
        assert find_budget("0.1s", 750_000, 1_000) == BUDGETS["fast"]
        assert find_budget("99h", 750_000, 1_000) == BUDGETS["thorough"]

    @pytest.mark.parametrize(("documents", "epochs"), [(0, 15), (1, 15), (500_000, 15), (1_000_000, 8), (10**7, 6)])
    def test_epochs_are_visits_over_documents_within_bounds(self, documents: int, epochs: int) -> None:
        assert ways._epochs(BUDGETS["normal"], documents) == epochs

    @pytest.mark.parametrize(
        ("documents", "features", "ramps"),
        [(100, 0, 6), (0, 111, 6), (100, 111, 6), (100, 112, 5), (100, 143, 3), (100, 250, 1), (100, 251, 0),
         (100, 900, 0), (2_000_000, 59, 6), (2_000_000, 60, 5), (2_000_000, 268, 0)],
    )  # fmt: skip
    def test_ramps_within_columns_and_bytes(self, documents: int, features: int, ramps: int) -> None:
        assert choose_way(300, documents, features, trained=True).ramps == ramps

    def test_reasons(self) -> None:
        boosted = choose_way(12, 3_456, 7, "fast")
        assert boosted.reason == (
            "12 training queries with 3,456 documents of 7 features, budget fast: boosted metrics, at most 100 rounds, "
            "then WARP (trained metrics need more data)"
        )
        assert (boosted.rounds, boosted.num_metrics, boosted.dropout) == (100, 128, Dropout())
        trained = choose_way(300, 150_000, 40, "thorough")
        assert trained.reason == (
            "300 training queries with 150,000 documents of 40 features, budget thorough: 128 metrics of rank 16 "
            "trained by gradient for 20 epochs, 6 ramps of a feature, dropout 0.15 of features and 0.2 of metrics"
        )
        assert trained.rounds == 400

    def test_the_recipe(self) -> None:
        way = choose_way(300, 30_000, 143)
        found = trained_recipe(way, 5)
        assert found.preprocess.func is all_views  # type: ignore[attr-defined]
        assert found.preprocess.keywords == {"ramps": 3}  # type: ignore[attr-defined]
        assert found.fit_bank.func is start_trained  # type: ignore[attr-defined]
        assert found.fit_bank.keywords == {"num_metrics": 128, "rank": 8}  # type: ignore[attr-defined]
        assert (found.make_phi.func, found.make_phi.keywords) == (Phi, {})  # type: ignore[attr-defined]
        assert (found.phi.loss, found.phi.loader, found.phi.step_size) == (Softmax(), {}, OneCycle())
        assert (found.phi.dropout, found.seed) == (Dropout(0.3, 0.2), 5)
        own = trained_recipe(way, 5, preprocess=list_rank_features, mode="amortized", options={"rank": 3})
        assert own.preprocess is list_rank_features
        assert own.make_phi.keywords == {"mode": "amortized"}  # type: ignore[attr-defined]
        assert own.fit_bank.keywords == {"num_metrics": 128, "rank": 3}  # type: ignore[attr-defined]


class TestDistances:
    def model(self) -> LGMML:
        preprocess = list_rank_features().fit(LISTS.features, LISTS.offsets)
        width = preprocess.num_features_out
        block = MetricBlock(torch.zeros(1, width), torch.eye(width)[None])
        return LGMML(preprocess, LocalMetrics([block], num_features=width), Phi(3, 1))

    @pytest.mark.parametrize("at_once", [1, 4, 5, 100])
    def test_whole_lists_at_a_time(self, at_once: int) -> None:
        model, seen = self.model(), list[int]()
        found = compute_distances(model, LISTS, documents_at_once=at_once, progress=seen.append)
        torch.testing.assert_close(found, model.distances(LISTS.features, LISTS.offsets))
        assert seen == {1: [3, 5, 9], 4: [3, 5, 9], 5: [5, 9], 100: [9]}[at_once]
        double = compute_distances(model, LISTS.to(dtype=torch.float64), documents_at_once=at_once)
        torch.testing.assert_close(double, found)

    def test_the_model_sees_its_own_precision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, seen = self.model(), list[torch.dtype]()
        real = model.preprocess.forward
        monkeypatch.setattr(model.preprocess, "forward", lambda x, offsets: seen.append(x.dtype) or real(x, offsets))
        for given in (torch.float64, torch.float32, torch.float16):
            compute_distances(model, LISTS.to(dtype=given))
        assert seen == [torch.float32] * 3

    def test_one_distance_beyond_the_range_is_noticed(self) -> None:
        model = self.model()
        exact = compute_distances(model, LISTS)
        model.metrics.set_scales(torch.tensor([float(exact.max()) / 70_000]))
        assert int((compute_distances(model, LISTS) > 65_504).sum()) in range(1, 9)
        with pytest.raises(LGMMLError, match="`dtype` must hold scaled distances beyond 65504"):
            compute_distances(model, LISTS, dtype=torch.float16)

    def test_what_is_asked_for_is_what_is_kept(self) -> None:
        assert compute_distances(self.model(), LISTS, dtype=torch.float64).dtype == torch.float64
        assert compute_distances(self.model(), LISTS).dtype == torch.float32

    def test_the_key_of_an_entry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = self.model()
        key = distance_key(model, LISTS, torch.bfloat16)
        assert (key["kind"], key["format"], key["dtype"]) == ("distances", 2, "bfloat16")
        assert set(key) == {"kind", "format", "dtype", "model", "spec", "data"}
        spec = model.metrics.spec()
        monkeypatch.setattr(model.metrics, "spec", lambda: dict(reversed(spec.items())))
        assert distance_key(model, LISTS, torch.bfloat16) == key


class TestQuiet:
    def test_settings(self) -> None:
        with quiet_lightning():
            found = dict(QUIET)
        assert found == {
            "accelerator": "auto",
            "devices": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "use_distributed_sampler": False,
            "inference_mode": False,
        }

    def test_advice_that_does_not_apply_is_left_out_and_other_warnings_are_not(self) -> None:
        names = ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.rank_zero", SIGNALS)
        before = [logging.getLogger(name).level for name in names]
        for name in names:
            logging.getLogger(name).setLevel(logging.DEBUG)
        try:
            with quiet_lightning():
                for text in (
                    "The loader does not have many workers which",
                    "The number (3) is smaller than the logging interval",
                    "Checkpoint directory /x exists and is not empty.",
                    "`isinstance(treespec, LeafSpec)` is deprecated",
                ):
                    warnings.warn(text, UserWarning, stacklevel=1)
                with pytest.raises(UserWarning, match="something else"):
                    warnings.warn("something else", UserWarning, stacklevel=1)
                assert [logging.getLogger(name).level for name in names] == [logging.WARNING] * 3
            with pytest.raises(UserWarning, match="many workers"):
                warnings.warn("does not have many workers", UserWarning, stacklevel=1)
        finally:
            for name, level in zip(names, before, strict=True):
                logging.getLogger(name).setLevel(level)


class TestLines:
    @pytest.mark.parametrize(
        ("total", "told"),
        [(1, [1]), (9, list(range(1, 10))), (10, list(range(1, 11))), (20, list(range(2, 21, 2))), (0, [1, 2])],
    )
    def test_about_ten_of_the_rounds(self, total: int, told: list[int], caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="lgmml_torch"):
            for done in range(1, max(3, total + 1)):
                tell_rounds(done, SimpleNamespace(total=total, train=0.25, count=7))
        expected = told if total > 1 else [1, 2]
        assert caplog.messages == [f"local metrics: {done} of {total}, train 0.2500" for done in expected]

    def test_an_epoch_by_its_own_measure(self, caplog: pytest.LogCaptureFixture) -> None:
        keeper = KeepCheckpoints("x", monitor="val/map")
        keeper.curve = {1: 0.125}
        trainer: Any = SimpleNamespace(current_epoch=0, max_epochs=2, checkpoint_callbacks=[keeper])
        with caplog.at_level(logging.INFO, logger="lgmml_torch"):
            TellEpochs().on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
        assert caplog.messages == ["epoch 1 of 2, validation map 0.1250"]


class TestStopping:
    def test_the_step_is_saved_whole(self, tmp_path: Path) -> None:
        saved: list[Any] = []
        stopped: list[int] = []
        stopper: Any = SimpleNamespace(asked=15, waits=False, stop=lambda: stopped.append(1), listen=lambda: None)
        callback = StopAtStep(stopper)
        assert callback._step == 0
        trainer: Any = SimpleNamespace(
            world_size=1, global_step=1, num_training_batches=9, checkpoint_callbacks=[KeepCheckpoints(tmp_path)],
            save_checkpoint=lambda path, weights_only: saved.append((path, weights_only)),
        )  # fmt: skip
        callback.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
        assert (saved, stopped) == ([(tmp_path / "last.ckpt", False)], [1])
