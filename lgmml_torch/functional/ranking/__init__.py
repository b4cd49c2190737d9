"""Ranking measures over ragged lists: the rules behind a name, lists sorted by score, the measures."""
