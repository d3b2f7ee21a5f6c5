"""The parts of `scripts/bench_kv.py`, one module each."""
