"""``lgmml sweep``: a search for settings that can be interrupted. Optuna keeps a study in a file, a trial has a folder.

What is maximised is a run's validation NDCG@10. Trials whose validation curve falls behind are stopped early. The same
command again goes on where the last one stopped.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytorch_lightning as pl
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import Callback
from rich.table import Table

from lgmml_torch.app.commands import Command
from lgmml_torch.app.commands.common import print_tables
from lgmml_torch.app.compose import fitted_metrics
from lgmml_torch.app.config import load_config, parse_overrides
from lgmml_torch.app.report import means_markdown
from lgmml_torch.app.start import config_dir
from lgmml_torch.app.train import train
from lgmml_torch.checks import ConfigError, DivergedError, check_positive, require
from lgmml_torch.evaluation.tables import markdown_table
from lgmml_torch.files import write_text
from lgmml_torch.plots import save_figure, search_picture
from lgmml_torch.training.resume import KeepCheckpoints

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

log = logging.getLogger(__name__)

_ONCE = "A search looks at validation queries many times: read the test figures of the best trial only, and once."

_EXAMPLES = """
settings:
  as for `lgmml train`; one with several values is searched, beside those of conf/hparams_search/optuna.yaml:
  interval(a,b), tag(log,interval(a,b)), int(interval(a,b)), range(a,b), choice(x,y)
The study stands in FOLDER/study.db: the same command again goes on, also after a kill, until --trials are done.
examples:
  lgmml sweep data=mq2008 --trials 20 --folder outputs/search
  lgmml sweep experiment=quick 'loss.margin=choice(0.05,0.1)' --space my_space.yaml
  lgmml sweep --table multirun/2026-01-31_12-00-00            means over the runs of python train.py -m data.fold=1,2,3
