"""What names the program that runs: processes that work together have to run the same one."""

import hashlib
from functools import cache
from pathlib import Path

_PACKAGES = ("deepinfer_jax", "pallas_kernels", "serving", "sharding")
_DIGITS = 12


@cache
def code_version() -> str:
    """A digest of the sources of all packages, as they are installed."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_DIGITS]
