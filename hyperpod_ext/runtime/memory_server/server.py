"""Serves `NodeMemory` on a Unix socket, one thread a connection. Requests and answers are frames of wire.py."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.memory_server.slots.slots import State
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.runtime.snapshot.layout_plan import Plan

_BREATH_S = 0.05

Answer = tuple[wire.Message, int | None]
"""An answer and the descriptor that goes with it, which is closed once sent."""


class Server:
    """One node's memory server. Only processes of the same user are answered."""

    def __init__(self, path: Path, memory: NodeMemory) -> None:
        self._path, self._memory = path, memory
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._writers: set[tuple[int, int]] = set()  # owner and process id of each open connection that saves
        self._writers_changed = threading.Condition()
        self._lines: dict[socket.socket, int] = {}
        """Process id at the other end of each open connection."""

    def serve(self) -> NoReturn:
        """Answer until this process is ended."""
        self._listener.bind(str(self._path))
        self._path.chmod(0o600)
        self._listener.listen(128)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # out of descriptors: what is held is worth more than who waits outside
                time.sleep(_BREATH_S)
                continue
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        writers: set[tuple[int, int]] = set()
        with connection:
            try:
                pid = self._lines[connection] = wire.check_same_user(connection)
                while (request := wire.receive(connection)) is not None:
                    if request.get("op") == "map":
                        writers.add((int(request["owner"]), pid))
                        self._change_writers(writers, set())
                    answer = self._answer(request)
                    if request.get("op") != "stepped":  # told each step, and not waited for
                        _reply(connection, *answer)
            except ConnectionError:
                pass  # the worker died or broke the protocol; what it had not asked to seal stays unsealed
            finally:
                self._lines.pop(connection, None)
                self._change_writers(set(), writers)

    def _hang_up(self, pid: int) -> None:
        """A process will say no more, though the kernel has not closed its end yet: what it has asked for is done."""
        for connection, its in list(self._lines.items()):
            if its == pid:
                with contextlib.suppress(OSError):  # closed by now
                    connection.shutdown(socket.SHUT_RD)

    def _change_writers(self, come: set[tuple[int, int]], gone: set[tuple[int, int]]) -> None:
        with self._writers_changed:
            self._writers = (self._writers | come) - gone
            self._writers_changed.notify_all()

    def _wait_drained(self, owner: int, pid: int) -> None:
        """Until all that earlier processes of `owner` had asked for is done: a dead one's last seal counts."""
        with self._writers_changed:
            self._writers_changed.wait_for(lambda: all(o != owner or p == pid for o, p in self._writers))

    def _answer(self, request: wire.Message) -> Answer:
        try:
            if request.get("op") == "ended":
                self._hang_up(int(request["pid"]))
                return {}, None
            if request.get("op") == "held" and "pid" in request:
                self._wait_drained(int(request["owner"]), int(request["pid"]))
            return _dispatch(self._memory, request)
        except HyperpodExtError as error:
            return {"error": error.to_json()}, None
        except (KeyError, TypeError, ValueError) as error:
            return {"error": {"code": "HyperpodExtError", "message": f"malformed request: {error!r}"}}, None
        except OSError as error:  # out of descriptors, or of memory: who asked is told, and what is held stays
            told = f"the memory server of this node could not do `{request.get('op')}`: {error}"
            return {"error": {"code": "HyperpodExtError", "message": told}}, None


def _reply(connection: socket.socket, answer: wire.Message, fd: int | None) -> None:
    try:
        wire.encode(answer)
    except wire.WireError as error:  # too large: to be told, or the asker waits for ever
        answer = {"error": {"code": "HyperpodExtError", "message": str(error)}}
    try:
        wire.send(connection, answer, [fd] if fd is not None else None)
    except ConnectionError:
        pass  # whoever asked is dead; what it asked for after this, it still gets
    finally:
        if fd is not None:
            os.close(fd)


