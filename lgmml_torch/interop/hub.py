"""Models on the Hugging Face Hub, or in a folder laid out like one there: the model file and its card, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from lgmml_torch.checks import require
from lgmml_torch.evaluation.tables import model_card
from lgmml_torch.models.ranker import LGMML

hub = require("huggingface_hub", "to share models on the Hugging Face Hub", "hub")

FILE = "model.safetensors"


class HubModel(hub.ModelHubMixin):  # type: ignore[misc, name-defined]
    """A model that can be shared.

    ``HubModel(model).push_to_hub("me/ranker")`` there, ``HubModel.from_pretrained("me/ranker").model`` back. What is
    shared is the package's own model file, which holds tensors and primitives only, and a model card.

    Args:
        model: the model.
        report: of its training run, for the card, see `lgmml_torch.evaluation.tables.read_report`.
        licence: of the model, for the card.
    """

    def __init__(self, model: LGMML, *, report: Mapping[str, Any] | None = None, licence: str | None = None) -> None:
        self.model, self.report, self.licence = model, report, licence
        self._hub_mixin_config = None  # the model file describes itself: no second description beside it

    def generate_model_card(self, *args: Any, **facts: Any) -> Any:
        """The card that is written where there is none yet; ``name`` is its title."""
        return hub.ModelCard(model_card(self.model, report=self.report, licence=self.licence, **facts))

    def _save_pretrained(self, save_directory: Path) -> None:
        self.model.save(save_directory / FILE)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **where: Any) -> Self:
        """Read from a folder, or from the Hub by way of its cache."""
        folder = Path(model_id)
        if folder.is_dir():
            return cls(LGMML.load(folder / FILE))
        names = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        given = {name: where[name] for name in names if name in where}
        return cls(LGMML.load(hub.hf_hub_download(model_id, FILE, **given)))
