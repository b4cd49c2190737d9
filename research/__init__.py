"""The laboratory beside the package: experiments of the paper, quality and speed beside other rankers."""
