"""Speed, memory and quality, side by side with peers: `python -m benchmarks.<name>`."""
