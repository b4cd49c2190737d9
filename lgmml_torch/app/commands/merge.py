"""``lgmml merge``: one model from several."""

from __future__ import annotations

import sys
from argparse import Namespace

import torch

from lgmml_torch.app.commands.common import load_model, open_data
from lgmml_torch.models.combine import combination_weights, merge_models
from lgmml_torch.models.ranker import LGMML


def run(args: Namespace) -> None:
    """Weigh the models by the labelled lists and write their sum."""
    names = [args.model, *args.others]
    models = [load_model(args)]
    models += [LGMML.load(name).to(models[0].device) for name in args.others]
    merge_models(models, [1.0] * len(models))  # what does not go together is told before the lists are read
    with open_data(args, models[0]) as lists:
        data = lists.read(labelled=True)
    scores = torch.stack([model.score(data, documents_at_once=args.batch_documents) for model in models])
    weights = combination_weights(scores, data.labels, data.offsets, tie_order=data.order).tolist()
    merge_models(models, weights).save(args.output)
    for name, weight in zip(names, weights, strict=True):
        sys.stdout.write(f"{weight:10.6g}  {name}\n")
