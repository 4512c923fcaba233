"""The operator's calls over HTTP, answered for an agent that obeys at once."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import other_operator
import pytest
from waiting import PATIENCE_S, until

from hyperpod_ext.errors import ConflictError
from hyperpod_ext.ports import free_port
from hyperpod_ext.runtime.ipc.http_server import HttpServer, Response
from hyperpod_ext.runtime.operator_api.server import OperatorApi, serving
from hyperpod_ext.runtime.operator_api.states import NodeStart


class Obeys:
    """An agent that does at once what it is told, and remembers it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.notes: list[dict[str, Any]] = []
        self.runs = False
        self.waits_for = ""

    def begin(self, at: NodeStart) -> None:
        self.done.append(f"begin {at.rank} at {at.first_node}")
        self.runs = True

    def resume(self, nodes: int, gone: Collection[str]) -> None:
        self.done.append(f"resume on {nodes}" + "".join(f", without {address}" for address in sorted(gone)))

    def pause(self) -> None:
        self.done.append("pause")

    async def rest(self, limit_s: float) -> None:
        self.done.append(f"rest within {limit_s:g} s")

    async def end(self) -> None:
        self.done.append("end")
        self.runs = False

    def leave(self) -> None:
        self.done.append("leave")

    def note(self, **fields: Any) -> None:
        self.notes.append(fields)


