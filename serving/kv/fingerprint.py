"""What must be equal for stored KV to be used: the weights, the model's code, and the bytes' form.

The *revision* of a checkpoint is a digest of all of its weights and of its configuration. Reading
them takes as long as reading the files; who knows that a directory holds a published revision may
name it instead.
"""

import hashlib
from pathlib import Path

import xxhash

_CHUNK_BYTES = 1 << 24
_KV_VERSION = "1"
"""To be changed with anything in the model's code that changes what is cached."""


def model_revision(directory: Path) -> str:
    """A digest of the configuration and of every byte of the weights.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        # Files are hundreds of gigabytes: a fast digest of each, and a strong one of those.
        content = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                content.update(chunk)
        digest.update(path.name.encode() + b"\0" + content.digest())
    return digest.hexdigest()


def kv_fingerprint(revision: str, description: str) -> bytes:
    """32 bytes; equal ones mean that KV bytes of one engine can be used by the other.

    Args:
        revision: of the model.
        description: of everything else, as the executor gives it.
    """
    digest = hashlib.sha256()
    for part in (_KV_VERSION, revision, description):
        digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return digest.digest()
