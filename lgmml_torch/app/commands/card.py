"""``lgmml card``: a model card for a model file."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from lgmml_torch.app.commands.common import output
from lgmml_torch.evaluation.card import model_card, read_report
from lgmml_torch.models.ranker import LGMML


def run(args: Namespace) -> None:
    """Write the card; figures and settings come from the report of the training run."""
    file = Path(args.model)
    model = LGMML.load(file)
    beside = file.parent / "report.json"
    report = read_report(Path(args.report)) if args.report else read_report(beside) if beside.is_file() else None
    text = model_card(model, report=report, name=args.name or file.stem, licence=args.license)
    with output(args.output) as stream:
        stream.write(text.encode())
