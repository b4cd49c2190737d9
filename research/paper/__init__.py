"""One file per table or figure of the paper: ``python -m research.paper``."""
