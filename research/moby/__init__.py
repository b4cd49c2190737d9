"""A large ranking set: which words does a thesaurus list for this word? ``python -m research.moby``."""
