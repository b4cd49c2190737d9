"""Boosted local metrics: what is chosen so far, one round of the search, and the fit around it."""
