"""The commands of ``lgmml``, a file each: ``run`` takes the parsed arguments."""
