"""Expert placement on generated loads: the load sets, a baseline, and the scoring of policies."""
