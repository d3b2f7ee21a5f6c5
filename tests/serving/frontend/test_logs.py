"""Goal: each line of the log is one JSON object that says what happened, to which request.

Method: records made and formatted by hand.
"""

import json
import logging
import sys

from serving.frontend.logs import CALLS, JsonFormatter


def test_lines_are_objects() -> None:
    record = logging.LogRecord("a.b", logging.ERROR, "f.py", 1, "it is %s\nnow", ("late",), None)
    record.fields = {"request_id": "r1"}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time") > 1e9
    assert found == {
        "level": "error",
        "logger": "a.b",
        "message": "it is late\nnow",
        "request_id": "r1",
    }


def test_exceptions_are_part_of_their_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "m", (), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line and "ValueError: broken" in json.loads(line)["exception"]


def test_calls_are_not_logged_unless_asked_for() -> None:
    assert not CALLS.isEnabledFor(logging.INFO)
