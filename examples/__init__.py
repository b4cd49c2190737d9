"""Examples of using the package from other programs."""
