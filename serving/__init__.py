"""Requests, KV storage and services around the model. May import deepinfer_jax and sharding.

`from serving import LLM, SamplingParams` is the offline interface. Both are looked up when asked
for, so importing a pure module of this package pulls in nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.core.request import SamplingParams
    from serving.offline import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == "LLM":
        from serving.offline import LLM

        return LLM
    if name == "SamplingParams":
        from serving.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
