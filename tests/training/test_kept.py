"""Which weights a run comes back with, and what its callbacks keep, write and tell on the way."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lgmml_torch import distributed, plots
from lgmml_torch.checks import CheckpointError
from lgmml_torch.files import SUFFIX
from lgmml_torch.functional.ranking.custom import Measure
from lgmml_torch.functional.ranking.measures import mean_measure
from lgmml_torch.models.storage import FORMAT, VERSION, write_checkpoint
from lgmml_torch.training import callbacks
from lgmml_torch.training.callbacks import KeepCheckpoints, Story, check_same_run, run_of
from lgmml_torch.training.kept import bring_best, keep_start, take_kept
from lgmml_torch.training.module import LGMMLModule
from tests.training.test_module_by_hand import lists, make_module

KEEPER = KeepCheckpoints.__qualname__


def write(path: Path, run: str | None = None, **more: Any) -> bytes:
    states = {} if run is None else {"callbacks": {KEEPER: {"run": run}}}
    write_checkpoint(path, {FORMAT: {"version": VERSION, "spec": {}}, **states, **more})
    return path.read_bytes()


class TestBestSoFar:
    def test_it_comes_along_from_beside_the_file(self, tmp_path: Path) -> None:
        old, new = tmp_path / "old" / "x", tmp_path / "new"
        write(old / "last.ckpt", "r")
        content = write(old / "best.ckpt", "r", epoch=3)
        bring_best(old / "last.ckpt", new / "best.ckpt")
        assert (new / "best.ckpt").read_bytes() == content

    def test_one_that_is_there_stays(self, tmp_path: Path) -> None:
        write(tmp_path / "old" / "last.ckpt", "r")
        write(tmp_path / "old" / "best.ckpt", "r", epoch=1)
        content = write(tmp_path / "new" / "best.ckpt", "r", epoch=2)
        bring_best(tmp_path / "old" / "last.ckpt", tmp_path / "new" / "best.ckpt")
        assert (tmp_path / "new" / "best.ckpt").read_bytes() == content

    def test_without_one_the_file_stands_in_and_that_is_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        content = write(tmp_path / "old" / "last.ckpt", "r")
        bring_best(tmp_path / "old" / "last.ckpt", tmp_path / "new" / "best.ckpt")
        assert (tmp_path / "new" / "best.ckpt").read_bytes() == content
        assert caplog.messages == [
            f"there is no best.ckpt beside {tmp_path}/old/last.ckpt: its own weights stand in for the best so far"
        ]

    def test_with_one_nothing_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write(tmp_path / "last.ckpt", "r")
        write(tmp_path / "best.ckpt", "r")
        bring_best(tmp_path / "last.ckpt", tmp_path / "best.ckpt")
        assert caplog.messages == []

    def test_one_of_another_run_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "last.ckpt", "r")
        write(tmp_path / "best.ckpt", "other")
        with pytest.raises(CheckpointError, match=r"best\.ckpt is of another run"):
            bring_best(tmp_path / "last.ckpt", tmp_path / "new" / "best.ckpt")

    def test_a_file_that_is_not_there_is_somebody_elses_affair(self, tmp_path: Path) -> None:
        bring_best(tmp_path / "last.ckpt", tmp_path / "new" / "best.ckpt")
        assert not (tmp_path / "new").exists()

    def test_what_killed_writers_left_is_swept_from_the_run(self, tmp_path: Path) -> None:
        """From the folder of the checkpoints and that of the whole run, and not from what lies around it."""
        folder = tmp_path / "outputs" / "run" / "checkpoints"
        write(folder / "last.ckpt", "r")
        write(folder / "best.ckpt", "r")
        left = [place / f".a.b{SUFFIX}" for place in (folder, folder.parent, folder.parent.parent)]
        for file in left:
            file.write_text("half")
        bring_best(folder / "last.ckpt", folder / "best.ckpt")
        assert [file.exists() for file in left] == [False, False, True]


class TestRuns:
    def test_a_file_tells_its_run(self, tmp_path: Path) -> None:
        write(tmp_path / "a.ckpt", "r7")
        write(tmp_path / "b.ckpt")
        write(tmp_path / "c.ckpt", callbacks={KEEPER: {"best": 1.0}})
        assert [run_of(tmp_path / f"{name}.ckpt") for name in "abc"] == ["r7", None, None]
        check_same_run(tmp_path / "a.ckpt", "r7")
        with pytest.raises(CheckpointError, match=r"a\.ckpt is of another run than the one that goes on here"):
            check_same_run(tmp_path / "a.ckpt", "r8")

    def test_each_keeper_is_a_run_of_its_own_and_a_state_names_it(self) -> None:
        first, second = KeepCheckpoints("a"), KeepCheckpoints("a")
        assert first.run != second.run
        state = first.state_dict()
        second.load_state_dict(state)
        assert second.run == first.run
        third = KeepCheckpoints("a")
        own = third.run
        third.load_state_dict({key: value for key, value in state.items() if key != "run"})  # of release 0.1
        assert third.run == own


class TestTaking:
    def file(self, path: Path, module: LGMMLModule, run: str = "r", **more: Any) -> Path:
        content: dict[str, Any] = {"callbacks": {KEEPER: {"run": run}}, **more}
        content["state_dict"] = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        module.on_save_checkpoint(content)
        write_checkpoint(path, content)
        return path

    def changed(self, **settings: Any) -> LGMMLModule:
        module = make_module(**settings)
        with torch.no_grad():
            module.model.phi.table.weight.add_(1.0)
        return module

    def test_weights_and_biases_come_from_the_file(self, tmp_path: Path) -> None:
        given = self.changed(num_positions=2)
        given.position_bias.copy_(torch.tensor([0.5, 0.25]))  # type: ignore[union-attr]
        file = self.file(tmp_path / "best.ckpt", given)
        module = make_module(num_positions=2)
        take_kept(module, file, "r")
        assert torch.equal(module.model.phi.table.weight, given.model.phi.table.weight)
        assert module.position_bias.tolist() == [0.5, 0.25]  # type: ignore[union-attr]
        plain = make_module()
        take_kept(plain, self.file(tmp_path / "plain.ckpt", self.changed()), "r")
        assert torch.equal(plain.model.phi.table.weight, given.model.phi.table.weight)

    def test_one_of_another_run_is_refused(self, tmp_path: Path) -> None:
        file = self.file(tmp_path / "best.ckpt", self.changed(), run="other")
        with pytest.raises(CheckpointError, match=r"best\.ckpt is of another run"):
            take_kept(make_module(), file, "r")

    def test_the_first_process_needs_the_file(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no checkpoint at .*best\.ckpt"):
            take_kept(make_module(), tmp_path / "best.ckpt", "r")

    @pytest.mark.parametrize("seen", [False, True])
    def test_others_are_told_what_they_do_not_see(
        self, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(distributed, "place", lambda: (1, 2))
        told: list[Any] = []
        monkeypatch.setattr(distributed, "copy_of_first", lambda state: told.append(sorted(state)))
        module, given = make_module(), self.changed()
        own = {"phi.table.weight": torch.full((3, 4), 7.0)}
        module.rows = SimpleNamespace(
            read=lambda path: own,
            shared=lambda state: {name: value for name, value in state.items() if name not in own},
        )  # type: ignore[assignment]
        monkeypatch.setattr(module, "agree_on_rows", lambda: told.append("agreed"))
        before = module.model.phi.summary_spread.clone()
        given.model.phi.summary_spread.fill_(3.0)
        file = tmp_path / "best.ckpt"
        if seen:
            self.file(file, given)
        take_kept(module, file, "r")
        assert torch.equal(module.model.phi.table.weight, own["phi.table.weight"])
        assert torch.equal(module.model.phi.summary_spread, torch.full_like(before, 3.0) if seen else before)
        assert told == [sorted(set(module.model.state_dict()) - set(own)), "agreed"]

    def test_without_rows_of_their_own_all_of_it_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[Any] = []
        monkeypatch.setattr(distributed, "copy_of_first", lambda state: told.append(sorted(state)))
        module = make_module()
        take_kept(module, self.file(tmp_path / "best.ckpt", self.changed()), "r")
        assert told == [sorted(module.model.state_dict())]


class TestStart:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("positions", [False, True])
    def test_it_is_judged_as_an_epoch_would_be(
        self, bias: bool, positions: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = lists(positions=torch.arange(12) % 4) if positions else lists()
        module, keeper, asked = make_module(num_positions=4 if bias else 0), KeepCheckpoints("x"), list[int]()
        monkeypatch.setattr(module, "on_fit_start", lambda: asked.append(1))
        if bias:
            module.position_bias.copy_(torch.tensor([0.0, 5.0, -5.0, 9.0]))  # type: ignore[union-attr]
        keep_start(module, keeper, data, Measure("ndcg@2"))
        scores = module.model.score(data)
        if bias and positions:
            scores = scores + module.position_bias[data.positions]  # type: ignore[index]
        assert keeper.best == pytest.approx(mean_measure(scores, data, Measure("ndcg@2")))
        assert (keeper.best_epoch, keeper.curve, asked) == (0, {0: keeper.best}, [1])

    def test_without_validation_it_is_not(self) -> None:
        keeper = KeepCheckpoints("x")
        keep_start(make_module(), keeper, None, Measure("ndcg@2"))
        assert (keeper.best, keeper.best_epoch, keeper.curve) == (-math.inf, 0, {})


class Trainer:
    """Notes what it is told to save, and who logs."""

    def __init__(self, **state: Any) -> None:
        self.saved: list[Any] = []
        self.logged: list[Any] = []
        logger = SimpleNamespace(log_metrics=lambda numbers, step: self.logged.append((numbers, step)))
        self.loggers: list[Any] = [logger, logger]
        self.strategy = SimpleNamespace(broadcast=lambda run: f"{run} of all")
        self.__dict__.update(state)

    def save_checkpoint(self, file: Path, weights_only: bool) -> None:
        self.saved.append((file, weights_only))


class TestKeeping:
    def test_what_nobody_says(self) -> None:
        keeper = KeepCheckpoints("x")
        assert (keeper.monitor, keeper.every_n_steps, keeper.curve) == ("val/ndcg@10", 500, {})
        assert (keeper.best, keeper.best_epoch) == (-math.inf, -1)
        assert (keeper.best_file, keeper.last_file) == (Path("x/best.ckpt"), Path("x/last.ckpt"))

    def test_the_start_is_epoch_0(self) -> None:
        keeper, trainer = KeepCheckpoints("x"), Trainer(val_dataloaders="lists")
        asked: list[Any] = []
        values = {"val/ndcg@10": 0.25, "val/map": 0.5}
        module: Any = SimpleNamespace(validate_now=lambda blocks: asked.append(blocks) or values)
        run = keeper.run
        keeper.on_train_start(trainer, module)  # type: ignore[arg-type]
        assert keeper.run == f"{run} of all"
        assert asked == ["lists"]
        assert trainer.logged == [(values, 0)] * 2
        assert (keeper.curve, keeper.best, keeper.best_epoch) == ({0: 0.25}, 0.25, 0)
        assert trainer.saved == [(Path("x/best.ckpt"), False)]
        keeper.on_train_start(trainer, module)  # type: ignore[arg-type]  # it goes on
        assert len(asked) == 1

    def test_without_validation_or_its_figure_nothing_is_judged(self) -> None:
        keeper, trainer = KeepCheckpoints("x"), Trainer(val_dataloaders=[])
        keeper.on_train_start(trainer, None)  # type: ignore[arg-type]
        assert (keeper.curve, trainer.saved) == ({}, [])
        trainer.val_dataloaders = "lists"  # type: ignore[attr-defined]
        keeper.on_train_start(trainer, SimpleNamespace(validate_now=lambda blocks: {}))  # type: ignore[arg-type]
        assert math.isnan(keeper.curve[0])

    def test_an_epoch_without_its_figure(self) -> None:
        keeper = KeepCheckpoints("x", monitor="val/map")
        trainer = Trainer(
            state=SimpleNamespace(fn="fit"), sanity_checking=False, current_epoch=4,
            callback_metrics={"val/ndcg@10": torch.tensor(0.5)},
        )  # fmt: skip
        keeper.on_validation_end(trainer, None)  # type: ignore[arg-type]
        assert list(keeper.curve) == [5]
        assert math.isnan(keeper.curve[5])
        trainer.callback_metrics = {"val/map": torch.tensor(0.5)}  # type: ignore[attr-defined]
        keeper.on_validation_end(trainer, None)  # type: ignore[arg-type]
        assert keeper.curve == {5: 0.5}

    def test_rounding_is_no_progress(self) -> None:
        for gain, better in ((0.0, False), (0.9e-9, False), (1.1e-9, True), (1.9e-9, True), (-1e-3, False)):
            keeper, trainer = KeepCheckpoints("x"), Trainer()
            keeper._judge(trainer, 1, 0.0)  # type: ignore[arg-type]
            keeper._judge(trainer, 2, gain)  # type: ignore[arg-type]
            assert (keeper.best_epoch, len(trainer.saved)) == ((2, 2) if better else (1, 1))
            assert keeper.curve == {1: 0.0, 2: gain}

    def test_at_the_end_of_an_epoch(self) -> None:
        keeper = KeepCheckpoints("x")
        trainer = Trainer(val_dataloaders=[], current_epoch=2)
        keeper.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
        assert trainer.saved == [(Path("x/best.ckpt"), False), (Path("x/last.ckpt"), False)]
        assert keeper.best_epoch == 3
        assert math.isnan(keeper.best)

    def test_within_an_epoch(self) -> None:
        keeper, trainer = KeepCheckpoints("x", every_n_steps=4), Trainer()
        written = []
        for trainer.global_step in range(1, 13):  # type: ignore[attr-defined]
            keeper.on_train_batch_end(trainer)  # type: ignore[arg-type]
            written.append(len(trainer.saved))
        assert written == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
        assert trainer.saved[0] == (Path("x/last.ckpt"), False)


class TestStory:
    def sink(self, calls: list[Any], shows: bool = True) -> Any:
        names = ("histogram", "numbers", "picture")
        return SimpleNamespace(
            shows_pictures=shows, **{name: (lambda *args, name=name: calls.append((name, *args))) for name in names}
        )

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        calls: list[Any] = []
        monkeypatch.setattr(callbacks, "sink_of", lambda logger: self.sink(calls))
        monkeypatch.setattr(plots, "spectrum_picture", lambda bank: ("spectrum", bank))
        monkeypatch.setattr(plots, "metrics_picture", lambda *args, **how: ("metrics", args, how))
        return calls

    def test_the_start_in_full(self, calls: list[Any]) -> None:
        module = make_module()
        bank = module.model.metrics
        (block,) = bank.iter_blocks()
        block.quality = torch.tensor([0.5, float("nan"), 0.25, 1.0])
        trainer: Any = SimpleNamespace(loggers=[None], is_global_zero=True, global_step=6)
        Story().on_train_start(trainer, module)
        spectra, conditions = plots.metric_spectra(bank)
        found = {args[1]: args[2:] for args in calls if args[0] == "histogram"}
        torch.testing.assert_close(
            found["metrics/log10_relative_eigenvalues"][0], spectra.clamp_min(1e-16).log10(), rtol=0, atol=0
        )
        torch.testing.assert_close(found["metrics/log10_condition"][0], conditions.log10())
        assert found["metrics/anchor_ndcg"][0].tolist() == [0.5, 0.25, 1.0]
        assert {args[-1] for args in found.values()} == {0}
        numbers = [args[1:] for args in calls if args[0] == "numbers"]
        assert numbers == [
            ({"metrics/median_condition": float(conditions.median())}, 0),
            ({"metrics/mean_anchor_ndcg": pytest.approx(1.75 / 3)}, 0),
        ]
        first, second = [args[1:] for args in calls if args[0] == "picture"]
        assert first == ("metrics/spectrum", ("spectrum", bank), 0)
        tag, (_, (shown, weights), how), step = second
        assert (tag, shown, step) == ("metrics/learned", bank, 6)
        torch.testing.assert_close(weights, module.model.phi.table.weight.detach().mean(0))
        assert how == {"names": ["1", "2"], "panels": 4}

    def test_what_is_flat_is_shown_as_flat(self, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """An eigenvalue of 0 has no logarithm."""
        spectra = torch.tensor([[1.0, 0.0, 1e-18, 1.5e-16]], dtype=torch.float64)
        monkeypatch.setattr(plots, "metric_spectra", lambda bank: (spectra, torch.ones(4)))
        trainer: Any = SimpleNamespace(loggers=[None], is_global_zero=True, global_step=0)
        Story(pictures=False).on_train_start(trainer, make_module())
        shown = calls[0][2][0].tolist()
        assert shown == pytest.approx([0.0, -16.0, -16.0, math.log10(1.5e-16)])
        assert not [call for call in calls if call[0] == "picture" or "anchor" in str(call[1])]

    def test_a_process_without_rows_shows_the_mean_of_all(self, calls: list[Any]) -> None:
        module = make_module()
        module.model.phi.table = torch.nn.Embedding(0, 4, _weight=torch.zeros(0, 4))
        module.model.phi.mean_of_all = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        story = Story(pictures=False)
        trainer: Any = SimpleNamespace(loggers=[None], is_global_zero=True, current_epoch=3, global_step=9)
        story.on_train_epoch_end(trainer, module)
        assert module.logged["phi/mean"] == (1.5, {"sync_dist": True})  # type: ignore[index]
        assert module.logged["phi/share_zero"] == (0.25, {"sync_dist": True})  # type: ignore[index]
        assert calls[0][1:] == ("phi/values", pytest.approx(torch.tensor([[0.0, 1.0, 2.0, 3.0]])), 9)
        assert story._steps == {0: 0, 4: 9}

    def test_the_clock_starts_with_the_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [5.0]
        monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
        story, module = Story(), make_module()
        assert (story.pictures, story._started, story._tuples, story._steps) == (True, 0.0, 0, {0: 0})
        trainer: Any = SimpleNamespace(loggers=[], is_global_zero=True, current_epoch=0, global_step=1)
        for count in (3, 4):
            story.on_train_epoch_start(trainer, module)
            for _ in range(2):
                story.on_train_batch_end(trainer, module, None, SimpleNamespace(queries=range(count)), 0)
            now[0] += 2.0
            story.on_train_epoch_end(trainer, module)
            found = module.logged["train/tuples_per_second"]  # type: ignore[index]
            assert found == (float(count), {"reduce_fx": "sum", "sync_dist": True})
        story.on_train_epoch_start(trainer, module)
        story.on_train_batch_end(trainer, module, None, SimpleNamespace(queries=range(2)), 0)
        story.on_train_epoch_end(trainer, module)  # no time has passed
        assert module.logged["train/tuples_per_second"][0] == pytest.approx(2e9)  # type: ignore[index]

    def test_only_the_first_process_speaks(self, calls: list[Any]) -> None:
        trainer: Any = SimpleNamespace(loggers=[None], is_global_zero=False, global_step=0)
        Story().on_train_start(trainer, make_module())
        assert calls == []
