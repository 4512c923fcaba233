"""Serves `Regions` on a Unix socket, one thread a connection. Requests and answers are frames of wire.py."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import NoReturn

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime import wire
from hyperpod_ext.runtime.memory_server.regions import Regions

Answer = tuple[wire.Message, int | None]
"""An answer and the descriptor that goes with it, which is closed once sent."""


class Server:
    """One node's memory server. Only processes of the same user are answered."""

    def __init__(self, path: Path, regions: Regions) -> None:
        self._path, self._regions = path, regions
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._writers: set[tuple[int, int]] = set()  # owner and process id of each open connection that saves
        self._writers_changed = threading.Condition()

    def serve(self) -> NoReturn:
        """Answer until this process is ended."""
        self._listener.bind(str(self._path))
        self._path.chmod(0o600)
        self._listener.listen(128)
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        writers: set[tuple[int, int]] = set()
        with connection:
            try:
                pid = wire.check_same_user(connection)
                while (request := wire.receive(connection)) is not None:
                    if request.get("op") == "map":
                        writers.add((int(request["owner"]), pid))
                        self._change_writers(self._writers | writers)
                    _reply(connection, *self._answer(request))
            except ConnectionError:
                pass  # the worker died or broke the protocol; what it had not asked to seal stays unsealed
            finally:
                self._change_writers(self._writers - writers)

    def _change_writers(self, writers: set[tuple[int, int]]) -> None:
        with self._writers_changed:
            self._writers = writers
            self._writers_changed.notify_all()

    def _wait_drained(self, owner: int, pid: int) -> None:
        """Until all that earlier processes of `owner` had asked for is done: a dead one's last seal counts."""
        with self._writers_changed:
            self._writers_changed.wait_for(lambda: all(o != owner or p == pid for o, p in self._writers))

    def _answer(self, request: wire.Message) -> Answer:
        try:
            if request.get("op") == "held":
                self._wait_drained(int(request["owner"]), int(request["pid"]))
            return _dispatch(self._regions, request)
        except HyperpodExtError as error:
            return {"error": error.to_json()}, None
        except (KeyError, TypeError, ValueError) as error:
            return {"error": {"code": "HyperpodExtError", "message": f"malformed request: {error!r}"}}, None


def _reply(connection: socket.socket, answer: wire.Message, fd: int | None) -> None:
    try:
        wire.send(connection, answer, [fd] if fd is not None else None)
    finally:
        if fd is not None:
            os.close(fd)


def _dispatch(regions: Regions, request: wire.Message) -> Answer:
    match request.get("op"):
        case "map":
            owner = int(request["owner"])
            region, fd = regions.map(owner, int(request["slot_bytes"]))
            next_slot = regions.next_slot(owner)
            return {"slot_bytes": region.slot_bytes, "slots": len(region.slots), "next_slot": next_slot}, fd
        case "next_slot":
            return {"next_slot": regions.next_slot(int(request["owner"]))}, None
        case "begin":
            generation = int(request["generation"])
            owner, slot, step = int(request["owner"]), int(request["slot"]), int(request["step"])
            regions.begin(owner, slot, step, str(request["save_id"]), generation)
            return {}, None
        case "seal":
            manifest = regions.seal(int(request["owner"]), int(request["slot"]), dict(request["record"]))
            return {"crc64nvme": manifest["crc64nvme"]}, None
        case "held":
            return {"snapshots": regions.held()}, None
        case "open":
            manifest, offset, fd = regions.open(int(request["owner"]), str(request["save_id"]))
            return {"manifest": manifest, "offset": offset}, fd
        case "fence":
            regions.fence(int(request["generation"]))
            return {}, None
    raise ValueError(f"unknown op {request.get('op')!r}")
