"""Prompts of the engine's tests."""

from tests.serving.engine.simulated_device import VOCAB_SIZE


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """All tokens of the vocabulary in one order, again and again; another salt begins elsewhere."""
    return [(i * 5 + salt * 3 + 1) % VOCAB_SIZE for i in range(length)]
