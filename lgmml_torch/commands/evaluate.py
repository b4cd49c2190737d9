"""``lgmml evaluate``: ranking metrics with their definitions and counts."""

from __future__ import annotations

import sys
from argparse import Namespace

from lgmml_torch.checks import DataError
from lgmml_torch.commands.common import load_model, open_data, output
from lgmml_torch.reports import evaluate, print_evaluations


def run(args: Namespace) -> None:
    """Print the table, or the figures as JSON."""
    model = load_model(args)
    with open_data(args, model) as lists:
        if not lists.has_labels:
            raise DataError(f"{lists.name}: there are no labels to evaluate against")
        found = evaluate(
            model,
            (batch.data for batch in lists.batches(args.batch_documents)),
            split=lists.name,
            metrics=[name.strip() for name in args.metrics.split(",") if name.strip()],
            preset=args.preset,
            known_queries=args.known_queries,
            policy=args.policy,
            threshold=args.threshold,
            max_grade=args.max_grade,
            documents_at_once=args.batch_documents,
        )
    if args.json == "-":
        sys.stdout.write(found.to_json() + "\n")
        return
    if args.json is not None:
        with output(args.json) as stream:
            stream.write(found.to_json().encode() + b"\n")
    print_evaluations([found])
