"""Serves `Regions` on a Unix socket, one thread a connection. Requests and answers are frames of wire.py."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime import wire
from hyperpod_ext.runtime.memory_server.regions import Regions

Answer = tuple[wire.Message, int | None]
"""An answer and the descriptor that goes with it, which is closed once sent."""


def serve(path: Path, regions: Regions) -> None:
    """Answer until a `stop` request comes. Only processes of the same user are answered."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(128)
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept()

    while not stopping.is_set():
        try:
            connection, _ = listener.accept()
        except OSError:
            if stopping.is_set():
                break
            raise
        threading.Thread(target=_converse, args=(connection, regions, stop), daemon=True).start()
    listener.close()
    path.unlink(missing_ok=True)


def _converse(connection: socket.socket, regions: Regions, stop: Callable[[], None]) -> None:
    with connection:
        try:
            wire.check_same_user(connection)
            while (request := wire.receive(connection)) is not None:
                if request.get("op") == "stop":
                    wire.send(connection, {})
                    stop()
                    return
                _reply(connection, *_answer(regions, request))
        except ConnectionError:
            return  # the worker died or broke the protocol; its slot stays unsealed


def _reply(connection: socket.socket, answer: wire.Message, fd: int | None) -> None:
    try:
        wire.send(connection, answer, [fd] if fd is not None else None)
    finally:
        if fd is not None:
            os.close(fd)


def _answer(regions: Regions, request: wire.Message) -> Answer:
    try:
        return _dispatch(regions, request)
    except HyperpodExtError as error:
        return {"error": error.to_json()}, None
    except (KeyError, TypeError, ValueError) as error:
        return {"error": {"code": "HyperpodExtError", "message": f"malformed request: {error!r}", "hint": ""}}, None


def _dispatch(regions: Regions, request: wire.Message) -> Answer:
    match request.get("op"):
        case "map":
            region, fd = regions.map(int(request["owner"]), int(request["slot_bytes"]))
            return {"slot_bytes": region.slot_bytes, "slots": len(region.slots)}, fd
        case "begin":
            generation = int(request["generation"])
            slot = regions.begin(int(request["owner"]), int(request["step"]), str(request["save_id"]), generation)
            return {"slot": slot}, None
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
