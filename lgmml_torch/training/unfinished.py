"""How far the fit of a bank has come, kept on disk: a run that was killed goes on from there when it is run again."""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

from lgmml_torch import distributed
from lgmml_torch.checks import CheckpointError, DataWarning
from lgmml_torch.fitting.bank import Bank, BankBuilder
from lgmml_torch.functional.ranking.custom import Measure
from lgmml_torch.models.storage import load_archive, tensors_digest, write_checkpoint
from lgmml_torch.ragged import RankingData

log = logging.getLogger(__name__)

SECONDS = 10.0  # between two writings; a state is a few hundred kB


class Unfinished:
    """The state of one fit, found again by the builder with its settings, the seed and the very data.

    Args:
        folder: of all such states; None keeps nothing.
        builder: builds the bank; only those that can go on from a state are kept.
        data: preprocessed training lists.
        valid: and validation lists.
        seed: of the fit.
        start: the bank it goes on from.
        measure: what decides when it stops, where it is not the usual one.
    """

    def __init__(
        self,
        folder: Path | None,
        builder: BankBuilder,
        data: RankingData,
        valid: RankingData | None,
        seed: int,
        start: Bank | None = None,
        measure: Measure | None = None,
    ) -> None:
        self.builder = builder
        self._written = time.monotonic()
        self.path: Path | None = None
        if folder is not None and builder.resumes:
            parts = [data] if valid is None else [data, valid]
            held = [x for part in parts for x in (*part.of_documents(lambda x: x).values(), part.query_weights)]
            tensors = [*(part.offsets for part in parts), *(x for x in held if x is not None)]
            text = f"{builder} {measure and measure.name} {seed} {distributed.place()[1]} {tensors_digest(tensors)}"
            text += "" if start is None else f" {start.digest}"
            name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            self.path = folder / f"{distributed.agreed(name)}.bank"

    def found(self) -> dict[str, Any]:
        """What to call the builder with to go on, where an earlier run has left something."""
        if self.path is None:
            return {}
        # What the first process has counts: another machine may have an older one.
        content = distributed.agreed(self.path.read_bytes() if self.path.is_file() else None)
        if content is None:
            return {}
        try:
            kept = load_archive(io.BytesIO(content), self.path.name)
            if kept["fit"] != self.path.stem:
                raise CheckpointError("it is of another fit")
            state = self.builder.load_state(kept["state"])
        except (CheckpointError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:100]
            warnings.warn(f"{self.path} is damaged ({reason}); the fit begins anew", DataWarning, stacklevel=2)
            return {}
        log.info("the fit of local metrics goes on after round %d of an earlier run", state.round)
        return {"resume": state}

    def keep(self, info: Any) -> None:
        """Write the state, if the last one is some seconds old; of several processes only the first does."""
        if self.path is None or distributed.place()[0] or time.monotonic() - self._written < SECONDS:
            return
        write_checkpoint(self.path, {"fit": self.path.stem, "state": info.state.export()})
        self._written = time.monotonic()

    def done(self) -> None:
        """The bank is there: nothing is left to go on with."""
        if self.path is not None and distributed.place()[0] == 0:
            self.path.unlink(missing_ok=True)
