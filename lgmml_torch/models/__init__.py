"""`nn.Module`s whose buffers hold all that is needed to score raw features."""
