"""The promises every part of the package relies on; docs/architecture.md names them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import open_dict

from lgmml_torch.app.compose import build, load_splits, recipe_of
from lgmml_torch.app.config import load_config
from lgmml_torch.app.train import train
from lgmml_torch.checks import ConfigError, DataError, LGMMLError
from lgmml_torch.data.catalog import open_dataset, open_table
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.letor import load_file
from lgmml_torch.data.source import DataSource, open_source
from lgmml_torch.data.write import save_letor, save_table
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.fitting.boosted import BoostedBuilder
from lgmml_torch.fitting.sampled import SampledBuilder
from lgmml_torch.fitting.trained import TrainedBuilder
from lgmml_torch.functional.losses import lambda_gradients
from lgmml_torch.functional.measures import mean_measure, ndcg
from lgmml_torch.functional.presets import REPORTED
from lgmml_torch.functional.score import kernel as kappa_of
from lgmml_torch.functional.score import tie_equal_rows
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import offsets_from_sizes
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.losses import LossValue, Score, TrainingBatch, build_loss
from lgmml_torch.training.recipe import PhiSettings, Recipe
from lgmml_torch.training.stages import prepare
from tests.doors import small_data, small_model
from tests.training import tiny

ROOT = Path(__file__).parent.parent


class TestOrder:
    """Scores, labels and offsets of a data set are in the order of its rows; only doors give the caller's order."""

    def test_scores_go_with_labels_and_offsets(self) -> None:
        model, data = small_model(), small_data(queries=40, seed=2, shuffled=True)
        measured = evaluate(model, data, metrics=["ndcg@10"]).means["ndcg@10"]
        assert float(ndcg(model.score(data), data.labels, data.offsets, k=10)) == pytest.approx(measured, abs=1e-6)
        for query in range(data.num_queries):  # row by row: what a list scores alone, it scores among others
            part, rows = data.select([query]), slice(int(data.offsets[query]), int(data.offsets[query + 1]))
            torch.testing.assert_close(model.score(part), model.score(data)[rows], rtol=1e-5, atol=1e-6)

    @pytest.mark.realdata
    def test_on_real_data_too(self, data_dir: Path) -> None:
        """The row order of MQ2008 is not that of its file: mixing the two cost .16 of NDCG@10 without a word."""
        parts = open_dataset("mq2008", data_dir, fold=1)
        train, test = parts["train"], parts["test"]
        model = small_model(preprocess=list_rank_features(), data=train)
        scores = model.score(test)
        assert float(ndcg(scores, test.labels, test.offsets, k=10)) == pytest.approx(
            evaluate(model, test, metrics=["ndcg@10"]).means["ndcg@10"], abs=2e-3  # ties alone may differ
        )  # fmt: skip

    def test_the_caller_gets_its_own_order_back(self) -> None:
        model, data = small_model(), small_data(seed=3, shuffled=True)
        X, qid = data.in_caller_order(data.features), data.in_caller_order(data.query_index)
        again = RankingData.from_arrays(X, np.zeros(len(X)), qid=qid)
        found = model.score_in_caller_order(again)
        np.testing.assert_allclose(found, data.in_caller_order(model.score(data)).numpy(), rtol=1e-5, atol=1e-6)

    def test_the_two_orders_cannot_be_mixed_by_accident(self) -> None:
        model, data = small_model(), small_data(seed=3, shuffled=True)
        given = model.score_in_caller_order(data)
        assert not isinstance(given, torch.Tensor)
        for measure in (lambda: ndcg(given, data.labels, data.offsets), lambda: mean_measure(given, data)):  # type: ignore[arg-type]
            with pytest.raises(LGMMLError, match="`scores` must be a tensor in the order of the rows, got ndarray"):
                measure()


