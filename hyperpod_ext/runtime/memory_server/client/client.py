"""A worker's connection to its node's memory server."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext import errors
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.connections import breaking
from hyperpod_ext.runtime.ipc.declared import Declared, encode, with_version
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.protocol.request import A, Request, read_answer
from hyperpod_ext.runtime.memory_server.slots.region import map_memory, populate
from hyperpod_ext.runtime.snapshot.layout_plan import Plan, read_plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest, check_manifest, without_run

_START_S = r.SERVER_START_S + 30  # wait longer than the agent, which ends the job after SERVER_START_S
_REPLACED_S = 1.0
"""Seconds between two checks whether a new server has replaced the connected one, while a call waits for an answer."""
_LOOK_S, _STOPPED_S = 0.01, 10.0
"""Seconds between two checks of the number of allocated pages, and seconds to wait while this number does not grow."""


class MemoryLostError(errors.JobFailedError):
    """The memory server has ended, and the agent is starting a new memory server."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """The snapshot slots of this rank in shared memory, mapped as writable into this process."""

    memory: memoryview
    slot_bytes: int
    slots: int
    inode: int
    """Inode of the slots' memfd, which identifies the shared memory."""
    may_populate: threading.Event
    """Cleared while a restore reads the memory, to pause the thread that maps the memory's pages in advance. The pause
    is needed because two threads that map pages at the same time slow each other down."""


@dataclass(frozen=True, slots=True)
class MappedSnapshot:
    """A snapshot in this node's memory. The manifest is verified, but the snapshot's bytes are not."""

    manifest: Manifest
    plan: Plan
    memory: memoryview
    offset: int
    bound: bool = True
    """Whether MACs prove that the job wrote the bytes; false for a durable checkpoint without MACs."""

    @property
    def image(self) -> memoryview:
        return self.memory[self.offset : self.offset + int(self.manifest["nbytes"])]


