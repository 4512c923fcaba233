"""The memory server's side of the NIXL process. Starts the process at its first use, and kills it if it hangs.

The receiver of a copy reads, so that no other node gets access to a slot that is being written. If a cancelled read
does not end within a moment, the process is killed, so that none of its reads can write any more.
"""

from __future__ import annotations

import hmac
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.ipc.environment import ENV_SECRET_FILE
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.protocol import nixl_requests as n
from hyperpod_ext.runtime.memory_server.protocol.peer_requests import OfferMemory
from hyperpod_ext.runtime.memory_server.protocol.request import A, Request, error_of, read_answer
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.slots.region import Region
from hyperpod_ext.runtime.snapshot.manifest import sign

_START_S = 20.0
_ANSWER_S = 10.0
"""Seconds without an answer after which the process counts as hung. The sender of a copy waits longer than both
limits."""
_GIVEN_UP_S = 1.0
"""Seconds within which a cancelled read must end on its own."""
_LOOK_S = 0.1
_SEND_S = 1.0

Stop = Callable[[], bool]


class NixlFailure(Exception):  # noqa: N818  no data is lost, because TCP can be used instead
    """NIXL is not available, or has not moved the bytes."""


def signed_offer(token: int, version: str, exposed: n.Exposed, start: int, secret: bytes) -> OfferMemory:
    """Return a sender's signed offer of the image that begins at `start` in an exposed region."""
    fields = {"token": token, "version": version, "metadata": exposed.metadata, "address": exposed.address + start}
    return OfferMemory.model_validate(sign(fields, secret))


def is_signed(offer: OfferMemory, secret: bytes) -> bool:
    """Return whether a process of this job has signed the offer."""
    fields = offer.model_dump(exclude={"op", "signature"})
    expected = str(sign(fields, secret)["signature"])
    return hmac.compare_digest(offer.signature.encode(errors="replace"), expected.encode())


