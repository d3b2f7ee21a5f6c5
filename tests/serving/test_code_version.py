"""Goal: one program has one name. Method: the name of this one, twice."""

from serving.code_version import code_version


def test_a_program_is_named_by_its_sources() -> None:
    name = code_version()
    assert len(name) == 12 and int(name, 16) and name == code_version.__wrapped__()
