"""Campaigns against the package (crash, fuzz, soak, mutants), its supply chain, and measures of its code."""
