"""Learning to rank with localized geometric-mean metrics."""

__version__ = "0.1.0"
