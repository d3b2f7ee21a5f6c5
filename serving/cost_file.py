"""The cost of steps as a TOML file, which `scripts/fit_cost.py` writes and which the serving
configuration (`engine.cost_file`) and the simulator (`--costs`) read.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from serving.core.cost import DecodeCost, PrefillCost
from sharding.config_file import check, load


@dataclass(frozen=True, slots=True)
class PrefillTerms:
    """The terms of `core.cost.PrefillCost`, in milliseconds."""

    base_ms: float
    token_ms: float
    pair_ms: float

    def __post_init__(self) -> None:
        _check_terms(asdict(self))


@dataclass(frozen=True, slots=True)
class DecodeTerms:
    """The terms of `core.cost.DecodeCost`, in milliseconds."""

    base_ms: float
    row_ms: float
    context_ms: float

    def __post_init__(self) -> None:
        _check_terms(asdict(self))


@dataclass(frozen=True, slots=True)
class CostFile:
    """What steps of both kinds cost."""

    prefill: PrefillTerms
    decode: DecodeTerms

    @property
    def prefill_cost(self) -> PrefillCost:
        """The model that schedulers and balancers go by."""
        return PrefillCost(**asdict(self.prefill))

    def changes(self) -> tuple[str, ...]:
        """The changes to a fleet file that give it these costs."""
        tables = asdict(self).items()
        return tuple(f"{name}.{key}={value!r}" for name, t in tables for key, value in t.items())


def read_cost_file(path: Path) -> CostFile:
    """The costs in a file.

    Raises:
        ConfigError: it cannot be read, or does not hold all terms.
    """
    return load(path, CostFile)


def write_cost_file(path: Path, prefill: PrefillCost, decode: DecodeCost, source: str) -> None:
    """Write costs, with a line that says where they come from. Raises OSError."""
    lines = [f"# {source}"]
    for name, cost in (("prefill", prefill), ("decode", decode)):
        lines += ["", f"[{name}]", *(f"{key} = {value!r}" for key, value in asdict(cost).items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _check_terms(terms: dict[str, float]) -> None:
    for name, value in terms.items():
        check(0 <= value < float("inf"), name, value, "a time of 0 or more")
    first = next(iter(terms))
    check(any(terms.values()), first, 0, "one term above 0")
