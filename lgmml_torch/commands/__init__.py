"""The commands of ``lgmml``: each module has a ``run`` that takes the parsed arguments."""
