"""Rows of Φ in files of their own: written, read and put together by processes that are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import CheckpointError
from lgmml_torch.distributed import Spread
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION, load_checkpoint, seal_of, write_checkpoint
from lgmml_torch.training import rows as store
from lgmml_torch.training.checkpoints import CheckpointFiles
from lgmml_torch.training.rows import LISTED, OwnRows, OwnRowsFiles, OwnRowsStrategy, copy_checkpoint, row_files


class Threads:
    """`torch.distributed` for threads that stand for processes."""

    def __init__(self, size: int) -> None:
        self.size, self.mine = size, threading.local()
        self.barrier, self.table = threading.Barrier(size, timeout=900), dict[int, Any]()

    def is_initialized(self) -> bool:
        return True

    def get_rank(self) -> int:
        return int(self.mine.rank)

    def get_world_size(self) -> int:
        return self.size

    def _all(self, value: Any) -> list[Any]:
        self.barrier.wait()
        self.table[self.get_rank()] = value
        self.barrier.wait()
        found = [self.table[rank] for rank in range(self.size)]
        self.barrier.wait()
        return found

    def broadcast_object_list(self, told: list[Any], src: int) -> None:
        told[:] = self._all(list(told))[src]

    def all_gather_object(self, told: list[Any], value: Any) -> None:
        told[:] = self._all(value)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        with torch.no_grad():
            tensor.copy_(self._all(tensor.clone())[src])

    def all_gather(self, told: list[Tensor], sent: Tensor) -> None:
        told[:] = self._all(sent.clone())

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What the work gives on each of them; the first error of any."""
        found, errors = dict[int, Any](), list[BaseException]()

        def one(rank: int) -> None:
            self.mine.rank = rank
            try:
                found[rank] = work(rank)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [found[rank] for rank in range(self.size)]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Threads]]:
    def start(size: int) -> Threads:
        threads = Threads(size)
        monkeypatch.setattr(distributed, "dist", threads)
        return threads

    yield start
    monkeypatch.undo()


OWNER = [0, 1, 1, 0, 2, 0, 1]
SIZES = torch.tensor([2, 1, 3, 1, 2, 2, 1])
NAMES = tuple("abcdefg")


def model(count: int, mode: str = "per_query", **phi: Any) -> LGMML:
    features = Chain([Standardize()]).fit(torch.tensor([[0.0, 1.0], [2.0, 5.0]]), torch.tensor([0, 2]))
    metrics = LocalMetrics([MetricBlock(torch.zeros(3, 2), torch.eye(2).expand(3, 2, 2).clone())], num_features=2)
    return LGMML(features, metrics, Phi(count, 3, mode=mode, **phi), kernel="distance", feature_names=("x", "y"))


def value(query: int, what: int = 1) -> list[float]:
    """The row of a query: no two are alike."""
    return [what * 100.0 + query, what * 100.0 + query + 0.25, what * 100.0 + query + 0.5]


