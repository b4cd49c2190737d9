"""Time and memory, side by side with peers: ``python -m research.speed.<name>``."""