"""


def _sweep_options(parser: ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="SETTING", help="key=value, see below")
    add = parser.add_argument
    help_ = "how many to have in all, those of earlier calls included (default: 20)"
    add("--trials", type=int, default=20, metavar="N", help=help_)
    help_ = "for the study, and a folder for each trial (default: outputs/sweep)"
    add("--folder", default="outputs/sweep", metavar="FOLDER", help=help_)
    help_ = "a YAML file with `space: {key: distribution}` instead of conf/hparams_search/optuna.yaml"
    add("--space", metavar="FILE", help=help_)
    add("--table", metavar="FOLDER", help="search nothing: print means over the runs below a folder")


def _sweep(args: Namespace) -> None:
    """Run the trials that are still to be run, and print all of them; or print a table of means."""
    if args.table is not None:
        if args.overrides:
            raise ConfigError(f"`--table` reads runs that are there and takes no settings, got {args.overrides[0]!r}")
        sys.stdout.write(means_markdown(Path(args.table)))
        return
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    folder = Path(args.folder)
    header, rows = _study_rows(Search.read(args.overrides, args.space).run(folder, args.trials))
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    best = f"the best trial: {folder / rows[0][0]}; all of them: {folder / 'study.md'}, study.png"
    print_tables(table, best, width=200)


COMMANDS = {"sweep": Command(_sweep_options, _sweep, _EXAMPLES)}


@dataclass(frozen=True)
class Search:
    """What is searched."""

    fixed: tuple[str, ...]  # overrides that every trial has
    space: Mapping[str, str]  # a distribution for each setting that is searched, as on the command line
    seed: int = 0  # of the draws

    @classmethod
    def read(cls, words: Sequence[str], file: str | None = None) -> Search:
        """What the words of the command line and a file ask for; a word with several values is searched.

        By default the file is ``conf/hparams_search/optuna.yaml``, of which the settings for the metrics that are
        fitted are searched.

        Raises:
            ConfigError: words or distributions that cannot be read, or settings that do not exist.
        """
        own: dict[str, str] = {}
        fixed: list[str] = []
        for word, item in zip(words, parse_overrides(words), strict=True):
            if item.is_sweep_override():
                own[item.get_key_element()] = word.partition("=")[2]
            else:
                fixed.append(word)
        kind, named = fitted_metrics(fixed)
        if not named:  # all trials fit the metrics that the space belongs to
            part = "local_metrics"
            if kind == "trained":
                part = "experiment"
            fixed.append(f"{part}={kind}")
        space, seed = _read_space(file, kind)
        searched = space | own
        for item in parse_overrides(fixed):
            searched.pop(item.get_key_element(), None)
        if not searched:
            example = "'loss.margin=choice(0.1,1)'"
            raise ConfigError(f"there is nothing to search: give a setting several values, e.g. {example}")
        search = cls(tuple(fixed), searched, seed)
        firsts = {}
        for key, distribution in search.distributions().items():
            options = vars(distribution).get("choices") or [vars(distribution)["low"]]
            firsts[key] = options[0]
        load_config([*fixed, *_assignments(firsts)])
        return search

    def distributions(self) -> dict[str, BaseDistribution]:
        """What each text means to Optuna."""
        found = {}
        for item in parse_overrides(_assignments(self.space)):
            found[item.get_key_element()] = _distribution(item)
        return found

    @contextmanager
    def open_study(self, folder: Path) -> Iterator[Study]:
        """The study of a folder, new or old, for this process alone.

        Trials that a killed process left unfinished are tried again.

        Raises:
            ConfigError: another process is at it, or the folder is of another search.
        """
        optuna = require("optuna", "to search for settings", "sweep")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "study.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"another process runs the search in {folder}") from error
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            study = optuna.create_study(
                study_name="lgmml",
                storage=f"sqlite:///{(folder / 'study.db').resolve()}",
                direction="maximize",
                pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
                load_if_exists=True,
            )
            known = study.user_attrs.get("search")
            described = {"fixed": sorted(self.fixed), "space": dict(sorted(self.space.items()))}
            if known is not None and known != described:
                raise ConfigError(f"{folder} belongs to a search with other settings ({known}); use another --folder")
            study.set_user_attr("search", described)
            # A seed of its own for every start, or the first draws would be repeated.
            study.sampler = optuna.samplers.TPESampler(seed=self.seed + len(study.trials), n_startup_trials=8)
            for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                study.enqueue_trial(trial.params)
            yield study

    def run(self, folder: Path, trials: int) -> Study:
        """Run trials until ``trials`` are finished or pruned, those of earlier calls included.

        Every trial has a folder of its own below ``folder``, with what any run leaves and ``trial.json``.
        """
        check_positive("trials", trials)
        with self.open_study(folder) as study:
            while len(_judged(study)) < trials:
                trial = study.ask(self.distributions())
                self._try(study, trial, folder / str(trial.number))
                header, rows = _study_rows(study)
                table = markdown_table(header, rows, text=len(header))
                write_text(folder / "study.md", f"# Search\n\n{table}\n\n{_ONCE}\n")
            found = _judged(study)
            values, curves = list(map(_value, found)), [trial.intermediate_values for trial in found]
            save_figure(search_picture(values, curves, [trial.params for trial in found]), folder / "study.png")
            return study

    def _try(self, study: Study, trial: Trial, folder: Path) -> None:
        """One run, and what the study is told of it."""
        from optuna import TrialPruned
        from optuna.trial import TrialState

        chosen = _assignments(trial.params)
        data = "generated"
        for word in reversed(self.fixed):
            if word.startswith("data="):
                data = word.partition("=")[2]
        words = [*self.fixed, *chosen, f"paths.output_dir={folder}", f"name={data}"]
        log.info("trial %d: %s", trial.number, ", ".join(chosen))
        try:
            result = train(load_config(words), words, watchers=[_Prune(trial)])
        except TrialPruned as error:
            study.tell(trial, state=TrialState.PRUNED)
            log.info("trial %d: stopped %s", trial.number, error)
        except DivergedError as error:
            study.tell(trial, state=TrialState.FAIL)
            log.warning("trial %d: %s", trial.number, error)
        else:
            if result is None or math.isnan(result.best_valid):
                raise ConfigError(
                    "a search needs validation queries with relevant documents to choose by; there are none"
                )
            study.tell(trial, result.best_valid)
        done = study.trials[trial.number]
        facts = {"number": done.number, "state": done.state.name.lower(), "validation ndcg@10": done.value,
                 "settings": done.params, "curve": done.intermediate_values}  # fmt: skip
        write_text(folder / "trial.json", json.dumps(facts, indent=2))


def _read_space(file: str | None, kind: str) -> tuple[dict[str, str], int]:
    """The space and the seed of a file; of the package's own file, the space for this kind of metrics."""
    path = file or config_dir() / "hparams_search" / "optuna.yaml"
    content = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, dict) or not isinstance(content.get("space", {}), dict):
        raise ConfigError(f"{path}: must hold `space`, with a distribution for each setting")
    space = content.get("space", {})
    if file is None:
        space = space.get(kind, {})
    return {str(key): str(value) for key, value in space.items()}, content.get("seed", 0)


