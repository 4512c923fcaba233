"""Runs NIXL for one memory server in a separate process, which reads other nodes' memory into shared regions.

python -m hyperpod_ext.runtime.memory_server.replication.nixl_process DESCRIPTOR

NIXL runs in a separate process because its library UCX may end the process, patch `mmap`, and serve any client. The
NIXL process has neither the job's secret nor manifests, and only carries out requests. The memory server can kill the
NIXL process at any moment to stop its writes to shared memory. The NIXL process ends when the memory server closes the
socket or ends.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import importlib.metadata
import math
import mmap
import os
import select
import signal
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.errors import HyperpodExtError, NotFoundError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import Declared, encode
from hyperpod_ext.runtime.memory_server.protocol import nixl_requests as n
from hyperpod_ext.runtime.memory_server.protocol.request import Done, refusal

MODULES = ("nixl_cu13", "nixl_cu12")
"""Python modules of NIXL's wheels for two CUDA versions. Each of these modules can copy CPU memory."""
_SETTINGS = {
    # exclude UCX's TCP transport, which serves any client and is slower than the memory server's own TCP transfer
    "UCX_TLS": "^tcp",
    "UCX_CMA_SEG_SIZE": "4m",  # bytes per system call; the default of 512 KiB needs more CPU time
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
}
_READING_S = 0.0001
"""Seconds between two checks of a running read whose bytes are copied by network hardware instead of CPU cores."""
_EXPOSED_S = (0.0001, 0.016)
"""Minimum and maximum seconds between two checks for reads by other nodes, while a region is exposed. The time is
doubled after each check that found nothing to do."""
_WORKED = 8
"""A check counts as having done work if it takes at least this many times as long as the shortest check."""
_MOST_REMOTES = 64


@dataclass(eq=False, slots=True)
class _Region:
    memory: mmap.mmap
    address: int
    registered: Any
    exposed: int = 0
    """Number of copies that currently allow other nodes to read the region."""
    reads: int = 0
    closed: bool = False


@dataclass(eq=False, slots=True)
class _Read:
    lane: socket.socket
    region: _Region
    handle: Any


