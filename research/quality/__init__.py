"""How well unseen queries are ranked, beside linear models and boosted trees: ``python -m research.quality``."""
