"""Goal: a client of a cluster gets its tokens, each of them once and in order, whatever happens to
the processes behind it; or one clear error in time; and nothing of it stays anywhere.

Method: one supervised cluster of real processes for all tests: router, two prefill, two decode and
two vision workers, around simulated devices, which notice wrong blocks, states and features. After
each test all nodes must be there again and hold nothing, and every call that was accepted must have
one usage record of the tokens that its client got. Clients stream over HTTP.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import NODES, VISION_NODES, Asking, Cluster, Stream, wait_for
from tests.serving.span_receiver import Receiver, attributes, span_receiver


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with span_receiver() as server:
        yield server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Cluster]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), port, receiver.url)
    try:
        yield cluster
    finally:
        assert cluster.stop() == 0, cluster.text()


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    yield running
    running.settle()
    running.check_usage()


def test_streams_have_the_tokens_of_a_single_worker(cluster: Cluster) -> None:
    streams = [Stream(cluster, length, salt) for salt, length in enumerate((1, 40, 129, 500))]
    for stream in streams:
        stream.check()
    again = Stream(cluster, 500, 3)
    again.check()
    assert sum(num_given(cluster, name) for name in NODES[:2]) >= 5


def test_spans_of_all_processes_are_in_the_trace_of_the_client(
    cluster: Cluster, receiver: Receiver
) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    Stream(cluster, 200, max_tokens=20, headers=headers).check()
    Stream(cluster, 200, max_tokens=20).check()
    wanted = {
        ("frontend", "admission"),
        ("router", "queue"),
        ("router", "attempt"),
        ("prefill", "fetch"),
        ("prefill", "queue"),
        ("prefill", "prefill"),
        ("prefill", "hand-off"),
        ("decode", "hand-off"),
        ("decode", "decode"),
    }
    wait_for(lambda: len(receiver.spans) > len(wanted), "spans")
    (call,) = receiver.named("POST /v1/completions")
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (trace, parent)
    inside = receiver.children(call)
    assert len(inside) == len(receiver.spans) - 1, "only the call that asked for it is traced"
    assert all(span.trace_id == call.trace_id and not span.status.code for span in inside)
    nodes = [attributes(span).get("deepinfer.node", "frontend") for span in inside]
    found = [(node.split("/")[0], span.name) for node, span in zip(nodes, inside, strict=True)]
    assert len(found) == len(wanted) and set(found) == wanted
    # One process each, on one machine's clock.
    processes = {resource["service.instance.id"] for resource in receiver.resources}
    assert processes == {node for node in nodes if node != "frontend"}
    for span in inside:
        assert call.start_time_unix_nano - 10**9 < span.start_time_unix_nano
        assert span.end_time_unix_nano < call.end_time_unix_nano + 10**9


def test_more_requests_than_room(cluster: Cluster) -> None:
    """Room for two at each of two decode workers."""
    streams = [Stream(cluster, 10 + n, n, max_tokens=5) for n in range(64)]
    for stream in streams:
        stream.check()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_workers_lost_in_the_middle(cluster: Cluster, number: int) -> None:
    streams = [Stream(cluster, 50, salt, max_tokens=150) for salt in range(4)]
    for stream in streams:
        stream.wait_for_text()
    pid = cluster.signal("decode/d0", number)
    for stream in streams:
        stream.check()
    if number == signal.SIGSTOP:
        # It finds out that its life as a member is over.
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: cluster.node("decode/d0").get("pid") == pid, "the same process")
    else:
        wait_for(lambda: cluster.node("decode/d0").get("pid", pid) != pid, "another process")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_prefill_workers_lost_while_they_compute(cluster: Cluster, number: int) -> None:
    # Prompts that nobody has computed yet.
    streams = [Stream(cluster, 900, 10 * number + salt, max_tokens=20) for salt in range(4)]
    wait_for(lambda: cluster.overview()["requests"].get("prefilling", 0) >= 2, "prefill")
    pid = cluster.signal("prefill/p1", number)
    for stream in streams:
        stream.check()
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)


def test_prefill_workers_lost_after_they_have_handed_over(cluster: Cluster) -> None:
    stream = Stream(cluster, 60, max_tokens=120)
    stream.wait_for_text()
    before = cluster.overview()["num_restarted"]
    for name in NODES[:2]:
        cluster.signal(name, signal.SIGKILL)
    stream.check()
    assert cluster.overview()["num_restarted"] == before


def test_prefill_workers_lost_while_contexts_are_on_their_way(cluster: Cluster) -> None:
    before = cluster.overview()["num_restarted"]
    for name in ("p0", "p1"):
        # Longer than is waited for them, so that there is always one on its way.
        cluster.slow_down(name, 30.0)
    try:
        streams = [Stream(cluster, 200, 800 + salt, max_tokens=20) for salt in range(2)]
        wait_for(lambda: cluster.overview()["requests"].get("pulling", 0), "a transfer")
        for name in NODES[:2]:
            cluster.signal(name, signal.SIGKILL)
    finally:
        for name in ("p0", "p1"):
            cluster.slow_down(name, 0)
    for stream in streams:
        stream.check()
    assert cluster.overview()["num_restarted"] > before


@pytest.mark.parametrize("seconds", [0.7, 30.0])
def test_slow_links(cluster: Cluster, seconds: float) -> None:
    """One that is slow is waited for; what comes too late, another worker computes again."""
    before = cluster.overview()["num_restarted"]
    cluster.slow_down("p0", seconds)
    try:
        salts = range(round(1000 + seconds), round(1003 + seconds))
        streams = [Stream(cluster, 150, salt, max_tokens=20) for salt in salts]
        for stream in streams:
            stream.check()
        if seconds > 3:
            assert cluster.overview()["num_restarted"] > before
    finally:
        cluster.slow_down("p0", 0)


def test_nodes_that_had_nothing_to_do_for_long(cluster: Cluster) -> None:
    before = cluster.settle()
    begin = time.monotonic()
    # Longer than a silent worker is kept, and than a context is held.
    wait_for(lambda: time.monotonic() > begin + 4.5, "time passes")
    Stream(cluster, 100, 900).check()
    after = cluster.overview()
    assert [n["pid"] for n in after["nodes"]] == [n["pid"] for n in before["nodes"]]


def test_nodes_of_the_tiers_lost_in_the_middle(cluster: Cluster) -> None:
    streams = [Stream(cluster, 300, 500 + salt, max_tokens=100) for salt in range(2)]
    for stream in streams:
        stream.wait_for_text()
    names = ("metadata/m0", "storage/s1")
    old = {name: cluster.signal(name, signal.SIGKILL) for name in names}
    for stream in streams:
        stream.check()
    for name, pid in old.items():
        wait_for(lambda name=name, pid=pid: cluster.node(name).get("pid", pid) != pid, name)
    for name in ("m0", "s1"):
        assert any(line.startswith(f"{name} ") and "code -9" in line for line in cluster.lines)


def test_prefixes_outlive_the_prefill_worker_the_cache_process_and_a_storage_node(
    cluster: Cluster,
) -> None:
    """What a prefill worker has computed is read from storage by another one."""
    everywhere = "all storage nodes"
    wait_for(lambda: not cluster.ask_cache("stats")["storage_nodes_away"], everywhere)
    salt, holder = store_prefix(cluster)
    cluster.signal("storage/s2", signal.SIGKILL)
    cluster.signal(holder, signal.SIGKILL)
    os.kill(cluster.pid_of("cache"), signal.SIGKILL)
    wait_for(lambda: cluster.ask_cache("stats"), "another cache process")
    again = Stream(cluster, 500, salt, max_tokens=5)
    again.check()
    assert again.num_cached == 384


def store_prefix(cluster: Cluster) -> tuple[int, str]:
    """Have a prefix computed that storage keeps; the prompt's salt, and who has computed it.

    What is written while a busy machine keeps a node silent is given up, so another one is tried.
    """
    for salt in range(600, 606):
        written = cluster.ask_cache("stats")["storage_written"]
        before = {name: num_given(cluster, name) for name in NODES[:2]}
        first = Stream(cluster, 500, salt, max_tokens=5)
        first.check()
        assert first.num_cached == 0

        def holders(before: dict[str, int] = before) -> list[str]:
            return [name for name in NODES[:2] if num_given(cluster, name) > before[name]]

        def is_stored(written: float = written) -> bool:
            cluster.ask_cache("flush")
            # Three blocks and the state behind them.
            return cluster.ask_cache("stats")["storage_written"] >= written + 4

        (holder,) = wait_for(holders, "a hand-off")
        with contextlib.suppress(AssertionError):
            wait_for(is_stored, "the prefix in storage", seconds=30)
            return salt, holder
    raise AssertionError("storage keeps nothing")


def num_given(cluster: Cluster, name: str) -> int:
    return cluster.node(name)["status"]["hand_offs"]["num_given"]


def test_without_decode_workers_there_is_one_error_in_time(cluster: Cluster) -> None:
    streams = [Stream(cluster, 50, salt, max_tokens=300) for salt in range(2)]
    for stream in streams:
        stream.wait_for_text()
    begin = time.monotonic()
    pids = [cluster.signal(name, signal.SIGSTOP) for name in NODES[2:]]
    try:
        for stream in streams:
            stream.join()
            assert stream.error is not None and stream.finish_reason is None
            assert stream.ended_s - begin < 1.6 + 10
            assert stream.expected().startswith(stream.text)
        assert httpx.get(f"{cluster.url}/ready").status_code == 503
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: httpx.get(f"{cluster.url}/ready").status_code == 200, "readiness")


def test_clients_that_hang_up_leave_nothing(cluster: Cluster) -> None:
    body = {"model": "tiny-v41", "prompt": [3] * 200, "max_tokens": 500, "stream": True}
    body |= {"ignore_eos": True}
    for _ in range(3):
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())


def test_workers_are_restarted_in_turn_without_a_failed_request(cluster: Cluster) -> None:
    is_over = threading.Event()
    streams: list[Stream] = []

    def keep_busy() -> None:
        while not is_over.is_set():
            streams.append(Stream(cluster, 30, len(streams), max_tokens=30).join())

    clients = [threading.Thread(target=keep_busy) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        for name in NODES:
            old = cluster.signal(name, signal.SIGTERM)

            def is_back(name: str = name, old: int = old) -> bool:
                node = cluster.node(name)
                return node.get("pid", old) != old and node.get("state") == "available"

            wait_for(is_back, f"{name} anew")
    finally:
        is_over.set()
        for client in clients:
            client.join()
    assert len(streams) > 4
    for stream in streams:
        stream.check()


def test_the_router_lost(cluster: Cluster) -> None:
    stream = Stream(cluster, 50, max_tokens=300)
    stream.wait_for_text()
    begin = time.monotonic()
    os.kill(cluster.pid_of("router"), signal.SIGKILL)
    stream.join()
    assert stream.error is not None and stream.ended_s - begin < 10
    # Its successor finds the workers, which drop what nobody waits for.
    cluster.settle()
    Stream(cluster, 50).check()


def test_the_overview_tells_of_all_nodes(cluster: Cluster) -> None:
    overview = cluster.settle()
    workers = [node for node in overview["nodes"] if node["node"] in NODES]
    names = sorted(node["node"] for node in overview["nodes"])
    assert names == sorted((*NODES, *VISION_NODES))
    for node in workers:
        assert node["address"].startswith("ipc://") and node["silent_s"] < 1.6
        assert node["status"]["engine"]["num_slots"] == 2 and node["load"]
    assert overview["missing_roles"] == [] and overview["num_waiting"] == 0
    status = httpx.get(f"{cluster.url}/status").json()
    assert status["engine"]["num_slots"] == 8


def test_the_supervisor_tells_of_every_node(running: Cluster) -> None:
    for name in ("router", "p0", "p1", "d0", "d1"):
        assert any(line.startswith(f"{name} ") and " ready " in line for line in running.lines)
    assert any("ended with code -9; again in 0.5 s" in line for line in running.lines)
    assert Path(running.node("decode/d0")["address"].removeprefix("ipc://")).exists()


def vision(cluster: Cluster, what: str) -> int:
    """A count of both vision workers together."""
    return sum(cluster.node(name)["status"]["vision"][what] for name in VISION_NODES)


def features(cluster: Cluster, what: str) -> int:
    """A count of all workers that pull features."""
    return sum(cluster.node(name)["status"]["features"][what] for name in NODES)


def test_images_are_encoded_by_vision_workers(cluster: Cluster) -> None:
    encoded, sent = vision(cluster, "num_encoded"), vision(cluster, "num_sent")
    asked = [Asking(cluster, 1, 5), Asking(cluster, 7), Asking(cluster, 5)]
    for one in asked:
        one.check()
    cluster.settle()
    # Each picture once, and moved once for all that wait for it at one worker.
    assert vision(cluster, "num_encoded") - encoded in (3, 4)
    assert vision(cluster, "num_sent") - sent in (3, 4) and not features(cluster, "num_lost")
    cluster.slow_down("v0", 2.0)
    cluster.slow_down("v1", 2.0)
    try:
        slow = Asking(cluster, 2)
        wait_for(lambda: cluster.overview()["num_waiting_images"] == 1, "an image")
        # Text does not wait for it.
        Stream(cluster, 40, 900, max_tokens=5).check()
        assert cluster.overview()["requests"] == {"encoding": 1}
    finally:
        cluster.slow_down("v0", 0)
        cluster.slow_down("v1", 0)
    slow.check()
    page = httpx.get(f"{cluster.url}/metrics").text
    assert 'deepinfer_vision_encoded_total{node="v1"}' in page


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_vision_worker_lost_has_its_images_encoded_elsewhere(
    cluster: Cluster, number: int
) -> None:
    salt = 10 + number
    cluster.slow_down("v0", 30.0)
    try:
        # One of the two goes to each worker.
        asked = Asking(cluster, salt, salt + 20)
        wait_for(
            lambda: cluster.node("vision/v0")["status"]["vision"]["num_encoding"], "an image there"
        )
        pid = cluster.signal("vision/v0", number)
    finally:
        cluster.slow_down("v0", 0)
    asked.check()
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: cluster.node("vision/v0").get("pid", pid) != pid, "another process")


def test_without_vision_workers_prompts_encode_their_images(cluster: Cluster) -> None:
    before = features(cluster, "num_taken")
    pids = [cluster.signal(name, signal.SIGSTOP) for name in VISION_NODES]
    try:
        Asking(cluster, 60, 61).check()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert features(cluster, "num_taken") == before
