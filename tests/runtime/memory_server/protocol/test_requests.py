"""Every declared request: what a server may not take is refused by name, and no request can hurt a server."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from random import Random
from typing import Any

import declared_examples
import pytest
from served import serve

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.ipc import declared
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import Declared, Kinds
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.protocol.peer_requests import PEER_REQUESTS
from hyperpod_ext.runtime.memory_server.protocol.request import read_answer
from hyperpod_ext.runtime.memory_server.protocol.requests import REQUESTS

FUZZED, AT_ONCE = 4_000, 50
AWAY = {"listen", "peers"}
"""Names of hosts in these are looked up, and whoever is found there is connected to."""

every_kind = pytest.mark.parametrize(
    ("kinds", "kind"),
    [(kinds, kind) for kinds in (REQUESTS, PEER_REQUESTS) for kind in kinds],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)


def message_of(kind: type[Declared]) -> dict[str, Any]:
    return json.loads(json.dumps(declared.encode(declared_examples.example(kind, Random(7)))))


@every_kind
def test_a_field_too_many_one_too_few_and_a_wrong_one_are_refused_by_name(kinds: Kinds[Any], kind: type[Any]) -> None:
    message, op = message_of(kind), declared.name_of(kind, "op")
    assert kinds.decode(message) is not None
    with pytest.raises(wire.WireError, match=f"^{op}: field `extra` is unknown$"):
        kinds.decode({**message, "extra": 1})
    for name, field in kind.model_fields.items():
        if name == "op":
            continue
        with pytest.raises(wire.WireError, match=f"^{op}: field `{name}"):
            kinds.decode({**message, name: object()})
        if field.is_required():
            with pytest.raises(wire.WireError, match=f"^{op}: field `{name}` is missing$"):
                kinds.decode({key: value for key, value in message.items() if key != name})


@every_kind
def test_nobody_can_make_a_request_with_a_wrong_field(kinds: Kinds[Any], kind: type[Any]) -> None:
    fields = {key: value for key, value in message_of(kind).items() if key != "op"}
    for name in fields:
        with pytest.raises(ValueError, match=name):
            kind(**{**fields, name: object()})
    with pytest.raises(ValueError, match="extra"):
        kind(**fields, extra=1)


@every_kind
def test_every_request_says_when_it_is_sent_by_whom_and_what_answers_it(kinds: Kinds[Any], kind: type[Any]) -> None:
    assert kind.__doc__
    assert kind.sender
    assert kind.reader == "memory server"
    answer = kind.answer_kind()
    assert issubclass(answer, Declared)
    assert read_answer(declared_examples.example(kind, Random(1)), message_of(answer)) is not None


def test_an_answer_with_a_wrong_field_is_refused_by_name() -> None:
    with pytest.raises(wire.WireError, match=r"^the answer to `Listen`: field `port` should be a valid integer"):
        read_answer(r.Listen(host="h"), {"port": "80"})
    with pytest.raises(HyperpodExtError, match=r"^no$"):
        read_answer(r.Listen(host="h"), {"error": {"code": "WireError", "message": "no"}})


# --- a real server ------------------------------------------------------------------------------


def talk(path: Path, *messages: dict[str, Any]) -> list[dict[str, Any] | None]:
    """What a server answers to messages of one connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        return [tell(sock, message) for message in messages]


def tell(sock: socket.socket, message: dict[str, Any]) -> dict[str, Any] | None:
    wire.send(sock, message)
    return wire.receive(sock)


def test_a_server_refuses_by_name_and_goes_on_with_the_connection(tmp_path: Path) -> None:
    with serve(tmp_path, {"kind": "memory", "budget_mib": 8}) as server:
        first = declared.with_version({"op": "begin", "owner": 0})
        answers = talk(server.path, first, {"op": "dance"}, {"op": "held", "owner": "0"}, {"op": "held"})
        told = [answer["error"]["message"] if answer and "error" in answer else answer for answer in answers]
        assert told[0] == "begin: field `slot` is missing"
        assert told[1] == "'dance' is no request to a memory server"
        assert told[2] == "held: field `owner` should be a valid integer, not '0'"
        assert told[3] == {"snapshots": [], "pieces": [], "disk": {"snapshots": [], "generation": 0, "problems": []}}


def test_a_process_of_another_version_is_told_so(tmp_path: Path) -> None:
    with serve(tmp_path, {"kind": "memory", "budget_mib": 8}) as server:
        for first in ({"op": "held", "protocol": 99}, {"op": "held"}):
            (answer,) = talk(server.path, first)
            assert answer is not None
            assert answer["error"]["message"].startswith(
                f"the memory server of this node speaks version {declared.PROTOCOL} of the job's protocol, "
                f"process {os.getpid()} version {first.get('protocol', 'none')}"
            )


def all_answers(path: Path, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a server answers to messages that are sent one after the other, before the first answer is read."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        for message in [declared.with_version(messages[0]), *messages[1:]]:
            wire.send(sock, message)
        sock.shutdown(socket.SHUT_WR)
        return list(iter(lambda: wire.receive(sock), None))


def fuzzed(random: Random) -> dict[str, Any]:
    """A request, right or wrong. None waits long, for in a right one that is what the server is asked to do."""
    kind = random.choice([kind for kind in REQUESTS if declared.name_of(kind, "op") not in AWAY])
    message = json.loads(json.dumps(declared.encode(declared_examples.example(kind, random))))
    if random.random() < 0.5:
        message = declared_examples.spoiled(message, "op", random)
    if isinstance(seconds := message.get("timeout_s"), float | int) and 0 < seconds <= 1e9:
        message["timeout_s"] = 0
    if message.get("when_busy") == "wait":
        message["when_busy"] = "skip"
    if message.get("op") == "held":
        message["pid"] = os.getpid()  # or this connection would wait for itself
    return message


def test_thousands_of_random_requests_leave_a_server_that_serves(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    random = Random(20261123)
    tiers = [{"kind": "memory", "budget_mib": 64}, {"kind": "file", "path": str(tmp_path / "d"), "every_steps": 1}]
    with serve(tmp_path / "s", *tiers, {"kind": "peer"}, nodes=2) as server:
        for _ in range(FUZZED // AT_ONCE):
            answers = all_answers(server.path, [fuzzed(random) for _ in range(AT_ONCE)])
            assert len(answers) > AT_ONCE // 2  # only steps are not answered
        client = MemoryClient(str(server.path))
        try:
            assert client.ask(r.Handshake()).pid == server.pid
            assert client.ask(r.Status()).copying
            assert client.map(1 << 40, 1000).slots > 0
        finally:
            client.close()
    assert "Traceback" not in capfd.readouterr().err
