"""The Lightning side: the module that trains Φ, and its callbacks."""
