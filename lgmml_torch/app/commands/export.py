"""``lgmml export``: the model as a file for other programs, compared with the model itself."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import torch

from lgmml_torch.app.commands.common import load_model, open_data
from lgmml_torch.checks import LGMMLError
from lgmml_torch.models.export import EXPORTERS, compare_exported
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

LENGTHS = (1, 2, 3, 10, 30, 100, 300, 1000)  # of the lists to compare on
LARGEST = 1e-3  # difference, as a share of the largest score, that rounding may explain


def run(args: Namespace) -> None:
    """Write the file, score lists with both, and say how far they are apart."""
    output = Path(args.output)
    if output.suffix not in EXPORTERS:
        raise LGMMLError(f"`FILE` must end in {' or '.join(EXPORTERS)}, got {output}")
    if args.known_queries:
        raise LGMMLError("`known-queries` must not be given: an exported file knows lists, and no queries by their id")
    model = load_model(args).cpu()
    data = lists(args, model)
    EXPORTERS[output.suffix](model, output, policy=args.policy, batch=args.batch)
    found = compare_exported(output, model, data, policy=args.policy, batch=args.batch)
    told = f"largest difference {found.largest:.3g} of scores up to {found.size:.3g}"
    if not found.largest <= LARGEST * max(found.size, 1.0):
        output.unlink()
        raise LGMMLError(f"{output} was removed, because {found.engine} gives other scores than the model: {told}")
    given = "features and offsets of lists" if args.batch else "features of one list"
    sys.stdout.write(
        f"{output}: {given} in, scores out; {output.stat().st_size / 1024:.1f} KiB\n"
        f"compared with the model on {found.lists:,} lists, {found.documents:,} documents: {told} ({found.engine})\n"
    )


def lists(args: Namespace, model: LGMML) -> RankingData:
    """Those to compare on: of the data where it is given, else of random numbers, in all lengths."""
    if args.data is not None:
        with open_data(args, model) as source:
            return source.read()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(sum(LENGTHS), model.num_features, generator=generator)
    return RankingData.from_arrays(
        features, torch.zeros(len(features)), group=LENGTHS, feature_names=model.feature_names
    )
