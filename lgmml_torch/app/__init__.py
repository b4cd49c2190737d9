"""Programs around the library: the command line, the training run and its configuration."""
