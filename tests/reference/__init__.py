"""Naive, obviously right versions of the fast functions: the oracles of the tests."""
