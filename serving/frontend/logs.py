"""Logs as JSON, one object a line. Texts of prompts and answers are never part of them."""

import logging
from typing import Any

import msgspec

CALLS = logging.getLogger("serving.calls")
"""One line for each call that has ended, with what `usage` records of it."""


class JsonFormatter(logging.Formatter):
    """Writes a record with its time (seconds since 1970), level, logger, message and `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up(form: str) -> None:
    """Sends warnings of the whole process to stderr, as `text` or `json`.

    As JSON, calls that have ended are logged too.
    """
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter())
        CALLS.setLevel(logging.INFO)
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