class TestTies:
    """Equal documents of a list get equal scores, whatever their place, and whichever way the processor rounds."""

    SCRIPT = """
import sys
import torch
from lgmml_torch.ragged import RankingData
from tests.doors import FEATURES, small_model

threads = int(sys.argv[1])
torch.set_num_threads(threads)
g = torch.Generator().manual_seed(threads)
models = [small_model(mode=mode, kernel=kernel) for mode, kernel in (("shared", "paper"), ("amortized", "rbf"))]
worst = 0
for size in [*range(2, 70), 127, 129, 1000, 2049, 5001]:
    before = int(torch.randint(0, 40, (1,), generator=g))  # rows of another list shift the tied ones
    one, other = torch.randn(2, FEATURES, generator=g).split(1)
    rows = torch.cat([torch.randn(before, FEATURES, generator=g), one.expand(size, -1), other.expand(size // 2, -1)])
    qid = [0] * before + [1] * (size + size // 2)
    mixed = before + torch.randperm(len(rows) - before, generator=g)
    rows = torch.cat([rows[:before], rows[mixed]])
    data = RankingData.from_arrays(rows, torch.randint(0, 3, (len(rows),), generator=g), qid=qid)
    for model in models:
        scores = model.score(data)[data.query_index == data.num_queries - 1]
        worst = max(worst, scores.unique().numel() - (2 if size > 1 else 1))
print(worst)
"""

    @pytest.mark.parametrize(("threads", "capability"), [(1, "default"), (2, "")])
    def test_ties_are_real_ties(self, threads: int, capability: str) -> None:
        surroundings = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if capability:
            surroundings["ATEN_CPU_CAPABILITY"] = capability
        done = subprocess.run(
            [sys.executable, "-c", self.SCRIPT, str(threads)],
            env=surroundings,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["0"]

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_agrees_with_a_loop(self, draw: st.DataObject) -> None:
        sizes = draw.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
        n = sum(sizes)
        features = torch.tensor(draw.draw(st.lists(st.sampled_from([0.0, -0.0, 1.0]), min_size=n, max_size=n))).view(
            n, 1
        )
        noise = draw.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
        scores = -1 - features[:, 0] - torch.tensor(noise, dtype=torch.float32) * 1e-6
        offsets = offsets_from_sizes(torch.tensor(sizes))
        expected = scores.clone()
        for start, stop in itertools.pairwise(offsets.tolist()):
            for row in range(start, stop):
                twin = next(other for other in range(start, stop) if features[other] == features[row])
                expected[row] = scores[twin]
        assert torch.equal(tie_equal_rows(scores, features, offsets), expected)

    def test_rows_that_differ_are_left_alone(self) -> None:
        scores, offsets = torch.tensor([0.5, 0.5000001, 0.5]), torch.tensor([0, 3])
        features = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]])
        assert torch.equal(tie_equal_rows(scores, features, offsets), scores)


class TestWholeBank:
    """Kernel, norm and Φ₀ belong to the bank; a setting that cannot be honoured is refused before a fit starts."""

    @pytest.mark.parametrize("builder", [BoostedBuilder(rounds=3, candidates=6), SampledBuilder(num_metrics=4)])
    def test_a_model_scores_with_the_kernel_its_bank_was_fitted_for(
        self, builder: BoostedBuilder | SampledBuilder
    ) -> None:
        data = letor_like(20, 6, seed=1)
        for kernel in ("paper", "rbf", "distance"):
            recipe = Recipe(list_rank_features, replace(builder, kernel=kernel))
            prepared = prepare({"train": data}, recipe)
            model = prepared.model(recipe.make_phi).eval()
            assert model.kernel == prepared.bank.kernel == kernel
            features = prepared.preprocess(data.features, data.offsets)
            expected = -(kappa_of(prepared.bank.metrics(features), kernel) @ model.phi.table.weight[0])
            torch.testing.assert_close(model.score(data), expected, rtol=1e-4, atol=1e-5)

    def test_a_kernel_apart_from_the_bank_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown setting 'kernel'; did you mean 'local_metrics.kernel'\?"):
            load_config(["kernel=rbf"])

    def test_what_cannot_be_honoured_is_refused_before_a_fit(self) -> None:
        refused = {
            "local_metrics.kernel=cosine": "kernel` must be one of 'paper', 'distance', 'rbf', got 'cosine'",
            "local_metrics=sampled local_metrics.prior=globl": "prior` must be one of 'identity', 'global', got",
            "phi.policy=knn": "`phi.policy` must be one of 'shared', 'ones', got 'knn'",
            "evaluation.metrics=[ndgc@10]": "got 'ndgc@10'; did you mean 'ndcg'",
            "evaluation.preset=letor5": "`evaluation.preset` must be one of .*; did you mean 'letor4'",
            "loader.batching=pairs": "`loader.batching` must be one of 'lists', 'triplets', got 'pairs'",
            "loss.margin=-1": "`loss.margin` must be positive, got -1",
            "keep=first": "`keep` must be one of 'best', 'last', got 'first'",
            "trainer.accelerator=tpuu": "`trainer.accelerator` must be one of .*, got 'tpuu'; did you mean 'tpu'",
            "distances=float8": "`distances` must be one of 'float32', 'float16', 'bfloat16', got 'float8'",
        }
        for override, message in refused.items():
            cfg = load_config([*override.split(), "data.num_queries=-1"])  # data that would fail later
            with pytest.raises(LGMMLError, match=message):
                train(cfg)

    def test_a_setting_of_the_builder_is_named_as_in_the_configuration(self) -> None:
        with pytest.raises(LGMMLError, match=r"`local_metrics\.kernel` must be one of"):
            train(load_config(["local_metrics.kernel=cosine"]))