class Part:
    """What one of several processes has: some lists, their rows, and a checkpoint of them."""

    def __init__(self, rank: int, owner: list[int] | None = None, mode: str = "per_query", **phi: Any) -> None:
        self.spread = Spread(SIZES, torch.tensor(OWNER if owner is None else owner), rank)
        self.lists = self.spread.own.tolist()
        self.model = model(len(self.lists), mode, **phi)
        self.model.qids = tuple(NAMES[q] for q in self.lists)
        with torch.no_grad():
            if mode == "per_query":
                self.model.phi.table.weight.copy_(self.table())
                self.model.phi.summaries.copy_(self.table(4).repeat(1, 2))
            if self.model.phi.deviation is not None:
                self.model.phi.deviation.weight.copy_(self.table(9))
        self.rows = OwnRows(self.model, self.spread)

    def table(self, what: int = 1) -> Tensor:
        return torch.tensor([value(q, what) for q in self.lists]).view(-1, 3)

    def checkpoint(self, step: int = 5) -> dict[str, Any]:
        state = {f"model.{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}
        spec = {"qids": list(self.model.qids), "phi": {"num_queries": len(self.lists), "mode": "x"}, "kernel": "k"}
        memory = {0: {"step": torch.tensor(3.0), "moment": self.table(2), "row": torch.ones(3)}} if self.lists else {}
        return {
            "state_dict": state,
            "global_step": step,
            FORMAT: {"version": VERSION, "spec": spec},
            "hyper_parameters": {"model_spec": spec, "loss": 1},
            "optimizer_states": [{"state": memory, "param_groups": []}],
        }


class TestWhatIsOwn:
    def test_of_weights_for_each_query(self) -> None:
        rows = Part(1).rows
        assert rows.names == ("phi.table.weight", "phi.summaries")
        assert (rows.parameters, rows.shares_nothing) == ([0], True)
        shared = rows.shared(Part(1).model.state_dict())
        assert "phi.summary_mean" in shared
        assert not set(rows.names) & set(shared)

    def test_of_deviations(self) -> None:
        part = Part(1, mode="shared", deviations=True)
        assert part.rows.names == ("phi.deviation.weight",)
        assert (part.rows.parameters, part.rows.shares_nothing) == ([1], False)
        part.model.phi.table.weight.requires_grad_(False)
        frozen = OwnRows(part.model, part.spread)  # an optimizer counts only what is trained
        assert (frozen.parameters, frozen.shares_nothing) == ([0], True)

    def test_of_a_gate(self) -> None:
        rows = Part(1, mode="amortized").rows
        assert (rows.names, rows.parameters, rows.shares_nothing) == (("phi.summaries",), [], False)


@pytest.fixture(params=[1 << 24, 24, 1], ids=["all", "two", "one"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are sent in one call: a row of Φ has 12 bytes, one of summaries 24."""
    monkeypatch.setattr(store, "AT_ONCE", request.param)


def saved(together: Callable[[int], Threads], path: Path, step: int = 5) -> list[dict[str, Any]]:
    def work(rank: int) -> dict[str, Any]:
        part = Part(rank)
        content = {**part.checkpoint(step), "writer": rank}
        part.rows.save(content, path)
        return content

    return together(3).run(work)


class TestSaving:
    def test_each_process_writes_its_rows_and_the_first_what_names_them(
        self, together: Callable[[int], Threads], tmp_path: Path
    ) -> None:
        path = tmp_path / "last.ckpt"
        saved(together, path)
        names = [f"last.5.{rank}-of-3.rows" for rank in range(3)]
        assert sorted(file.name for file in tmp_path.iterdir()) == [*names, "last.ckpt"]
        content = load_checkpoint(path)
        assert content["writer"] == 0
        assert content[LISTED] == {name: seal_of(tmp_path / name) for name in names}
        assert content["state_dict"]["model.phi.table.weight"].shape == (0, 3)
        assert content["state_dict"]["model.phi.summaries"].shape == (0, 6)
        memory = content["optimizer_states"][0]["state"][0]
        assert (memory["moment"].shape, memory["row"].tolist(), float(memory["step"])) == ((0, 3), [1.0] * 3, 3.0)
        spec = {"qids": [], "phi": {"num_queries": 0, "mode": "x"}, "kernel": "k"}
        assert content[FORMAT] == {"version": VERSION, "spec": spec}
        assert content["hyper_parameters"] == {"model_spec": spec, "loss": 1}
        for rank, name in enumerate(names):
            part, own = Part(rank), load_checkpoint(tmp_path / name)
            assert own["lists"].tolist() == part.lists
            assert set(own[LISTED]) == {"phi.table.weight", "phi.summaries", "optimizer.0.0.moment"}
            assert torch.equal(own[LISTED]["phi.table.weight"], part.table())
            assert torch.equal(own[LISTED]["optimizer.0.0.moment"], part.table(2))

    def test_what_the_optimizer_remembers_stays(self, together: Callable[[int], Threads], tmp_path: Path) -> None:
        def work(rank: int) -> bool:
            part = Part(rank)
            content = part.checkpoint()
            memory = content["optimizer_states"][0]["state"].get(0)
            part.rows.save(content, tmp_path / "last.ckpt")
            return memory is None or torch.equal(memory["moment"], part.table(2))

        assert together(3).run(work) == [True] * 3

    def test_of_the_checkpoint_before_nothing_is_left(self, together: Callable[[int], Threads], tmp_path: Path) -> None:
        others = ["best.5.0-of-3.rows", "last.txt", "mine.rows", "last.more.4.0-of-3.rows"]
        for name in others:
            (tmp_path / name).write_text("somebody's")
        saved(together, tmp_path / "last.ckpt", 4)
        saved(together, tmp_path / "last.ckpt", 6)
        names = [f"last.6.{rank}-of-3.rows" for rank in range(3)]
        assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*names, *others, "last.ckpt"])
        assert sorted(file.name for file in row_files(tmp_path / "last.ckpt")) == names

    def test_nothing_is_removed_before_the_new_one_is_in_its_place(
        self, together: Callable[[int], Threads], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old, there = tmp_path / "last.4.0-of-3.rows", list[bool]()
        old.write_text("old")
        real = store.write_checkpoint

        def slowly(path: Path, content: Any) -> None:
            if path.suffix == ".ckpt":
                time.sleep(0.05)
                there.append(old.exists())
            real(path, content)

        monkeypatch.setattr(store, "write_checkpoint", slowly)
        saved(together, tmp_path / "last.ckpt")
        assert there == [True]
        assert not old.exists()

    def test_all_processes_remove_what_is_old_at_once(
        self, together: Callable[[int], Threads], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file that another one has removed in between is no error."""
        old = tmp_path / "last.4.0-of-3.rows"
        monkeypatch.setattr(store, "row_files", lambda path: [old])
        old.write_text("old")
        saved(together, tmp_path / "last.ckpt")
        assert not old.exists()


class TestLoading:
    @pytest.mark.usefixtures("at_once")
    @pytest.mark.parametrize("owner", [OWNER, [1, 0, 1, 0, 1, 0, 0], [0] * 7, [1] * 7])
    def test_any_number_of_processes_finds_its_rows(
        self, owner: list[int], together: Callable[[int], Threads], tmp_path: Path
    ) -> None:
        path = tmp_path / "last.ckpt"
        saved(together, path)
        size = max(2, max(owner) + 1)

        def work(rank: int) -> None:
            part = Part(rank, owner)
            content = part.rows.load(path)
            assert LISTED not in content
            assert torch.equal(content["state_dict"]["model.phi.table.weight"], part.table())
            assert torch.equal(content["state_dict"]["model.phi.summaries"], part.table(4).repeat(1, 2))
            memory = content["optimizer_states"][0]["state"][0]
            assert torch.equal(memory["moment"], part.table(2))
            assert memory["row"].tolist() == [1.0] * 3
            read = part.rows.read(path)
            assert set(read) == set(part.rows.names)
            assert torch.equal(read["phi.table.weight"], part.table())

        together(size).run(work)

    def test_a_process_need_not_see_the_files_of_others(
        self, together: Callable[[int], Threads], tmp_path: Path
    ) -> None:
        """Each has a folder of its own, with its own rows; the checkpoint itself is in that of the first."""
        saved(together, tmp_path / "last.ckpt")
        for rank in range(3):
            (tmp_path / str(rank)).mkdir()
            (tmp_path / f"last.5.{rank}-of-3.rows").rename(tmp_path / str(rank) / f"last.5.{rank}-of-3.rows")
        (tmp_path / "last.ckpt").rename(tmp_path / "0" / "last.ckpt")
        owner = [2, 0, 1, 1, 0, 2, 2]

        def work(rank: int) -> bool:
            part = Part(rank, owner)
            return torch.equal(part.rows.read(tmp_path / str(rank) / "last.ckpt")["phi.table.weight"], part.table())

        assert together(3).run(work) == [True] * 3

    def test_rows_that_are_missing_or_others_are_named(
        self, together: Callable[[int], Threads], tmp_path: Path
    ) -> None:
        path = tmp_path / "last.ckpt"
        saved(together, path)
        second = tmp_path / "last.5.1-of-3.rows"
        kept = second.read_bytes()
        for wrong in (None, (tmp_path / "last.5.2-of-3.rows").read_bytes()):
            second.unlink(missing_ok=True)
            if wrong is not None:
                second.write_bytes(wrong)
            with pytest.raises(CheckpointError, match=r"last\.ckpt needs last\.5\.1-of-3\.rows beside it, with the"):
                together(2).run(lambda rank: Part(rank, [0, 1] * 3 + [0]).rows.load(path))
        second.write_bytes(kept)
        together(2).run(lambda rank: Part(rank, [0, 1] * 3 + [0]).rows.load(path))

    def test_a_checkpoint_of_one_process_has_all_rows_in_it(
        self, together: Callable[[int], Threads], tmp_path: Path
    ) -> None:
        path = tmp_path / "last.ckpt"
        write_checkpoint(path, Part(0, [0] * 7).checkpoint())

        def work(rank: int) -> None:
            part = Part(rank)
            content = part.rows.load(path)
            assert torch.equal(content["state_dict"]["model.phi.table.weight"], part.table())
            assert torch.equal(content["optimizer_states"][0]["state"][0]["moment"], part.table(2))
            assert torch.equal(part.rows.read(path)["phi.summaries"], part.table(4).repeat(1, 2))

        together(3).run(work)

    def test_what_an_optimizer_has_not_seen_yet_is_zero(
        self, together: Callable[[int], Threads], tmp_path: Path
    ) -> None:
        """The third process had no step with its list: of that nothing is remembered."""

        def save(rank: int) -> None:
            part = Part(rank)
            content = part.checkpoint()
            if rank == 2:
                content["optimizer_states"][0]["state"] = {}
            part.rows.save(content, tmp_path / "last.ckpt")

        together(3).run(save)

        def load(rank: int) -> Tensor | None:
            found = Part(rank, [0] * 7).rows.load(tmp_path / "last.ckpt")["optimizer_states"][0]["state"][0]["moment"]
            return found if rank == 0 else None

        found = together(2).run(load)[0]
        expected = Part(0, [0] * 7).table(2)
        expected[4] = 0.0
        assert torch.equal(found, expected)

    def test_an_optimizer_that_remembers_nothing_is_left_alone(self, tmp_path: Path) -> None:
        part = Part(0, [0] * 7)
        content = part.checkpoint()
        content["optimizer_states"] = [{"state": {}, "param_groups": []}]
        write_checkpoint(tmp_path / "last.ckpt", content)
        assert part.rows.load(tmp_path / "last.ckpt")["optimizer_states"][0]["state"] == {}
        del content["optimizer_states"]
        write_checkpoint(tmp_path / "last.ckpt", content)
        assert torch.equal(part.rows.load(tmp_path / "last.ckpt")["state_dict"]["model.phi.table.weight"], part.table())


class TestWhole:
    @pytest.mark.usefixtures("at_once")
    @pytest.mark.parametrize("sparse", [False, True])
    def test_the_first_process_has_the_rows_of_all(
        self, sparse: bool, together: Callable[[int], Threads], tmp_path: Path
    ) -> None:
        def work(rank: int) -> tuple[Any, ...]:
            part = Part(rank, sparse=sparse)
            part.model.phi.mean_of_all = torch.ones(1, 3)
            return part.model, part.rows.whole(part.model, tmp_path)

        (own, whole), *others = together(3).run(work)
        assert all(model is found for model, found in others)
        assert whole is not own
        assert (len(own.phi.table.weight), own.phi.num_queries) == (3, 3)
        assert torch.equal(whole.phi.table.weight, Part(0, [0] * 7).table())
        assert torch.equal(whole.phi.summaries, Part(0, [0] * 7).table(4).repeat(1, 2))
        assert (whole.phi.num_queries, whole.qids, whole.phi.mean_of_all) == (7, NAMES, None)
        assert (whole.phi.table.weight.requires_grad, whole.phi.table.sparse) == (True, sparse)
        assert (whole.kernel, whole.feature_names, whole.training) == ("distance", ("x", "y"), False)
        assert (whole.preprocess, whole.metrics) == (own.preprocess, own.metrics)
        assert not list(tmp_path.iterdir())

    def test_what_comes_with_the_model_stays_with_it(self, together: Callable[[int], Threads], tmp_path: Path) -> None:
        def work(rank: int) -> LGMML:
            part = Part(rank, mode="shared", deviations=True)
            part.model.encoder = SimpleNamespace(columns=("x", "y"))  # type: ignore[assignment]
            part.model.base = SimpleNamespace(trees=3)  # type: ignore[assignment]
            return part.rows.whole(part.model, tmp_path)

        whole = together(3).run(work)[0]
        assert whole.encoder.columns == ("x", "y")
        assert whole.base.trees == 3
        assert torch.equal(whole.phi.deviation.weight, Part(0, [0] * 7).table(9))

    def test_of_one_process_it_is_the_model(self, tmp_path: Path) -> None:
        part = Part(0, [0] * 7)
        assert part.rows.whole(part.model, tmp_path) is part.model


class TestFiles:
    def test_one_process_writes_a_file_and_several_write_their_rows(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        asked: list[tuple[Any, ...]] = []
        rows: Any = SimpleNamespace(save=lambda *args: asked.append(("save", *args)), load=lambda path: {"from": path})
        files = OwnRowsFiles(rows)
        content = {"a": 1, FORMAT: {"version": VERSION}}
        files.save_checkpoint(content, str(tmp_path / "one.ckpt"))
        assert asked == []
        assert load_checkpoint(tmp_path / "one.ckpt")["a"] == 1
        for size in (2, 3):
            monkeypatch.setattr(distributed, "place", lambda size=size: (1, size))
            files.save_checkpoint(content, str(tmp_path / "two.ckpt"))
        assert asked == [("save", content, tmp_path / "two.ckpt")] * 2
        assert not (tmp_path / "two.ckpt").exists()
        assert files.load_checkpoint(str(tmp_path / "x"), "more", map_location=None) == {"from": tmp_path / "x"}

    def test_plain_ones(self, tmp_path: Path) -> None:
        files, path = CheckpointFiles(), tmp_path / "a.ckpt"
        files.save_checkpoint({"a": 1, FORMAT: {"version": VERSION}}, path)
        assert files.load_checkpoint(path, "more", weights_only=True)["a"] == 1
        files.remove_checkpoint(path)
        files.remove_checkpoint(path)  # it is gone, which was wanted
        with pytest.raises(CheckpointError, match=r"no checkpoint at .*a\.ckpt"):
            files.load_checkpoint(path)

    @pytest.mark.parametrize("nothing", [False, True])
    def test_the_strategy_wraps_what_is_shared_and_writes_everywhere(
        self, nothing: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[Any] = []
        monkeypatch.setattr(DDPStrategy, "configure_ddp", lambda self: done.append("ddp"))
        strategy = OwnRowsStrategy(shares_nothing=nothing, find_unused_parameters=True)
        assert strategy._ddp_kwargs == {"find_unused_parameters": True}
        strategy.configure_ddp()
        assert done == ([] if nothing else ["ddp"])
        strategy.checkpoint_io = SimpleNamespace(save_checkpoint=lambda *a, **k: done.append((a, k)))  # type: ignore[assignment]
        strategy.save_checkpoint({"a": 1}, "here", storage_options="so")
        assert done[-1] == (({"a": 1}, "here"), {"storage_options": "so"})

    def test_a_copy_has_all_that_is_there(self, together: Callable[[int], Threads], tmp_path: Path) -> None:
        source, target = tmp_path / "a" / "last.ckpt", tmp_path / "b" / "best.ckpt"
        source.parent.mkdir()
        saved(together, source)
        (source.parent / "last.5.2-of-3.rows").unlink()
        copy_checkpoint(source, target)
        names = [f"best.5.{rank}-of-3.rows" for rank in range(2)]
        assert sorted(file.name for file in target.parent.iterdir()) == [*names, "best.ckpt"]
        for rank, name in enumerate(names):
            assert (target.parent / name).read_bytes() == (source.parent / f"last.5.{rank}-of-3.rows").read_bytes()
        seals, copied = load_checkpoint(source)[LISTED], load_checkpoint(target)[LISTED]
        assert copied == {name.replace("last", "best"): seal for name, seal in seals.items()}

    def test_only_the_name_of_the_checkpoint_changes_in_the_names_of_its_rows(self, tmp_path: Path) -> None:
        """One that is called "of" must not lose the word between the numbers."""
        content = {FORMAT: {"version": VERSION}, LISTED: {"of.5.0-of-1.rows": "seal"}}
        write_checkpoint(tmp_path / "of.ckpt", content)
        copy_checkpoint(tmp_path / "of.ckpt", tmp_path / "best.ckpt")
        assert load_checkpoint(tmp_path / "best.ckpt")[LISTED] == {"best.5.0-of-1.rows": "seal"}

    def test_a_copy_of_one_without_rows_is_the_file(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "last.ckpt", {FORMAT: {"version": VERSION}, "a": 1})
        copy_checkpoint(tmp_path / "last.ckpt", tmp_path / "new" / "best.ckpt")
        assert (tmp_path / "new" / "best.ckpt").read_bytes() == (tmp_path / "last.ckpt").read_bytes()


class TestBlocks:
    """As many rows at a time as fit, and at least one."""

    @pytest.mark.parametrize(
        ("room", "width", "sizes"),
        [(24, 3, [2, 2, 1]), (36, 3, [3, 2]), (35, 3, [2, 2, 1]), (1, 3, [1] * 5), (60, 3, [5]), (2, 0, [2, 2, 1])],
    )
    def test_of_a_file_and_of_a_table(
        self, room: int, width: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(store, "AT_ONCE", room)
        rows = torch.arange(5.0 * width).view(5, width)
        found = list(store._blocks(rows, 5, 0))
        assert [len(block) for _, block in found] == sizes
        assert [start for start, _ in found] == [sum(sizes[:place]) for place in range(len(sizes))]
        assert torch.equal(torch.cat([block for _, block in found]), rows)
        sent: list[int] = []
        monkeypatch.setattr(Spread, "exchange", lambda self, values, owner: sent.append(len(owner)) or values)
        spread = Spread(SIZES[:5], torch.zeros(5, dtype=torch.long), 0)
        own: Any = SimpleNamespace(spread=spread)
        assert torch.equal(OwnRows._collected(own, rows, tmp_path), rows)
        assert sent == sizes
