"""From files and arrays to ragged tensors, and the data sets the project knows."""
