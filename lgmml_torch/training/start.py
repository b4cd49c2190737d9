"""An earlier model to go on from: its preprocessing, its metrics with their Φ, and the way it reads categories."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.models.encode import CategoryEncoder, CategorySettings, encode_splits
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData


@dataclass(frozen=True)
class Start:
    """What of a model another fit goes on from; copies, so that the model stays as it is.

    Attributes:
        preprocess: fitted.
        bank: the metrics and, as Φ₀, the mean of the model's weights.
        encoder: what makes numbers of categories, where there are any.
        feature_names: of the features after that, where they have names.
        shared: whether Φ₀ is all there is to the model's weights.
        based: whether the model adds its scores to those of trees.
    """

    preprocess: Preprocess
    bank: Bank
    encoder: CategoryEncoder | None
    feature_names: tuple[str, ...] | None
    shared: bool
    based: bool

    @classmethod
    def of(cls, model: LGMML, *, trained: bool = False) -> Start:
        """The parts of a model; with ``trained``, gradients go on from its metrics."""
        rows = model.phi.table.weight.detach()
        phi = rows.mean(0) if len(rows) else rows.new_ones(rows.shape[1])  # a file may be without the rows of queries
        bank = Bank(deepcopy(model.metrics), model.kernel, phi, trained=trained)
        shared = model.phi.mode == "shared" and not model.phi.deviations
        return cls(deepcopy(model.preprocess), bank, model.encoder, model.feature_names, shared, model.base is not None)

    @property
    def kind(self) -> str:
        """Of the metrics: trained ones look at all features through factors of low rank, others can be boosted."""
        blocks = list(self.bank.metrics.iter_blocks())
        low_rank = all(block.is_full and block.factors.shape[2] < block.factors.shape[1] for block in blocks)
        return "trained" if low_rank else "boosted"

    def check_growing(self) -> None:
        """Require a model whose scores for new queries metrics can be added to.

        Raises:
            LGMMLError: it has weights for single queries, or trees.
        """
        if not self.shared:
            raise LGMMLError("the model to add rounds to must have weights Φ shared by all queries, got others")
        if self.based:
            raise LGMMLError("the model to add rounds to must stand alone, got one that adds to a tree model")

    def read(self, splits: Mapping[str, RankingData], settings: CategorySettings) -> dict[str, RankingData]:
        """All parts as the model reads them.

        Raises:
            ConfigError: they have other features, or the same in another order.
        """
        found, encoder = encode_splits(splits, settings, self.encoder)
        train, width = found["train"], self.preprocess.num_features_in
        if train.num_features != width or encoder is not self.encoder:
            raise ConfigError(f"the model to start from has {width} features, the data has {train.num_features}")
        names = train.feature_names
        if names is None:  # what the model calls them
            return {name: part.replace(feature_names=self.feature_names) for name, part in found.items()}
        if self.feature_names is not None and names != self.feature_names:
            mine, theirs = set(names), set(self.feature_names)
            how = f"unknown {sorted(mine - theirs)[:3]}" if mine != theirs else "the same names in another order"
            raise ConfigError(f"the data must have the features of the model to start from, in their order, got {how}")
        return found