class TestOneCompositionRoot:
    """Defaults stand once: configuration, builders and estimator agree; tests/test_doors.py compares whole recipes."""

    def test_defaults_agree(self) -> None:
        builders = {"boosted": BoostedBuilder(), "sampled": SampledBuilder(), "trained": TrainedBuilder()}
        for name, builder in builders.items():
            cfg = load_config([f"local_metrics={name}"])
            assert build(cfg.local_metrics, _convert_="all") == builder
        cfg, plain = load_config([]), PhiSettings()
        phi = recipe_of(cfg).phi
        assert phi.loss == plain.loss
        assert (phi.keep, phi.deviation_penalty, phi.preset) == (plain.keep, plain.deviation_penalty, plain.preset)
        assert tuple(cfg.evaluation.metrics) == REPORTED
        data = small_data(seed=1)
        settings = {name: value for name, value in phi.loader.items() if name != "num_workers"}
        assert vars(TrainingBatches(data, **settings)).keys() == vars(TrainingBatches(data)).keys()
        batches = [TrainingBatches(data, **given)[0, 0].rows for given in (settings, {})]
        assert torch.equal(*batches)

    @pytest.mark.parametrize(
        ("bank", "way"),
        [("boosted", ["local_metrics=boosted", "local_metrics.rounds=4"]), ("trained", ["local_metrics=trained"])],
    )
    def test_train_and_the_estimator_fit_the_same_model(self, bank: str, way: list[str], tmp_path: Path) -> None:
        """The same data and settings through both doors give the same scores and the same ranking."""
        small = ["data.num_queries=30", "data.num_features=5", "trainer.max_epochs=2", *way]
        quiet = ["loader.num_workers=0", "callbacks=quiet", "logger=none", "trainer.enable_progress_bar=false"]
        asked = [*small, *quiet, f"paths.output_dir='{tmp_path}'", "name=test", "seed=3"]
        cfg = load_config(asked)
        with open_dict(cfg):
            cfg.pop("hydra", None)
        result = train(cfg, asked)
        assert result is not None
        splits = load_splits(cfg)
        X, y, qid = zip(*(as_given(splits[name]) for name in ("train", "valid")), strict=True)
        rounds = 4 if bank == "boosted" else None
        ranker = LGMMLRanker(bank=bank, rounds=rounds, epochs=2, random_state=3)
        ranker.fit(X[0], y[0], qid=qid[0], eval_set=(X[1], y[1], qid[1]))
        test = splits["test"]
        found = ranker.predict(*as_given(test)[:1], qid=as_given(test)[2])
        expected = result.model.score_in_caller_order(test)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert (np.diff(found[expected.argsort()]) > -1e-5).all()  # the same ranking, but for scores equal to rounding


