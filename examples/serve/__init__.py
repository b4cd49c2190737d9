"""A server for rankers, and a load test for it."""
