"""How well a model ranks: metrics that accumulate, evaluations with their definitions and counts, tables."""