@dataclass(eq=False, slots=True)
class _Process:
    """A NIXL process that was started."""

    popen: subprocess.Popen[bytes]
    control: socket.socket
    version: str
    ended: str = "the NIXL process has ended"
    """Why the process has ended, as far as known."""
    lanes: list[socket.socket] = field(default_factory=list)
    """Connections to the process that are idle."""
    regions: dict[Region, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def kill(self, why: str = "") -> None:
        """Kill the process, which writes nothing after this call has returned."""
        if why and self.popen.poll() is None:
            self.ended = why
        self.popen.kill()
        self.popen.wait()

    def tell(self, request: n.AnyNixlRequest, fd: int | None = None) -> None:
        """Send a request that has no answer."""
        try:
            with self.lock:
                wire.send(self.control, encode(request), None if fd is None else [fd])
        except OSError:  # the process has ended, or hangs and leaves bytes unread
            self.kill()

    def lane(self) -> socket.socket:
        with self.lock:
            if self.lanes:
                return self.lanes.pop()
        ours, theirs = socket.socketpair()
        with theirs:
            self.tell(n.Lane(), theirs.fileno())
        return ours


class NixlTransfer:
    """Reads other nodes' memory into regions of this node, and exposes regions to other nodes. Thread-safe.

    Args:
        environment: environment variables of the process. Default: those of this process.
    """

    def __init__(self, cpu_priority: CpuPriority, environment: Mapping[str, str] | None = None) -> None:
        self._cpu_priority, self._environment = cpu_priority, environment
        self._process: _Process | None = None
        self._next_region = 1
        self._unusable = ""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start NIXL, so that later calls do not wait for it.

        Raises:
            NixlFailure: NIXL is not available on this node.
        """
        self._running()

    @property
    def version(self) -> str:
        """Return NIXL's version.

        Raises:
            NixlFailure: NIXL is not available on this node.
        """
        return self._running().version

    @contextmanager
    def expose(self, region: Region, stop: Stop) -> Iterator[n.Exposed]:
        """Let other nodes read a region inside the `with` block.

        Raises:
            NixlFailure: NIXL is not available on this node, or `stop()` returned true.
        """
        process = self._running()
        number = self._number(process, region, stop)
        exposed = self._ask(process, n.Expose(region=number), stop)
        try:
            yield exposed
        finally:
            process.tell(n.Withdraw(region=number))

    def read(self, offer: OfferMemory, at: int, region: Region, start: int, nbytes: int, stop: Stop) -> None:
        """Read bytes at `at` in the offered memory to `start` in a region. After an error, no more bytes are written
        there.

        Raises:
            NixlFailure: the read failed, or `stop()` returned true.
        """
        process = self._running()
        number, address = self._number(process, region, stop), offer.address + at
        request = n.ReadRemote(metadata=offer.metadata, address=address, region=number, start=start, nbytes=nbytes)
        try:
            self._ask(process, request, stop=stop)
        except NixlFailure as failure:
            process.kill(str(failure))  # after an error in one part, other parts may still be running
            raise

    def close(self) -> None:
        """Stop all reads, and end the NIXL process."""
        with self._lock:
            self._unusable = self._unusable or "it was closed"
            process, self._process = self._process, None
        if process is not None:
            process.kill()

    # --- the process ----------------------------------------------------------------------------

    def _running(self) -> _Process:
        with self._lock:
            if self._process is not None and self._process.popen.poll() is None:
                return self._process
            if self._unusable:
                raise NixlFailure(f"NIXL cannot be used on this node: {self._unusable}")
            self._process = self._start()
            return self._process

    def _start(self) -> _Process:
        ours, theirs = socket.socketpair()
        environment = {**(os.environ if self._environment is None else self._environment)}
        environment.pop(ENV_SECRET_FILE, None)
        module = "hyperpod_ext.runtime.memory_server.replication.nixl_process"
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
            )
        process = _Process(popen, ours, "")
        try:
            ours.settimeout(_START_S)
            answer = wire.receive(ours)
            if answer is None:
                raise wire.WireError("its process has ended at its start")
            if "error" in answer:
                raise error_of(answer["error"])
            process.version = str(answer["version"])
            # lower it only now, because a copy waits for the start of the process
            self._cpu_priority.lower_process(popen.pid)
            ours.settimeout(_SEND_S)
        except (OSError, HyperpodExtError) as error:
            process.kill()
            ours.close()
            if isinstance(error, HyperpodExtError):  # NIXL is not installed, and will not be later
                self._unusable = str(error)
            raise NixlFailure(f"NIXL cannot be used on this node: {error or type(error).__name__}") from error
        return process

    def _number(self, process: _Process, region: Region, stop: Stop) -> int:
        """Return the number by which the process knows a mapped region."""
        with self._lock:
            if region in process.regions:
                return process.regions[region]
            number, self._next_region = self._next_region, self._next_region + 1
            self._ask(process, n.MapRegion(region=number, nbytes=region.nbytes), stop, fd=region.fd)
            process.regions[region] = number
            region.closed = lambda: self._forget(region)
            return number

    def _forget(self, region: Region) -> None:
        process = self._process
        if process is not None and (number := process.regions.pop(region, None)) is not None:
            process.tell(n.Forget(region=number))

    # --- requests -------------------------------------------------------------------------------

    def _ask(self, process: _Process, request: Request[A], stop: Stop, fd: int | None = None) -> A:
        try:
            lane = process.lane()
            wire.send(lane, encode(request), None if fd is None else [fd])
            self._wait(lane, stop)
            answer = wire.receive(lane)
            if answer is None:
                raise NixlFailure(process.ended)
            with process.lock:
                process.lanes.append(lane)
            return read_answer(request, answer)
        except HyperpodExtError as error:  # the process has answered
            raise NixlFailure(str(error)) from error
        except (OSError, NixlFailure) as error:
            why = process.ended if isinstance(error, ConnectionError) else str(error)
            process.kill(why)
            raise NixlFailure(why) from error

    def _wait(self, lane: socket.socket, stop: Stop) -> None:
        until = time.monotonic() + _ANSWER_S
        unwanted = False
        while not ps.wait_readable(lane, _LOOK_S):
            if not unwanted and stop():
                unwanted, until = True, min(until, time.monotonic() + _GIVEN_UP_S)
            if time.monotonic() > until:
                raise NixlFailure("the copy was given up" if unwanted else f"nothing came for {_ANSWER_S:.0f} s")
