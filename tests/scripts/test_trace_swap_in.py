"""Goal: of a copy counts as hidden what a part of the step computed meanwhile, once. Method: events
by hand; a real trace is read in `tests/e2e/test_stored_tokens.py`.
"""

from scripts.read_trace import Operation
from scripts.trace_swap_in import Copy, hidden_share, overlaps


def operation(program: str, start_ns: float, end_ns: float) -> Operation:
    return Operation(program, "dot", 1, start_ns, end_ns - start_ns, end_ns)


def test_what_computes_during_a_copy_hides_it_once() -> None:
    operations = [
        operation("jit_prefill_8_64_part0", 0.0, 40.0),
        operation("jit_prefill_8_64_part0", 20.0, 60.0),
        operation("jit_prefill_8_64_part1", 90.0, 120.0),
        # A scatter is no part of the step.
        operation("jit__write_rows", 60.0, 100.0),
    ]
    copies = [Copy(0, 10.0, 100.0), Copy(1, 200.0, 50.0), Copy(2, 95.0, 10.0)]
    found = list(overlaps(copies, operations))
    assert found == [
        Copy(0, 10.0, 100.0, 50.0 + 20.0, (0, 1)),
        Copy(1, 200.0, 50.0),
        Copy(2, 95.0, 10.0, 10.0, (1,)),
    ]
    assert hidden_share(found) == 80.0 / 160.0