class Served:
    """A server with its agent, and calls of it."""

    def __init__(self, host: str = "127.0.0.1", allowed: tuple[str, ...] = ()) -> None:
        self.agent, self.host = Obeys(), host
        self.api = OperatorApi(self.agent, 2, allowed)

    def call(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        line = http.client.HTTPConnection(self.host, self.port, timeout=30)
        line.request(method, path, body if isinstance(body, str) or body is None else json.dumps(body))
        answer = line.getresponse()
        said = answer.read()
        line.close()
        return answer.status, json.loads(said) if said else None

    def status(self) -> dict[str, Any]:
        return self.call("/status", method="GET")[1]


@pytest.fixture(params=["127.0.0.1", "::1"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(request.param)
    with serving(made.api, request.param, 0) as made.port:
        yield made


def info(**fields: Any) -> dict[str, Any]:
    said = {"rank": 0, "nnodes": 2, "faultCount": 0, "master_addr": "10.0.0.1", "master_port": 9}
    return {**said, "rankIps": [{"rank": 0, "ip": "10.0.0.1"}, {"rank": 1, "ip": "10.0.0.2"}], **fields}


def test_a_job_from_its_start_to_the_end_of_the_pod(served: Served) -> None:
    assert served.status()["status"] == "ready"
    assert served.call("/update", info())[1]["assigned_rank"] == "0"
    assert served.call("/start", info() | {"progress": {}}) == (200, None)
    assert served.call("/start", info() | {"progress": {}}) == (200, None)  # asked twice
    assert served.call("/stop", {"restart_mode": "process_level_restart"}) == (200, None)
    until(lambda: served.status()["status"] == "ready")
    served.call("/start", info(faultCount=1, rankIps=[{"rank": 1, "ip": "10.0.0.9"}]))
    served.api.fault_seen("rank 1, step 5: killed")
    until(lambda: served.status().get("message") == "rank 1, step 5: killed")
    assert served.status()["status"] == "running"
    served.agent.waits_for = "the coordinator, node 1, is lost"
    said = served.status()
    assert (said["status"], said["reason"], said["message"]) == ("running", "Waiting", served.agent.waits_for)
    served.agent.waits_for = ""
    assert served.status()["message"] == "rank 1, step 5: killed"
    for rank, step in ((0, 6), (1, 7), (0, 7)):
        served.api.stepped("tiny", rank, rank, step)
    served.api.fault_seen("rank 1, step 8: killed", rank=1)
    each = {"group_rank": 0, "data": '{"step": 7}'}
    until(lambda: served.status()["worker_data"] == [
        {"rank": 0, "local_rank": 0, "failed": False, **each}, {"rank": 1, "local_rank": 1, "failed": True, **each},
    ])  # fmt: skip
    served.api.fault_mended(7)
    until(lambda: not any(one["failed"] for one in served.status()["worker_data"]))
    served.api.fault_seen("rank 1, step 8: killed", rank=1)
    until(lambda: any(one["failed"] for one in served.status()["worker_data"]))
    for path, body in (("/stop", None), ("/start", info(faultCount=2))):  # the operator is in the midst of it, too
        served.call(path, body)
    assert not any(one["failed"] for one in served.status()["worker_data"])
    served.api.job_ended(succeeded=True, message="", restart_mode="")
    until(lambda: served.status()["status"] == "completed")
    assert served.status()["progress"]["tiny"]["progressCount"] == 7
    served.call("/stop")
    until(lambda: served.status()["status"] == "ready")
    served.call("/start", info(faultCount=3))
    assert not {"progress", "worker_data"} & served.status().keys(), "they are of an earlier agent"
    assert served.call("/shutdown") == (200, None)
    begun = "begin 0 at 10.0.0.1"
    resumed = ["pause", "resume on 2, without 10.0.0.2", "pause", "resume on 2, without 10.0.0.9"]
    assert served.agent.done == [begun, *resumed, "end", begun, "leave"]
    notes = [(note["call"], note["state"]) for note in served.agent.notes if note["call"] == "/stop"]
    assert notes == [("/stop", "stopping")] * 3


@pytest.mark.parametrize(
    ("path", "body", "method", "status"),
    [
        ("/status", None, "POST", 405),
        ("/start", None, "GET", 405),
        ("/else", None, "GET", 404),
        ("/start", None, "POST", 422),
        ("/start", "{", "POST", 422),
        ("/start", [1], "POST", 422),
        ("/start", info(master_addr=""), "POST", 422),
        ("/start", info(rank="one"), "POST", 422),
        ("/start", info(rank=5), "POST", 409),
        ("/update", info(nnodes=9), "POST", 409),
        ("/stop", None, "POST", 200),
        ("/stop", {"timeout": "soon"}, "POST", 422),
    ],
)
def test_what_is_malformed_or_does_not_fit_changes_nothing(
    served: Served, path: str, body: Any, method: str, status: int
) -> None:
    before = served.status()
    answered, said = served.call(path, body, method)
    assert answered == status
    assert status == 200 or said["detail"]
    assert served.status() == before
    assert served.agent.done == []


def test_who_may_not_order_is_refused_and_named() -> None:
    served = Served(allowed=("10.1.0.0/16",))
    with serving(served.api, "127.0.0.1", 0) as served.port:
        for path in ("/start", "/update", "/stop", "/shutdown"):
            why = "127.0.0.1 is not in the networks of the job's operator"
            assert served.call(path, info()) == (403, {"detail": why})
            assert served.call(path, info()) == (403, {"detail": why})  # again: once is enough for the log
        assert served.status()["status"] == "ready"
    assert [(note["call"], note["caller"], note["status"]) for note in served.agent.notes] == [
        (path, "127.0.0.1", 403) for path in ("/start", "/update", "/stop", "/shutdown")
    ]
    assert served.agent.done == []


def test_a_connection_that_sends_no_http_ends_alone(served: Served) -> None:
    with socket.create_connection((served.host, served.port)) as line:
        line.sendall(b"\x16\x03\x01nonsense\r\n\r\n")
        assert line.makefile("rb").readline().startswith(b"HTTP/1.1 400")
    with socket.create_connection((served.host, served.port)) as line:
        line.sendall(b"POST /stop HTTP/1.1\r\ncontent-length: 999999999999\r\n\r\n")
        assert line.makefile("rb").readline().startswith(b"HTTP/1.1 413")
    with socket.create_connection((served.host, served.port)) as line:
        line.sendall(b"POST /stop HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n4\r\nnull\r\n0\r\n\r\n")
        assert line.makefile("rb").readline().startswith(b"HTTP/1.1 200")
    assert served.status()["status"] == "ready"


def test_a_client_may_speak_http_in_any_way_that_it_knows(served: Served) -> None:
    client = other_operator.Client(served.port)
    for turn in range(2 * len(other_operator.SHAPES)):
        code, said = client.ask(served.host, "/update", info(faultCount=turn))
        assert (code, said["status"]) == (200, "ready")
        assert client.ask(served.host, "/status")[0] == 200


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        socket.create_server(("127.0.0.1", free_port())) as taken,
        pytest.raises(OSError, match="in use"),
        serving(Served().api, "127.0.0.1", taken.getsockname()[1]),
    ):
        pass


def test_two_pods_that_share_a_network_are_told_apart(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ["--server-host", "127.0.0.1", "--server-port", port, "--", "train.py"]
        done = subprocess.run(
            [sys.executable, "-m", "hyperpod_ext.runtime.operator_api", *command],
            env={**os.environ, "HPX_RUN_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == ConflictError.exit_code
    assert f"cannot serve the operator at 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "kubernetes.host_network" in done.stderr
    assert "Traceback" not in done.stderr


def test_silent_connections_take_no_descriptors_of_the_agent() -> None:
    """Whoever reaches the port may open as many as it likes; the operator is answered all the same."""
    server = HttpServer(lambda request: Response(200, request.path), pytest.fail, places=3)

    async def run() -> None:
        port = await server.listen("127.0.0.1", 0)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for reader, _ in silent[:2]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b"", "the oldest are hung up on"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /status HTTP/1.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, line in (*silent, (reader, writer)):
            line.close()
        await server.close()

    asyncio.run(run())


def test_an_answer_that_is_not_read_makes_way_for_a_later_one() -> None:
    long = bytes(64 << 20)
    server = HttpServer(lambda request: Response(200, long, "text/plain"), pytest.fail, places=1)

    async def run() -> None:
        port = await server.listen("127.0.0.1", 0)
        lines = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            lines.append((reader, writer))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await lines[0][0].readexactly(len(long))
        await lines[1][0].readuntil(b"\r\n\r\n")
        assert await lines[1][0].readexactly(len(long)) == long
        for _, writer in lines:
            writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
