"""Goal: whatever happens to a server, each call that it accepted has exactly one usage record, and
no more tokens are billed than were delivered, give or take a second of them.

Method: a server process around a scripted executor is killed in the middle of streams; the next
server on the same database is asked for its records.
"""

import json
import threading
from pathlib import Path

import httpx
import pytest

from serving.frontend.usage import UsageRecord, read_records
from tests.serving.frontend.alphabet import wait_for
from tests.serving.test_main import Server

NUM_STREAMS = 4


class Stream(threading.Thread):
    """One streamed call: its name and the text that has come."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__()
        self.name_of_call = ""
        self.text = ""
        self.was_cut = False
        self._url = url
        self._max_tokens = max_tokens
        self.start()

    def run(self) -> None:
        body = {"model": "tiny-v41", "prompt": "x", "max_tokens": self._max_tokens, "stream": True}
        try:
            with httpx.stream("POST", f"{self._url}/completions", json=body, timeout=60) as answer:
                self.name_of_call = answer.headers["x-request-id"]
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        self.text += chunk["choices"][0]["text"]
        except httpx.HTTPError:
            self.was_cut = True


def by_call(database: Path) -> dict[str, list[UsageRecord]]:
    found: dict[str, list[UsageRecord]] = {}
    for record in read_records(database):
        found.setdefault(record.request_id, []).append(record)
    return found


@pytest.mark.timeout(240)
def test_a_killed_server_leaves_one_record_of_each_call(tmp_path: Path) -> None:
    database = tmp_path / "db"
    settings = ("--set", f"server.database={database}")
    with Server(*settings) as server:
        whole = Stream(server.url, 5)
        whole.join(60)
        cut = [Stream(server.url, 2000) for _ in range(NUM_STREAMS)]
        # Longer than the time between two notes of what was delivered.
        wait_for(lambda: all(len(stream.text) > 60 for stream in cut), "streams")
        server.process.kill()
        for stream in cut:
            stream.join(60)
    assert all(stream.was_cut for stream in cut)
    with Server(*settings) as server:
        again = Stream(server.url, 5)
        again.join(60)
    found = by_call(database)
    names = [stream.name_of_call for stream in (whole, again, *cut)]
    assert sorted(found) == sorted(names) and all(len(records) == 1 for records in found.values())
    assert [found[s.name_of_call][0].finish_reason for s in (whole, again)] == ["length", "length"]
    for stream in cut:
        (record,) = found[stream.name_of_call]
        assert record.finish_reason == "crash"
        assert 0 < record.num_generated_tokens <= len(stream.text) + 1, "each token is a letter"
