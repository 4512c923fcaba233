"""The paths, methods and answers of AWS's API over real connections, and what becomes of requests that are wrong."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import socket
import threading
from typing import Any

import pytest
from awscrt import checksums
from waiting import until

from hyperpod_ext.runtime.memory_server.managed_tier.api import ApiServer

SECRET = b"0123456789abcdef0123456789abcdef"
NAMESPACES, CHECKPOINTS, RESET = "/v1/cp/namespaces", "/v1/cp/checkpoints", "/v1/cp/cluster/reset"
MIB = 1 << 20


def described(data: bytes) -> str:
    digest = checksums.crc64nvme(data).to_bytes(8, "big")
    return json.dumps({"checksum": base64.b64encode(digest).decode(), "algorithm": "crc64nvme"})


def talk(server: ApiServer, request: bytes, *, patient: bool = False) -> bytes:
    """Send raw bytes, and read until the server closes. Who is patient could still send more."""
    with socket.create_connection(("127.0.0.1", int(server.server_address[1])), timeout=20) as raw:
        raw.sendall(request)
        if not patient:
            raw.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := raw.recv(65536):
            answer += piece
    return answer


def test_a_namespace_is_created_once_described_and_deleted(call: Any) -> None:
    assert call("GET", f"{NAMESPACES}/mine")[0] == 404
    assert call("POST", f"{NAMESPACES}/mine?num_ranks=5&steps_retained=2")[0] == 200
    assert call("GET", f"{NAMESPACES}/mine") == (200, {"num_ranks": 5, "steps_to_retain_per_rank": 2})
    assert call("POST", f"{NAMESPACES}/mine?num_ranks=5&steps_retained=2")[0] == 409
    assert call("DELETE", f"{NAMESPACES}/mine") == (200, {"status": "deleted"})
    assert call("DELETE", f"{NAMESPACES}/mine")[0] == 404


def test_three_steps_are_retained_unless_told_otherwise(call: Any) -> None:
    call("POST", f"{NAMESPACES}/mine?num_ranks=5")
    assert call("GET", f"{NAMESPACES}/mine")[1]["steps_to_retain_per_rank"] == 3


def test_a_checkpoint_comes_back_with_its_header_on_the_same_connection(call: Any) -> None:
    data = os.urandom(3 * MIB + 17)
    header = described(data)
    assert call("POST", f"{CHECKPOINTS}/job/1/40", data, Shard_Meta=header) == (200, {"status": "ok"})
    kept = call.connection.sock
    assert call("GET", f"{CHECKPOINTS}/job/1/40") == (200, data)
    assert call.answer.headers["Shard-Meta"] == header
    assert call("GET", f"{CHECKPOINTS}/job/latest?limit=3") == (200, [40])
    assert call("DELETE", f"{CHECKPOINTS}/job/1/40") == (200, {"status": "deleted"})
    assert call("GET", f"{CHECKPOINTS}/job/1/40")[0] == 404
    assert call("GET", f"{CHECKPOINTS}/job/latest") == (200, [])
    assert call.connection.sock is kept
    assert call.blobs.reserved_bytes == 0


def test_an_empty_checkpoint_and_one_without_a_header_are_kept(call: Any) -> None:
    assert call("POST", f"{CHECKPOINTS}/job/0/0", b"")[0] == 200
    assert call("GET", f"{CHECKPOINTS}/job/0/0") == (200, b"")
    assert "Shard-Meta" not in call.answer.headers


def test_latest_of_no_namespace_is_not_found(call: Any) -> None:
    assert call("GET", f"{CHECKPOINTS}/nothing/latest?limit=3")[0] == 404


def test_health(call: Any) -> None:
    assert call("GET", "/health") == (200, {"status": "healthy"})


def test_bytes_that_do_not_match_their_checksum_are_refused(call: Any) -> None:
    call("POST", f"{CHECKPOINTS}/job/0/1", b"good", Shard_Meta=described(b"good"))
    status, answer = call("POST", f"{CHECKPOINTS}/job/0/1", b"bad!", Shard_Meta=described(b"good"))
    assert (status, "do not match the crc64nvme" in answer["detail"]) == (400, True)
    assert call("GET", f"{CHECKPOINTS}/job/0/1") == (200, b"good")


def test_a_checksum_that_cannot_be_computed_here_is_returned_unchecked(call: Any) -> None:
    header = json.dumps({"checksum": "AAAA", "algorithm": "another", "extra": "ä"})
    assert call("POST", f"{CHECKPOINTS}/job/0/1", b"data", Shard_Meta=header)[0] == 200
    assert call("GET", f"{CHECKPOINTS}/job/0/1") == (200, b"data")
    assert call.answer.headers["Shard-Meta"] == header


def test_half_a_post_is_never_seen_and_its_memory_comes_back(call: Any, server: ApiServer) -> None:
    call("POST", f"{CHECKPOINTS}/job/0/1", b"whole")
    taken = call.blobs.reserved_bytes
    address = ("127.0.0.1", int(server.server_address[1]))
    with socket.create_connection(address) as dying:
        dying.sendall(b"POST /v1/cp/checkpoints/job/0/1 HTTP/1.1\r\nContent-Length: 4194304\r\n\r\n" + b"x" * MIB)
        until(lambda: call.blobs.reserved_bytes > taken)
        assert call("GET", f"{CHECKPOINTS}/job/0/1") == (200, b"whole")
    until(lambda: call.blobs.reserved_bytes == taken)
    assert call("GET", f"{CHECKPOINTS}/job/0/1") == (200, b"whole")


def test_what_does_not_fit_is_refused_and_the_connection_lives_on(call: Any) -> None:
    call("POST", f"{CHECKPOINTS}/job/0/1", b"kept")
    status, answer = call("POST", f"{CHECKPOINTS}/job/1/1", bytes(9 * MIB))
    assert status == 507
    assert "no room for 9.0 MiB: the memory tier has a budget of 8.0 MiB" in answer["detail"]
    kept = call.connection.sock
    assert call("GET", f"{CHECKPOINTS}/job/0/1") == (200, b"kept")
    assert call.connection.sock is kept


def test_who_asks_before_sending_hears_of_no_room_before_sending(server: ApiServer) -> None:
    head = b"POST /v1/cp/checkpoints/job/0/1 HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    assert talk(server, head % (9 * MIB), patient=True).startswith(b"HTTP/1.1 507 ")
    answer = talk(server, head % 4 + b"data")
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_concurrent_posts_and_gets_keep_apart(connect: Any) -> None:
    failures: list[object] = []

    def work(job: int) -> None:
        client = connect()
        client("POST", f"{NAMESPACES}/job-{job}?num_ranks=1")
        for step in range(8):
            data = bytes([job * 16 + step]) * (200_000 + step)
            client("POST", f"{CHECKPOINTS}/job-{job}/0/{step}", data, Shard_Meta=described(data))
            if client("GET", f"{CHECKPOINTS}/job-{job}/0/{step}") != (200, data):
                failures.append((job, step))

    threads = [threading.Thread(target=work, args=(job,)) for job in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_reset_needs_the_token_of_the_secret(call: Any) -> None:
    call("POST", f"{CHECKPOINTS}/job/0/1", b"data")
    assert call("POST", RESET)[0] == 401
    assert call.answer.headers["WWW-Authenticate"] == "Bearer"
    assert call("POST", RESET, Authorization="Bearer wrong")[0] == 401
    assert call("POST", RESET, Authorization="Bearer \xe9")[0] == 401
    assert call("GET", f"{CHECKPOINTS}/job/0/1")[0] == 200
    token = hmac.new(SECRET, b"cluster/reset", hashlib.sha256).hexdigest()
    assert call("POST", RESET, Authorization=f"Bearer {token}") == (200, {"status": "reset"})
    assert call("GET", f"{NAMESPACES}/job")[0] == 404
    assert call.blobs.reserved_bytes == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/cp/other", 404),
        ("GET", f"{CHECKPOINTS}/job/0/1/2", 404),
        ("GET", f"{CHECKPOINTS}/job/zero/1", 400),
        ("GET", f"{CHECKPOINTS}/job/0/-1", 400),
        ("GET", f"{CHECKPOINTS}/job/0/\u00b2".encode().decode("latin-1"), 400),
        ("GET", f"{CHECKPOINTS}/a%2Fb/0/1", 400),
        ("GET", f"{CHECKPOINTS}/{'x' * 257}/0/1", 400),
        ("GET", f"{CHECKPOINTS}/job/0/{'9' * 19}", 400),
        ("POST", f"{CHECKPOINTS}/job/3/1", 400),
        ("POST", f"{CHECKPOINTS}/nothing/0/1", 404),
        ("GET", f"{CHECKPOINTS}/job/latest?limit=0", 400),
        ("GET", f"{CHECKPOINTS}/job/latest?limit=all", 400),
        ("POST", f"{NAMESPACES}/new", 400),
        ("POST", f"{NAMESPACES}/new?num_ranks=0", 400),
        ("POST", f"{NAMESPACES}/new?num_ranks=2&steps_retained=0", 400),
        ("POST", f"{CHECKPOINTS}/job/latest", 405),
        ("GET", RESET, 405),
        ("PUT", f"{NAMESPACES}/job", 405),
    ],
)
def test_a_wrong_request_is_told_so_in_json(call: Any, method: str, path: str, status: int) -> None:
    call.connection._validate_path = lambda _: None  # it would not send some of these
    call.connection._encode_request = lambda request: request.encode("latin-1")
    answered, content = call(method, path)
    assert (answered, list(content)) == (status, ["detail"])
    assert call("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Transfer-Encoding: chunked", 411),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 1", 411),
        (b"X-Nothing: 1", 411),
        (b"Content-Length: many", 400),
        (b"Content-Length: -1", 400),
        (b"Content-Length: 1\r\nContent-Length: 2", 400),
        (b'Content-Length: 1\r\nShard-Meta: {"checksum": 5}', 400),
        (b"Content-Length: 1\r\nShard-Meta: nonsense", 400),
        (b'Content-Length: 1\r\nShard-Meta: {"checksum":\r\n "AAAA"}', 400),
        (b"Content-Length: 999999999999999999", 507),
    ],
)
def test_a_wrong_head_is_told_so_in_json(server: ApiServer, head: bytes, status: int) -> None:
    answer = talk(server, b"POST /v1/cp/checkpoints/job/0/1 HTTP/1.1\r\n" + head + b"\r\n\r\nx")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    first, _, rest = answer.partition(b"\r\n\r\n")[2].partition(b"}")
    assert "detail" in json.loads(first + b"}")
    assert not rest, "the body was taken for another request"


@pytest.mark.parametrize(
    "noise", [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"G" * 70000, b""]
)
def test_noise_harms_nobody(server: ApiServer, call: Any, noise: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    answer = talk(server, noise)
    assert b"Traceback" not in answer
    assert call("GET", "/health")[0] == 200
    assert capfd.readouterr().err == ""
