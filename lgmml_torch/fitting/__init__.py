"""Ways to build a bank of local metrics from training data."""
