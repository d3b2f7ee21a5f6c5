"""What end-to-end tests share: a model that is loaded once, because compiling it is slow."""

from pathlib import Path

import pytest

from serving import LLM

# As small as what the server of these tests runs.
_OPTIONS = {
    "engine.max_context": 1024,
    "engine.num_blocks": 65,
    "engine.prefill_tokens": [64],
    "engine.decode_rows": [8],
}


@pytest.fixture(scope="session")
def llm(golden: Path) -> LLM:
    """The golden checkpoint with an unquantised cache, in this process."""
    return LLM(golden / "tiny-v41", cache_format="noq", options=_OPTIONS)
