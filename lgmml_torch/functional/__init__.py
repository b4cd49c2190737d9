"""Pure torch functions: tensors in, tensors out; no I/O, no state, explicit `torch.Generator`."""