def _dispatch(memory: NodeMemory, request: wire.Message) -> Answer:
    match request.get("op"):
        case "map":
            owner, slot_bytes = int(request["owner"]), int(request["slot_bytes"])
            mapped = memory.map(owner, slot_bytes) if slot_bytes else memory.own.attach(owner)
            if mapped is None:
                return {"slots": 0}, None
            return {"slot_bytes": mapped[0].slot_bytes, "slots": len(mapped[0].slots)}, mapped[1]
        case "plan":
            memory.plans.add(request["document"], str(request["digest"]))
            return {}, None
        case "next_slot":
            return {"next_slot": memory.own.next_slot(int(request["owner"]), request["when_busy"])}, None
        case "begin":
            owner, slot, step = int(request["owner"]), int(request["slot"]), int(request["step"])
            memory.begin(owner, slot, step, str(request["save_id"]), int(request["generation"]))
            return {}, None
        case "stepped":
            memory.stepped(int(request["owner"]))
            return {}, None
        case "seal":
            owner = int(request["owner"])
            manifest = memory.seal(owner, int(request["slot"]), dict(request["record"]))
            following = memory.own.next_slot(owner, "skip")
            return {"crc64nvme": manifest["crc64nvme"], "next_slot": following}, None
        case "settle":
            memory.settle(int(request["owner"]), str(request["save_id"]), keep=bool(request["keep"]))
            return {}, None
        case "open":
            found = memory.open(int(request["owner"]), str(request["save_id"]))
            return _image(*found, known=str(request.get("known")))
        case "fetch":
            url, folder, rank = str(request["url"]), str(request["folder"]), int(request["rank"])
            manifest, plan, offset, handle, bound = memory.fetch(url, folder, rank)
            answer, fd = _image(manifest, plan, offset, handle)
            return {**answer, "bound": bound}, fd
        case op:
            return _about_all(memory, op, request), None


def _about_all(memory: NodeMemory, op: Any, request: wire.Message) -> wire.Message:
    """Requests that are not about one rank's slots; the agent's, most of them."""
    match op:
        case "held":
            return {"snapshots": memory.held()}
        case "fence":
            step = request.get("step")
            run, stored = str(request.get("run", "")), [str(url) for url in request.get("stored") or ()]
            memory.fence(int(request["generation"]), None if step is None else int(step), run, stored)
            return {}
        case "listen":
            return {"port": memory.listen(str(request["host"]))}
        case "peers":
            peers = {int(node): (str(host), int(port)) for node, (host, port) in request["peers"].items()}
            memory.set_peers(peers, {int(node): str(domain) for node, domain in request["domains"].items()})
            return {}
        case "world":
            memory.enter_world(int(request["nodes"]))
            return {}
        case "settle_world":
            memory.settle_world({int(rank) for rank in request["ranks"]}, int(request["of"]))
            return {}
        case "durable":
            return memory.durable([(str(url), str(save_id)) for url, save_id in request.get("besides", [])])
        case "drain_at":
            for drain in memory.drains:
                if drain.tier.kind == request.get("kind", drain.tier.kind):
                    drain.ask(int(request["step"]))
            if request.get("kind") == "peer" and memory.replicator is not None:
                memory.replicator.ask(int(request["step"]))
            return {}
        case "peer_step":
            if memory.replicator is not None:
                memory.replicator.go_by(None if request["step"] is None else int(request["step"]))
            return {}
        case "replicate_now":
            memory.replicate_now()
            return {}
        case "drain_now":
            return memory.drain_now(str(request["save_id"]), float(request["timeout_s"]))
        case "wait_idle":
            return {"idle": memory.wait_idle(float(request["timeout_s"]))}
        case "wait_state":
            rank, save_id, state = int(request["owner"]), str(request["save_id"]), State[request["state"].upper()]
            return {"reached": memory.own.wait_state(rank, save_id, state, float(request["timeout_s"]))}
        case "status":
            return memory.status()
    raise ValueError(f"unknown op {op!r}")


def _image(manifest: dict[str, Any], plan: Plan, offset: int, fd: int, known: str = "") -> Answer:
    return {"manifest": manifest, "plan": None if plan.digest == known else plan.to_json(), "offset": offset}, fd