def _assignments(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def _distribution(item: Override) -> BaseDistribution:
    require("optuna", "to search for settings", "sweep")
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value, key = item.value(), item.get_key_element()
    if isinstance(value, ChoiceSweep):
        return CategoricalDistribution(list(map(str, item.sweep_string_iterator())))
    if isinstance(value, RangeSweep) and value.start is not None and value.stop is not None:
        steps = math.ceil((value.stop - value.start) / value.step) - 1  # the end is left out, as Hydra does
        last = value.start + steps * value.step
        if steps >= 0 and isinstance(value.start, int) and isinstance(value.step, int):
            return IntDistribution(int(value.start), int(last), step=int(value.step))
        if steps >= 0:
            return FloatDistribution(float(value.start), float(last), step=float(value.step))
    if isinstance(value, IntervalSweep) and value.start is not None and value.end is not None:
        low, high, logarithmic = value.start, value.end, "log" in value.tags
        if low <= high and (low > 0 or not logarithmic):
            if isinstance(low, int) and isinstance(high, int):
                return IntDistribution(low, high, log=logarithmic)
            return FloatDistribution(low, high, log=logarithmic)
    raise ConfigError(f"`{key}` must be interval(a,b), tag(log,interval(a,b)), range(a,b) or choice(x,y), got {value}")


class _Prune(Callback):
    """Tells a trial the best that validation has seen so far, and stops it when earlier trials were better by then."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report an epoch."""
        from optuna import TrialPruned

        keeper = cast(KeepCheckpoints, trainer.checkpoint_callback)
        value = float(trainer.callback_metrics.get(keeper.monitor, math.nan))
        if trainer.sanity_checking or math.isnan(value):
            return
        # What the trial would be worth if it ended here; the keeper judges this epoch only after us.
        self.trial.report(max(value, *keeper.curve.values()), trainer.current_epoch + 1)
        if self.trial.should_prune():
            raise TrialPruned(f"after epoch {trainer.current_epoch + 1}")


def _judged(study: Study) -> list[FrozenTrial]:
    """The trials that were finished or pruned."""
    from optuna.trial import TrialState

    return study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])


def _study_rows(study: Study) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of trials: finished ones, best first, then the others."""
    names = set[str]()
    for trial in study.trials:
        names |= trial.params.keys()
    header = ["trial", "validation ndcg@10", "state", *sorted(names)]
    order = {"COMPLETE": 0, "PRUNED": 1}
    trials = sorted(study.trials, key=lambda t: (order.get(t.state.name, 2), -(t.value or 0.0), t.number))
    states = {"COMPLETE": "finished", "FAIL": "failed"}
    rows = []
    for trial in trials:
        value, state = "", states.get(trial.state.name, trial.state.name.lower())
        if not math.isnan(_value(trial)):
            value = f"{_value(trial):.4f}"
        row = [str(trial.number), value, state]
        for name in sorted(names):
            value = trial.params.get(name, "")
            row.append(f"{value:.4g}" if isinstance(value, float) else str(value))
        rows.append(row)
    return header, rows


def _value(trial: FrozenTrial) -> float:
    """What a finished trial reached, NaN for any other."""
    if trial.value is None or trial.state.name != "COMPLETE":
        return math.nan
    return trial.value
