"""How Lightning's checkpoints get to the disk and back: atomically, sealed, tensors and primitives only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO

from lgmml_torch.checks import CheckpointError
from lgmml_torch.models.storage import load_checkpoint, write_checkpoint


class CheckpointFiles(CheckpointIO):
    """Writes beside the place and renames; reads without running anything, and only what is whole."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write one; the earlier one of that name survives any failure.

        Raises:
            NoSpaceError: the disk is full.
        """
        write_checkpoint(path, checkpoint)

    def load_checkpoint(self, path: str | os.PathLike[str], *_: Any, **__: Any) -> dict[str, Any]:
        """Read one, into main memory.

        Raises:
            CheckpointError: it is missing, foreign, damaged or newer than this release.
        """
        content = load_checkpoint(path)
        if "rows" in content:
            raise CheckpointError(f"{path} keeps rows of Φ in other files, which only release 0.2 reads; train again")
        return content

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove one."""
        Path(path).unlink(missing_ok=True)
