"""Goal: whatever changes what is cached changes the fingerprint. Method: a small checkpoint with
one byte changed, renamed files, and other descriptions.
"""

from pathlib import Path

from serving.kv.fingerprint import kv_fingerprint, model_revision


def checkpoint(path: Path, **files: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_bytes(files.get("config", b"{}"))
    (path / "a.safetensors").write_bytes(files.get("a", bytes(1000)))
    (path / files.get("name", b"b.safetensors").decode()).write_bytes(b"b")
    (path / "tokenizer.json").write_bytes(files.get("tokenizer", b"{}"))
    return path


def test_revisions_tell_weights_apart(tmp_path: Path) -> None:
    changed = bytearray(1000)
    changed[777] = 1
    revisions = [
        model_revision(checkpoint(tmp_path / str(index), **files))
        for index, files in enumerate(
            [
                {},
                {"config": b"{ }"},
                {"a": bytes(changed)},
                {"a": bytes(1001)},
                {"name": b"c.safetensors"},
            ]
        )
    ]
    assert len(set(revisions)) == len(revisions)
    # Where it lies, and what does not touch the cache, does not matter.
    assert model_revision(checkpoint(tmp_path / "x", tokenizer=b"[]")) == revisions[0]


def test_fingerprints_tell_revisions_and_descriptions_apart() -> None:
    assert len({kv_fingerprint(*parts) for parts in [("a", "b"), ("ab", ""), ("", "ab")]}) == 3
    assert len(kv_fingerprint("a", "b")) == 32
