"""Lightning's loggers with small changes, and what each of them can show beyond numbers.

Training writes to a logger through a `LoggerOutput`: figures, histograms, files, settings with the final results. It
leaves out what its logger cannot show. A logger of another kind needs an entry in `LOGGER_OUTPUTS`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.logger import rank_zero_experiment
from pytorch_lightning.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from lgmml_torch.checks import require

log = logging.getLogger(__name__)


class _WithoutEpoch:
    """Lightning adds the number of the epoch to everything it logs; the step says as much."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers at a step."""
        kept = dict(metrics)
        kept.pop("epoch", None)
        super().log_metrics(kept, step)  # type: ignore[misc]


class TensorBoard(_WithoutEpoch, TensorBoardLogger):
    """TensorBoard without the number of the epoch; training continues if events cannot be written."""

    _failed = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """TensorBoard's writer; an object that does nothing where no file can be made."""
        if self._experiment is None and not self._failed:
            try:
                writer: Any = super().experiment
                writer.file_writer.event_writer = _SafeEvents(writer.file_writer.event_writer, self._fail)
            except OSError as error:
                self._fail(error)
        if self._experiment is None:
            return DummyLogger().experiment
        return self._experiment

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Log the settings of the run."""
        writer = self.experiment
        if writer is self._experiment:
            super().log_hyperparams(*args, **kwargs)

    @rank_zero_only
    def save(self) -> None:
        """Write the settings beside the events."""
        try:
            super().save()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            reason = error.strerror or error
            log.warning("Could not write TensorBoard events (%s); training continues without them.", reason)
        self._failed = True


class _SafeEvents:
    """An event writer of TensorBoard that reports an `OSError` instead of raising it."""

    def __init__(self, writer: Any, fail: Callable[[OSError], None]) -> None:
        self._writer, self._fail = writer, fail

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._writer, name)

        def attempt(*args: Any) -> Any:
            try:
                return method(*args)
            except OSError as error:
                self._fail(error)

        return attempt


class Wandb(_WithoutEpoch, WandbLogger):
    """Weights & Biases (the extra ``wandb``), without the number of the epoch; ``offline`` writes to ``save_dir``."""

    def __init__(self, **settings: Any) -> None:
        require("wandb", "for logger=wandb", "wandb")
        Path(settings.get("save_dir", ".")).mkdir(parents=True, exist_ok=True)  # or it goes to a temporary folder
        super().__init__(**settings)

    def finalize(self, status: str) -> None:
        """Finish a failed run; `close` finishes a run that went well, after its outcome is logged."""
        super().finalize(status)
        if status == "failed":
            self.experiment.finish(exit_code=1)


class MLflow(_WithoutEpoch, MLFlowLogger):
    """MLflow (the extra ``mlflow``): a database and files in the folder ``store``, unless there is a server."""

    def __init__(self, *, tracking_uri: str | None = None, store: str = "outputs/mlflow", **settings: Any) -> None:
        require("mlflow", "for logger=mlflow", "mlflow")
        if tracking_uri is None:
            folder = Path(store).resolve()  # MLflow makes it
            tracking_uri = f"sqlite:///{folder}/runs.db"
            settings["artifact_location"] = (folder / "files").as_uri()
        super().__init__(tracking_uri=tracking_uri, **settings)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Numbers at a step; MLflow has no ``@`` in names: ``val/ndcg_at_10``."""
        super().log_metrics({_plain_name(name): value for name, value in metrics.items()}, step)


def _plain_name(name: str) -> str:
    """A name of letters, digits and ``_ - . / `` only.

    >>> _plain_name("val/ndcg@10"), _plain_name("final/test, α/map")
    ('val/ndcg_at_10', 'final/test_ _/map')
    """
    return re.sub(r"[^a-zA-Z0-9_/. -]+", "_", name.replace("@", "_at_"))


class LoggerOutput:
    """A logger that takes numbers and settings, and nothing else: CSV, or one that is not known here."""

    shows_pictures = False

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    @staticmethod
    def of(logger: Logger) -> LoggerOutput:
        """The output of a logger."""
        for kind, output in LOGGER_OUTPUTS.items():
            if isinstance(logger, kind):
                return output(logger)
        return LoggerOutput(logger)

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Show a figure of matplotlib."""

    def histogram(self, tag: str, values: Tensor, step: int) -> None:
        """Show how values are distributed."""

    def outcome(self, settings: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """The settings of a run with what came of it, to compare runs by."""
        self.logger.log_hyperparams(dict(settings))
        self.logger.log_metrics(dict(figures), step=0)

    def attach(self, files: Sequence[Path]) -> None:
        """Keep files with the run."""

    def close(self) -> None:
        """The run is over."""
        self.logger.save()


class _TensorBoardOutput(LoggerOutput):
    """Pictures, histograms, and reports as text."""

    shows_pictures = True

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """In the images tab."""
        self.logger.experiment.add_figure(tag, figure, step)

    def histogram(self, tag: str, values: Tensor, step: int) -> None:
        """In the histograms and distributions tabs."""
        self.logger.experiment.add_histogram(tag, values, step)

    def outcome(self, settings: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """In the hparams tab, both as columns: as metrics, each figure would be a curve of one point."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        writer = self.logger.experiment
        if isinstance(writer, SummaryWriter) and writer.file_writer is not None:
            for summary in hparams({**settings, **figures}, {}):
                writer.file_writer.add_summary(summary)

    def attach(self, files: Sequence[Path]) -> None:
        """Markdown is shown in the text tab; there is no place for other files."""
        for file in files:
            if file.suffix == ".md":
                self.logger.experiment.add_text(file.stem, file.read_text(encoding="utf-8"))


class _WandbOutput(LoggerOutput):
    """Pictures and files."""

    shows_pictures = True

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Beside the curves."""
        import wandb

        self.logger.log_image(tag, [wandb.Image(figure)], step=step)

    def outcome(self, settings: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """In the table of runs."""
        self.logger.log_hyperparams(dict(settings))
        self.logger.experiment.summary.update(dict(figures))

    def attach(self, files: Sequence[Path]) -> None:
        """In the run's files."""
        for file in files:
            self.logger.experiment.save(str(file), base_path=str(file.parent), policy="now")

    def close(self) -> None:
        """Finish, so that the next run of this process is one of its own."""
        self.logger.experiment.finish()


class _MLflowOutput(LoggerOutput):
    """Pictures and files."""

    shows_pictures = True

    def picture(self, tag: str, figure: Any, step: int) -> None:
        """Among the files of the run."""
        self.logger.experiment.log_figure(self.logger.run_id, figure, f"{tag}-{step:06d}.png")

    def attach(self, files: Sequence[Path]) -> None:
        """Among the files of the run."""
        for file in files:
            self.logger.experiment.log_artifact(self.logger.run_id, str(file))

    def close(self) -> None:
        """Mark the run as finished."""
        self.logger.finalize("success")


LOGGER_OUTPUTS: dict[type[Logger], type[LoggerOutput]] = {
    TensorBoardLogger: _TensorBoardOutput,
    WandbLogger: _WandbOutput,
    MLFlowLogger: _MLflowOutput,
}