class TestLossSeam:
    """A loss added through the seam trains; its gradient is autograd's, whatever the loss."""

    def test_a_new_loss_trains(self, tmp_path: Path) -> None:
        @dataclass(frozen=True)
        class Pointwise:
            name: ClassVar[str] = "pointwise"
            draws: ClassVar[bool] = False

            def __call__(self, batch: TrainingBatch, score: Score) -> LossValue:
                return LossValue((score(None) - batch.labels).square().mean(), 1)

            def spec(self) -> dict[str, Any]:
                return {"name": self.name}

        trained = tiny.train(tmp_path, mode="shared", loss=Pointwise(), epochs=2)
        assert sorted(trained.keeper.curve) == [0, 1, 2]
        assert bool((trained.model.phi.table.weight >= 0).all())

    @pytest.mark.parametrize("name", ["warp", "softmax", "lambdarank", "spearman", "label_differences"])
    def test_gradients_agree_with_finite_differences(self, name: str) -> None:
        data = tiny.splits(torch.float64)[0]
        loss = build_loss({"name": name})
        batch = TrainingBatches(data, batch_size=6, draws=loss.draws)[0, 0]
        scores = torch.randn(len(batch.rows), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        scores.requires_grad_()

        def value(at: torch.Tensor) -> torch.Tensor:
            return loss(batch, lambda places: at if places is None else at[places]).total

        (gradient,) = torch.autograd.grad(value(scores), scores)
        if name == "lambdarank":  # its gradients are those of no function: they are compared with their definition
            expected, _ = lambda_gradients(scores.detach(), batch.labels.double(), batch.list_offsets)
            torch.testing.assert_close(gradient, -expected / len(batch.lists))
            return
        for place in range(0, len(scores), 7):
            step = torch.zeros_like(scores).index_fill(0, torch.tensor([place]), 1e-6)
            slope = (value(scores.detach() + step) - value(scores.detach() - step)) / 2e-6
            assert float(gradient[place]) == pytest.approx(float(slope), abs=1e-5)


def as_given(data: RankingData) -> tuple[np.ndarray, np.ndarray, list[object]]:
    """Features, labels and query ids in the caller's order."""
    qid = [data.qids[query] for query in data.in_caller_order(data.query_index).tolist()]
    return data.in_caller_order(data.features).numpy(), data.in_caller_order(data.labels).numpy(), qid


def in_file_order(data: RankingData) -> tuple[bytes, list[float], list[object]]:
    queries = [data.qids[query] for query in data.in_caller_order(data.query_index).tolist()]
    return data.in_caller_order(data.features).numpy().tobytes(), data.in_caller_order(data.labels).tolist(), queries


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    return str(caught.value)


def refusals(file: Path) -> set[str]:
    """What the loader, a whole read and reading list by list say about a file that none of them should take."""

    def read(source: DataSource, *, whole: bool) -> None:
        with source:
            source.read() if whole else list(source.batches(1))

    whole, lists = (refusal(lambda way=way: read(open_source(file), whole=way)) for way in (True, False))  # type: ignore[misc]
    return {refusal(lambda: load_file(file, cache=False)), whole, lists}


class TestOneWayIn:
    """One source reads every format, for training and for scoring, with the same checks, errors and column rules."""

    DENSE = "1 qid:1 1:1 2:2 #docid = a\n0 qid:2 1:3 2:4 #docid = b\n2 qid:1 1:5 2:6 #docid = c\n"

    def test_a_last_line_without_its_comment_is_cut_for_everybody(self, tmp_path: Path) -> None:
        """The reader for training used to refuse it, the one for scoring to take it."""
        file = tmp_path / "data.txt"
        file.write_text(self.DENSE + "1 qid:2 1:7 2:8")
        message = f"{file}:4: the last line is cut: it ends without a comment, which all others have"
        assert refusals(file) == {message}
        file.write_text(self.DENSE + "1 qid:2 1:7")
        assert refusals(file) == {f"{file}:4: the last line is cut: it has 1 features, all others 2"}
        file.write_text(self.DENSE + "1 qid:2 1:7 2:8\n")
        assert load_file(file, cache=False).num_documents == 4

    def test_bad_files_are_refused_with_the_same_words(self, tmp_path: Path) -> None:
        for name, content in (
            ("a.txt", "1 qid:1 1:1\n1 qid:1 1:x\n"),
            ("b.txt", ""),
            ("a.csv", "qid,label,x\n1,1,1\n1,1,y\n"),
            ("b.csv", "query,label,x\n1,1,1\n"),
            ("a.tsv", "qid\tlabel\tx\tx\n1\t1\t1\t1\n"),
        ):
            (tmp_path / name).write_text(content)
            (message,) = refusals(tmp_path / name)
            assert message.startswith(f"{tmp_path / name}:")
            assert "\n" not in message

    @pytest.mark.parametrize("ending", ["txt.gz", "tsv", "npz", "parquet"])
    def test_what_can_be_scored_can_be_trained_on(self, tmp_path: Path, ending: str) -> None:
        data = small_data(queries=30, seed=5)
        if ending.startswith("txt"):
            save_letor(data, tmp_path / f"data.{ending}")
        elif ending == "npz":
            qid = [data.qids[query] for query in data.in_caller_order(data.query_index).tolist()]
            X, y = data.in_caller_order(data.features), data.in_caller_order(data.labels)
            np.savez(tmp_path / "data.npz", X=X, y=y, qid=qid)
        else:
            save_table(data, tmp_path / f"data.{ending}")
        parts = open_table(tmp_path / f"data.{ending}", cache=False)
        assert [len(part) for part in parts.values()] == [18, 6, 6]
        model = small_model(preprocess=list_rank_features(), data=parts["train"])
        with open_source(tmp_path / f"data.{ending}", num_features=model.num_features) as source:
            whole = source.read()
            streamed = np.empty(source.num_rows, np.float32)
            for batch in source.batches(20):
                streamed[batch.rows] = model.score_in_caller_order(batch.data)
        assert in_file_order(whole) == in_file_order(data)
        np.testing.assert_allclose(streamed, model.score_in_caller_order(data), rtol=1e-5, atol=1e-6)

    def test_gaps_are_filled_alike(self, tmp_path: Path) -> None:
        """Whole or in batches of one list, from text, a table or arrays: a stand-in comes from its own list."""
        X = np.array([[1, np.nan], [4, 2], [np.nan, 6], [8, np.nan]], np.float32)
        np.savez(tmp_path / "a.npz", X=X, y=np.zeros(4), qid=[1, 1, 2, 2])
        text = X.astype(str).tolist()
        (tmp_path / "a.csv").write_text(
            "qid,label,u,v\n" + "".join(f"{1 + i // 2},0,{u},{v}\n" for i, (u, v) in enumerate(text))
        )
        (tmp_path / "a.txt").write_text("".join(f"0 qid:{1 + i // 2} 1:{u} 2:{v}\n" for i, (u, v) in enumerate(text)))
        want = RankingData.from_arrays(X, np.zeros(4), qid=[1, 1, 2, 2], missing="query-mean")
        assert in_file_order(want)[0] == np.array([[1, 2], [4, 2], [8, 6], [8, 6]], np.float32).tobytes()
        for name in ("a.npz", "a.csv", "a.txt"):
            with open_source(tmp_path / name, missing="query-mean") as source:
                lists = RankingData.merge([batch.data for batch in source.batches(1)])
                assert in_file_order(source.read()) == in_file_order(lists) == in_file_order(want)
            assert in_file_order(load_file(tmp_path / name, missing="query-mean", cache=False)) == in_file_order(want)

    def test_training_without_labels_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("qid:1 1:2\n")
        (tmp_path / "a.csv").write_text("qid,x\n1,2\n")
        np.savez(tmp_path / "a.npz", X=[[2.0]], qid=[1])
        for name in ("a.txt", "a.csv", "a.npz"):
            with open_source(tmp_path / name) as source:
                assert source.read().features.tolist() == [[2]]  # to be scored it is as good as any
            with pytest.raises(DataError, match=r"label.*and training needs"):
                load_file(tmp_path / name, cache=False)