@dataclass(eq=False)
class NixlProcess:
    """Answers requests of the memory server, and calls NIXL repeatedly during transfers, because NIXL makes progress
    only inside calls.

    Args:
        agent: a `nixl_agent` with a UCX backend.
        control: socket to the memory server; this process ends when the memory server closes the socket.
    """

    agent: Any
    control: socket.socket
    _lanes: set[socket.socket] = field(default_factory=set)
    _regions: dict[int, _Region] = field(default_factory=dict)
    _reads: list[_Read] = field(default_factory=list)
    _remotes: dict[str, str] = field(default_factory=dict)
    """Names of other nodes' NIXL agents, by the agents' metadata, oldest first."""
    _shortest_s: float = math.inf
    """Duration in seconds of the shortest call so far that checks for reads by other nodes."""

    def serve(self) -> None:
        """Answer requests until the memory server has ended."""
        wait_s: float | None = None
        while True:
            ready, _, _ = select.select([self.control, *self._lanes], [], [], wait_s)
            for sock in ready:
                message, fds = wire.receive_fds(sock, 1)
                if message is None:
                    if sock is self.control:
                        return
                    self._lanes.discard(sock)
                    sock.close()
                    continue
                self._take(sock, message, fds)
            began = time.perf_counter()
            self._progress()
            took_s = time.perf_counter() - began
            if self._reads or self._is_exposed():
                self._shortest_s = min(self._shortest_s, took_s)
            wait_s = self._wait_s(wait_s, idle=took_s < _WORKED * self._shortest_s)

    def _wait_s(self, before: float | None, *, idle: bool) -> float | None:
        """Return the seconds until the next call to NIXL; None to wait for the next request of the memory server."""
        if self._reads:
            return _READING_S if idle else 0.0
        if not self._is_exposed():
            return None
        least, most = _EXPOSED_S
        return min(most, max(least, 2 * (before or 0.0))) if idle else least

    def _is_exposed(self) -> bool:
        return any(region.exposed for region in self._regions.values())

    def _take(self, sock: socket.socket, message: wire.Message, fds: list[int]) -> None:
        try:
            answered = self._answer(sock, n.NIXL_REQUESTS.decode(message), fds)
            answer = encode(answered) if answered is not None else None
        except Exception as error:  # NIXL may raise any error; the memory server then copies over TCP
            answer = refusal(_described(error))
        if answer is not None:
            wire.send(sock, answer)

    def _answer(self, sock: socket.socket, request: n.AnyNixlRequest, fds: list[int]) -> Declared | None:
        match request:
            case n.Lane():
                self._lanes.add(socket.socket(fileno=fds[0]))
                return None
            case n.MapRegion():
                self._regions[request.region] = self._map(fds[0], request.nbytes)
                return Done()
            case n.Expose():
                return self._expose(self._region(request.region))
            case n.Withdraw():
                self._region(request.region).exposed -= 1
                return None
            case n.Forget():
                region = self._regions.pop(request.region, None)
                if region is not None:
                    region.closed = True
                    self._release(region)
                return None
            case n.ReadRemote():
                self._read(sock, request)
                return None

    # --- memory ---------------------------------------------------------------------------------

    def _region(self, number: int) -> _Region:
        if (region := self._regions.get(number)) is None:
            raise NotFoundError(f"region {number} is not mapped by the NIXL process")
        return region

    def _map(self, fd: int, nbytes: int) -> _Region:
        try:
            memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return _Region(memory, address, self.agent.register_memory([(address, nbytes, 0, "")], "DRAM"))

    def _expose(self, region: _Region) -> n.Exposed:
        """Allow other nodes to read a region. The returned metadata gives access only to this region, and not to
        regions that are being written."""
        region.exposed += 1
        metadata = self.agent.get_partial_agent_metadata(region.registered, True, ["UCX"])
        return n.Exposed(metadata=base64.b64encode(metadata).decode(), address=region.address)

    def _release(self, region: _Region) -> None:
        if region.closed and not region.reads:
            self.agent.deregister_memory(region.registered)
            region.memory.close()

    # --- reads ----------------------------------------------------------------------------------

    def _read(self, lane: socket.socket, request: n.ReadRemote) -> None:
        region = self._region(request.region)
        if not 0 < request.nbytes <= len(region.memory) - request.start:
            raise NotFoundError(f"region {request.region} has no {request.nbytes} bytes at {request.start}")
        remote = self._remotes.get(request.metadata) or self._meet(request.metadata)
        ours = self.agent.get_xfer_descs([(region.address + request.start, request.nbytes, 0)], "DRAM")
        theirs = self.agent.get_xfer_descs([(request.address, request.nbytes, 0)], "DRAM")
        handle = self.agent.initialize_xfer("READ", ours, theirs, remote)
        self.agent.transfer(handle)
        region.reads += 1
        self._reads.append(_Read(lane, region, handle))

    def _meet(self, metadata: str) -> str:
        while len(self._remotes) >= _MOST_REMOTES:
            oldest = self._remotes.pop(next(iter(self._remotes)))
            if oldest not in self._remotes.values():
                self.agent.remove_remote_agent(oldest)
        name = self.agent.add_remote_agent(base64.b64decode(metadata))
        self._remotes[metadata] = name.decode() if isinstance(name, bytes) else str(name)
        return self._remotes[metadata]

    def _progress(self) -> None:
        if not self._reads and self._is_exposed():
            self.agent.get_new_notifs()  # this call makes NIXL handle connections of other nodes
        for read in list(self._reads):
            answer = encode(Done())
            try:
                if (state := self.agent.check_xfer_state(read.handle)) == "PROC":
                    continue
                if state != "DONE":
                    raise HyperpodExtError("NIXL reports an error")
                read.handle.release()
            # the memory server kills this process after the error answer, because NIXL is no longer reliable
            except Exception as error:
                answer = refusal(_described(error))
            self._reads.remove(read)
            read.region.reads -= 1
            self._release(read.region)
            wire.send(read.lane, answer)


def _described(error: Exception) -> HyperpodExtError:
    return error if isinstance(error, HyperpodExtError) else HyperpodExtError(f"{type(error).__name__}: {error}")


def make_agent() -> tuple[Any, str]:
    """Return a NIXL agent with a UCX backend, and NIXL's version.

    Raises:
        HyperpodExtError: NIXL is not installed, or does not work on this machine.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    failures = []
    for name in MODULES:
        try:
            api = importlib.import_module(f"{name}._api")
            # if UCX's error handling were on, it would not use shared memory, which cannot detect that a peer has died
            options = {"ucx_error_handling_mode": "none"}
            agent = api.nixl_agent(uuid.uuid4().hex, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            agent.create_backend("UCX", options)
            return agent, importlib.metadata.version(name)
        except ModuleNotFoundError as error:
            failures.append(f"{name.replace('_', '-')} is not installed" if error.name == name else str(error))
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    raise HyperpodExtError("; ".join(failures))


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # ignore signals from a terminal or scheduler: this process must not end before its memory server
        signal.signal(signum, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        agent, version = make_agent()
    except HyperpodExtError as error:
        wire.send(control, refusal(error))
        return
    wire.send(control, encode(n.Started(version=version)))
    with contextlib.suppress(ConnectionError):  # the memory server ended during a message
        NixlProcess(agent, control).serve()
    os._exit(0)  # skip UCX's clean-up


if __name__ == "__main__":
    main()