class MemoryClient:
    """Sends requests to the memory server. `begin`, `seal` and `resolve` return at once; the next call reads their
    answer.

    The server handles every request that was sent, even if this process dies right after sending it. The server answers
    later requests about this rank only after it has handled all earlier requests.

    One thread may call `seal` while another thread makes any other call.

    Errors of the server are raised with their original types, for example MemoryTierFullError or StaleGenerationError.

    Args:
        another: whether the agent starts a new server at the same path if the server ends. Calls after the end of a
            server raise MemoryLostError until `connect` is called.
    """

    def __init__(self, path: str, *, another: bool = False) -> None:
        self._path, self._another = path, another
        self._speaking = threading.RLock()
        """Lock held while a request is sent, and until its answer has arrived if the caller waits for the answer."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connect()

    def connect(self) -> None:
        """Connect to the memory server. If `another` was set, wait until a new memory server listens.

        A new memory server has no snapshots or other state of the memory server that it replaces.

        Raises:
            JobFailedError: no new server listens within 150 s.
            OSError: no server listens, and `another` is false.
        """
        deadline = time.monotonic() + _START_S
        while True:
            self._socket.close()
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._inode = Path(self._path).stat().st_ino
                self._socket.connect(self._path)
                break
            except OSError as error:
                if not self._another:
                    raise
                if time.monotonic() > deadline:
                    why = f"the memory server of this node is gone, and no new one has started within {_START_S:g} s"
                    raise errors.JobFailedError(why, hint="The log of the node's agent shows why.") from error
                time.sleep(0.01)
        self._handshake_done = False
        self._pending: deque[r.Begin | r.Seal | r.Resolve] = deque()
        self._next_slot: int | None = None

    def close(self) -> None:
        self._socket.close()

    def map(self, owner: int, slot_bytes: int) -> Mapping:
        """Return the rank's shared memory for snapshots, whose slots have at least `slot_bytes` each."""
        mapping = self._map(owner, slot_bytes)
        assert mapping is not None
        return mapping

    def attach(self, owner: int) -> Mapping | None:
        """Return the snapshot slots that an earlier process of this rank has left; None if there are none."""
        return self._map(owner, 0)

    def _map(self, owner: int, slot_bytes: int) -> Mapping | None:
        answer, fds = self._call(r.Map(owner=owner, slot_bytes=slot_bytes))
        if not fds:
            return None
        try:
            memory = map_memory(fds[0], answer.slot_bytes * answer.slots)
            inode = os.fstat(fds[0]).st_ino
        except OSError:
            _close(fds)
            raise
        self._next_slot = None
        may = threading.Event()
        may.set()
        threading.Thread(target=_populate, args=(memory, fds[0], may), name="hpx-populate", daemon=True).start()
        return Mapping(memory, answer.slot_bytes, answer.slots, inode, may)

    def add_plan(self, plan: Plan) -> None:
        """Send a plan (layout of the rank's state) to the server, so that later saves can refer to its digest."""
        self.ask(r.AddPlan(digest=plan.digest, document=plan.to_json()))

    def begin(self, owner: int, step: int, save_id: str, generation: int, when_busy: r.WhenBusy = "wait") -> int | None:
        """Begin a save. Returns the index of the slot to write, or None if the save must be skipped.

        When `begin` returns, the server has sealed the snapshot of the previous save.
        """
        self.flush()
        if self._next_slot is None:
            self._next_slot = self.ask(r.NextSlot(owner=owner, when_busy=when_busy)).next_slot
        slot, self._next_slot = self._next_slot, None
        if slot is not None:
            self._ask_later(r.Begin(owner=owner, slot=slot, step=step, save_id=save_id, generation=generation))
        return slot

    def seal(self, owner: int, slot: int, record: dict[str, object]) -> None:
        """Ask the server to seal a written slot, and return at once. The server computes the snapshot's checksum during
        the next training step."""
        self._ask_later(r.Seal(owner=owner, slot=slot, record=r.SaveRecord.model_validate(record)))

    def resolve(self, owner: int, save_id: str, *, keep: bool) -> None:
        """If `keep`, confirm a provisional snapshot, so that it may be copied to other tiers; otherwise drop it."""
        self._ask_later(r.Resolve(owner=owner, save_id=save_id, keep=keep))

    def _ask_later(self, request: r.Begin | r.Seal | r.Resolve) -> None:
        with self._speaking:
            self._send(request)
            self._pending.append(request)

    def stepped(self, owner: int) -> None:
        """Report that the rank has made a step without a save. The server measures how much copies slow down training,
        from the times of these reports."""
        self._send(r.Stepped(owner=owner))

    def flush(self) -> None:
        """Wait until the server has answered all requests, and raise the first error among the answers."""
        with self._speaking:
            self._take_answers(wait=True)
            if self._another and self._has_answer():  # a readable socket, but no answer is due: the server has ended
                raise self._gone()

    def busy(self) -> bool:
        """Return whether the server has not answered all requests of a save yet."""
        return not self._take_answers(wait=False)

    def forget_slot(self) -> None:
        """Forget the slot that the server chose for the next save, so that the next save requests another slot. This
        method is called when the assigned slot may have become the slot of the newest snapshot, which must not be
        overwritten, for example after a restore."""
        self._next_slot = None

    def _take_answers(self, *, wait: bool) -> bool:
        """Read the pending answers; without `wait`, read only the answers that have already arrived. Returns whether
        all requests are now answered."""
        errors_met = []
        with self._speaking:
            while self._pending and (wait or self._has_answer()):
                request = self._pending.popleft()
                try:
                    answer, _ = self._answer(request)
                    if isinstance(answer, r.Sealed):
                        self._next_slot = answer.next_slot
                except errors.HyperpodExtError as error:
                    errors_met.append(error)
            if errors_met:
                self._next_slot = None  # the refused save wrote no snapshot, so the server may now assign another slot
                raise errors_met[0]
            return not self._pending

    def _has_answer(self) -> bool:
        with self._naming_its_end(), breaking():
            try:
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return True

    def open(
        self,
        owner: int,
        save_id: str,
        *,
        secret: bytes,
        job: str,
        mapped: Mapping | None = None,
        plan: Plan | None = None,
    ) -> MappedSnapshot:
        """Return a complete snapshot on this node with verified manifest and plan. The snapshot may belong to a rank of
        this node or be a replica.

        Args:
            mapped: this rank's slots, whose pages are already mapped; used instead of a new mapping if the snapshot is
                in one of these slots.
            plan: a plan that the caller already has, and that the server need not send if the snapshot uses it.

        Raises:
            NotFoundError: the snapshot is not on this node.
            CorruptSnapshotError: the manifest of the snapshot belongs to another job or another snapshot.
        """
        request = r.Open(owner=owner, save_id=save_id, known_plan=plan.digest if plan else "")
        held = self._map_image(request, secret, job, mapped, plan)
        if held.manifest.get("rank") != owner or held.manifest.get("save_id") != without_run(save_id)[0]:
            raise errors.CorruptSnapshotError(f"the server sent another snapshot than {save_id} of rank {owner}")
        return held

    def fetch(self, url: str, folder: str, rank: int, *, secret: bytes, job: str) -> MappedSnapshot:
        """Let the server read a rank's snapshot from a durable checkpoint into memory, and return the snapshot."""
        return self._map_image(r.Fetch(url=url, folder=folder, rank=rank), secret, job)

    def fetch_head(self, url: str, folder: str, rank: int, *, secret: bytes, job: str) -> tuple[Manifest, Plan, bool]:
        """Return the verified manifest and layout of a snapshot in a durable tier, and whether its bytes have MACs."""
        head = self.ask(r.FetchHead(url=url, folder=folder, rank=rank))
        check_manifest(head.manifest, secret, job=job)
        return head.manifest, read_plan(head.plan, head.manifest["plan"]), head.bound

    def _map_image(
        self,
        request: r.Open | r.Fetch,
        secret: bytes,
        job: str,
        mapped: Mapping | None = None,
        plan: Plan | None = None,
    ) -> MappedSnapshot:
        answer, fds = self._call(request)
        manifest = answer.manifest
        try:
            check_manifest(manifest, secret, job=job)
            if mapped is not None and mapped.inode == os.fstat(fds[0]).st_ino:
                memory = mapped.memory
            else:  # a private mapping, so that a bug here cannot write to a snapshot that other processes restore
                memory = map_memory(fds[0], os.fstat(fds[0]).st_size, private=True)
        finally:
            _close(fds)
        if plan is None or plan.digest != manifest["plan"]:
            plan = read_plan(answer.plan or {}, manifest["plan"])
        if plan.nbytes != manifest["nbytes"]:
            raise errors.CorruptSnapshotError(
                f"the layout plan of {manifest['save_id']} lists {plan.nbytes} bytes, but the manifest lists "
                f"{manifest['nbytes']}"
            )
        return MappedSnapshot(manifest, plan, memory, answer.offset, answer.bound)

    def ask(self, request: Request[A]) -> A:
        """Send a request and return the answer. The request's answer must not contain a file descriptor."""
        return self._call(request)[0]

    def _call(self, request: Request[A]) -> tuple[A, list[int]]:
        with self._speaking:
            self.flush()
            self._send(request)
            return self._answer(request)

    def _send(self, request: Declared) -> None:
        message = encode(request)
        with self._speaking, self._naming_its_end():
            wire.send(self._socket, message if self._handshake_done else with_version(message))
            self._handshake_done = True

    @contextlib.contextmanager
    def _naming_its_end(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            raise self._gone() from error

    def _wait_answer(self) -> None:
        """Wait for an answer, or for a new server at the same path.

        Checks for a new server, because a killed server that hangs in a disk access keeps its connections open.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while self._another and not poll.poll(1000 * _REPLACED_S):
            try:
                replaced = Path(self._path).stat().st_ino != self._inode
            except FileNotFoundError:
                continue
            if replaced:
                raise ConnectionResetError("another memory server has replaced it")

    def _gone(self) -> errors.JobFailedError:
        kind = MemoryLostError if self._another else errors.JobFailedError
        return kind("the memory server of this node is gone")

    def _answer(self, request: Request[A]) -> tuple[A, list[int]]:
        with self._naming_its_end():
            self._wait_answer()
            answer, fds = wire.receive_fds(self._socket, max_fds=1)
        if answer is None:
            raise self._gone()
        try:
            return read_answer(request, answer), fds
        except Exception:  # the caller does not get the file descriptors, so close them here
            _close(fds)
            raise


def _populate(memory: memoryview, fd: int, may: threading.Event) -> None:
    """Map the pages of this process's slots in advance. Runs in a background thread.

    The thread waits until the server has allocated the pages, because two processes that allocate pages of the same
    memory slow each other down.
    """

    def follow(start: int, end: int) -> bool:
        waited, made = 0.0, -1
        while (now := os.lseek(fd, start, os.SEEK_HOLE)) < end:
            waited, made = (waited + _LOOK_S if now == made else 0.0), now
            if waited > _STOPPED_S:  # no page was allocated: the server has freed the memory, or the kernel is too old
                return False
            time.sleep(_LOOK_S)
        may.wait()
        return True

    try:
        populate(memory, follow, make=False)
    finally:
        os.close(fd)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
