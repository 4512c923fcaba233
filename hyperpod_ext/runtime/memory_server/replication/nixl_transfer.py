"""The memory server's interface to the NIXL process (`nixl_process.py`). Starts the process at its first use, and kills
the process if it hangs.

The receiver of a copy reads from the sender's memory, so that no other node gets access to a slot that is being
written. If a cancelled read does not end within a second, the receiver's NIXL process is killed, so that it can no
longer write to the slot.
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
"""Seconds without an answer after which the NIXL process counts as hung. `_ANSWER_S` must be less than the time for
which the sender of a copy waits."""
_GIVEN_UP_S = 1.0
"""Seconds after which the NIXL process is killed if a cancelled read has not ended."""
_LOOK_S = 0.1
_SEND_S = 1.0

Stop = Callable[[], bool]


class NixlFailure(Exception):  # noqa: N818 not an error: TCP is used instead
    """NIXL is not available, or has failed to copy bytes."""


def signed_offer(token: int, version: str, exposed: n.Exposed, start: int, secret: bytes) -> OfferMemory:
    """Return a signed `OfferMemory` request for the snapshot at offset `start` in an exposed region."""
    fields = {"token": token, "version": version, "metadata": exposed.metadata, "address": exposed.address + start}
    return OfferMemory.model_validate(sign(fields, secret))


def is_signed(offer: OfferMemory, secret: bytes) -> bool:
    """Return whether the offer's signature proves that a process of this job made the offer."""
    fields = offer.model_dump(exclude={"op", "signature"})
    expected = str(sign(fields, secret)["signature"])
    return hmac.compare_digest(offer.signature.encode(errors="replace"), expected.encode())


@dataclass(eq=False, slots=True)
class _Process:
    """A started NIXL process, and the sockets to it."""

    popen: subprocess.Popen[bytes]
    control: socket.socket
    version: str
    ended: str = "the NIXL process has ended"
    """Why the process has ended, for error messages."""
    lanes: list[socket.socket] = field(default_factory=list)
    """Idle connections to the NIXL process. Each request uses its own connection."""
    regions: dict[Region, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def kill(self, why: str = "") -> None:
        """Kill the NIXL process. Returns once the process can write no more bytes to shared memory."""
        if why and self.popen.poll() is None:
            self.ended = why
        self.popen.kill()
        self.popen.wait()

    def tell(self, request: n.AnyNixlRequest, fd: int | None = None) -> None:
        """Send a request that has no answer."""
        try:
            with self.lock:
                wire.send(self.control, encode(request), None if fd is None else [fd])
        except OSError:  # the NIXL process has ended, or hangs and does not read the request
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
        environment: environment variables of the NIXL process, or None for the variables of this process.
    """

    def __init__(self, cpu_priority: CpuPriority, environment: Mapping[str, str] | None = None) -> None:
        self._cpu_priority, self._environment = cpu_priority, environment
        self._process: _Process | None = None
        self._next_region = 1
        self._unusable = ""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the NIXL process, so that later calls do not have to wait for its start.

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
        """Allow other nodes to read a region inside the `with` block.

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
        """Read `nbytes` bytes from offset `at` of the offered memory to offset `start` of a region. After an error, no
        more bytes are written.

        Raises:
            NixlFailure: the read failed, or `stop()` returned true.
        """
        process = self._running()
        number, address = self._number(process, region, stop), offer.address + at
        request = n.ReadRemote(metadata=offer.metadata, address=address, region=number, start=start, nbytes=nbytes)
        try:
            self._ask(process, request, stop=stop)
        except NixlFailure as failure:
            process.kill(str(failure))  # parts of the failed read may still be running
            raise

    def close(self) -> None:
        """Kill the NIXL process, which ends all reads."""
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
                raise wire.WireError("the NIXL process has ended during its start")
            if "error" in answer:
                raise error_of(answer["error"])
            process.version = str(answer["version"])
            # lower the CPU priority only after the start of the process, because a copy waits for the start
            self._cpu_priority.lower_process(popen.pid)
            ours.settimeout(_SEND_S)
        except (OSError, HyperpodExtError) as error:
            process.kill()
            ours.close()
            if isinstance(error, HyperpodExtError):  # NIXL is not installed or does not work; do not try again
                self._unusable = str(error)
            raise NixlFailure(f"NIXL cannot be used on this node: {error or type(error).__name__}") from error
        return process

    def _number(self, process: _Process, region: Region, stop: Stop) -> int:
        """Return a region's number in requests to the process. If necessary, first maps the region into the process."""
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
        except HyperpodExtError as error:  # the NIXL process works, and has answered with an error
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
                raise NixlFailure("the copy was cancelled" if unwanted else f"no answer for {_ANSWER_S:.0f} s")
