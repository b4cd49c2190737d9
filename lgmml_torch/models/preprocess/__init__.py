"""Preprocessing whose fitted state travels with the model: the interface, the steps, and how they compose."""
