"""A fit of local metrics that was killed goes on from where it was, to the same bank."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataWarning
from lgmml_torch.fitting.boosted import BoostedBuilder
from lgmml_torch.fitting.sampled import SampledBuilder
from lgmml_torch.functional.measures import Measure
from lgmml_torch.training import resume
from lgmml_torch.training.recipe import Recipe
from lgmml_torch.training.resume import Unfinished
from lgmml_torch.training.stages import Prepared, prepare
from tests.training.tiny import recipe as tiny_recipe
from tests.training.tiny import splits

ROUNDS = 8


class KilledError(Exception):
    pass


@pytest.fixture(autouse=True)
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "STATE_SECONDS", 0.0)


def recipe(**settings: Any) -> Recipe:
    fit_bank = BoostedBuilder(**{"rounds": ROUNDS, "candidates": 3, "evaluate_every": 2, **settings})
    return replace(tiny_recipe("shared"), fit_bank=fit_bank)


def fit(folder: Path | None, found: Recipe, die_after: int | None = None) -> tuple[Prepared, list[int]]:
    done: list[int] = []

    def on_round(round_: int, info: Any) -> None:
        done.append(round_)
        if round_ == die_after:
            raise KilledError

    parts = dict(zip(("train", "valid"), splits(), strict=False))
    return prepare(parts, found, on_round, folder), done


def killed(folder: Path, found: Recipe, die_after: int = 5) -> None:
    with pytest.raises(KilledError):
        fit(folder, found, die_after)


def same(a: Prepared, b: Prepared) -> bool:
    first, second = a.bank.metrics.state_dict(), b.bank.metrics.state_dict()
    equal = all(value.equal(second[name]) for name, value in first.items() if "quality" not in name)
    return equal and torch.equal(a.bank.phi, b.bank.phi) and a.bank.history == b.bank.history  # type: ignore[arg-type]


def test_a_killed_fit_goes_on(tmp_path: Path) -> None:
    killed(tmp_path, recipe())
    assert len(list(tmp_path.glob("*.bank"))) == 1
    assert next(tmp_path.glob("*.bank")).stat().st_size < 100_000
    found, done = fit(tmp_path, recipe())
    assert done == [6, 7, 8]
    assert same(found, fit(None, recipe())[0])
    assert not list(tmp_path.iterdir())  # nothing is left to go on with


def test_another_fit_does_not_take_it(tmp_path: Path) -> None:
    killed(tmp_path, recipe())
    for other in ({"rounds": ROUNDS + 1}, {"shrinkage": 0.2}):
        assert fit(tmp_path, recipe(**other))[1][0] == 1
    assert fit(tmp_path, replace(recipe(), seed=7))[1][0] == 1
    assert fit(tmp_path, recipe())[1][0] == 6


def test_a_state_belongs_to_all_that_a_fit_depends_on(tmp_path: Path) -> None:
    train, valid, _ = splits()
    start, weights = fit(None, recipe())[0].bank, torch.ones(len(train))
    fits = [(train, None, 0), (train, valid, 0), (train, valid, 1), (valid, train, 0), (train, valid, 0, start)]
    fits += [(train, valid, 0, None, Measure.of("map")), (train.replace(query_weights=weights), valid, 0)]
    fits += [(train.replace(query_weights=2 * weights), valid, 0), (train, valid.replace(labels=1 - valid.labels), 0)]
    found = [Unfinished(tmp_path, recipe().builder, *each).path for each in fits]
    assert len(set(found)) == len(fits)
    assert Unfinished(tmp_path, recipe().builder, *fits[-1]).path == found[-1]


def kept_state(content: bytes, kept: Unfinished, file: Path) -> str | None:
    file.write_bytes(content)
    found = kept.arguments()
    return repr(found["resume"]) if found else None


def test_damage_to_a_state_is_told_and_the_fit_begins_anew(tmp_path: Path) -> None:
    killed(tmp_path, recipe(), 1)
    file = next(tmp_path.glob("*.bank"))
    good = file.read_bytes()
    drawn = np.random.default_rng(0)
    cuts = [good[:place] for place in (0, 200, len(good) - 1)]
    flips = [good[:p] + bytes([good[p] ^ 4]) + good[p + 1 :] for p in drawn.integers(0, len(good), 60).tolist()]
    kept = Unfinished(tmp_path, recipe().fit_bank, splits()[0], None, 0)
    kept.path = file
    assert kept.arguments()
    for bad in cuts:
        file.write_bytes(bad)
        with pytest.warns(DataWarning, match=r"\.bank is damaged .* the fit starts from the beginning"):
            assert kept.arguments() == {}
    state = kept_state(good, kept, file)
    for bad in flips:  # some bytes of a zip archive mean nothing
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)
            assert kept_state(bad, kept, file) in (state, None)
    file.write_bytes(cuts[1])
    with pytest.warns(DataWarning, match="the fit starts from the beginning"):
        assert fit(tmp_path, recipe())[1][0] == 1


def test_a_state_of_another_fit_in_its_place_is_told(tmp_path: Path) -> None:
    killed(tmp_path, recipe())
    own = next(tmp_path.glob("*.bank"))
    killed(tmp_path, recipe(shrinkage=0.2))
    other = next(file for file in tmp_path.glob("*.bank") if file != own)
    own.write_bytes(other.read_bytes())
    with pytest.warns(DataWarning, match=r"\.bank is damaged \(it belongs to another fit\); the fit starts"):
        assert fit(tmp_path, recipe())[1][0] == 1


def test_a_builder_without_states_is_left_alone(tmp_path: Path) -> None:
    sampled = replace(tiny_recipe("shared"), fit_bank=SampledBuilder(num_metrics=3))
    fit(tmp_path, sampled)
    assert not list(tmp_path.iterdir())


def test_states_are_written_some_seconds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    killed(tmp_path, recipe())  # within the first seconds
    assert not list(tmp_path.iterdir())
    fit(tmp_path, recipe())
