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

_START_S = 60.0
_REPLACED_S = 1.0
"""How often it is looked, while an answer is due, whether another server listens there by now."""
_LOOK_S, _STOPPED_S = 0.01, 10.0
"""How often a worker looks how far its memory is made, and how long it waits where that does not go on."""


class MemoryLostError(errors.JobFailedError):
    """The memory server has ended, and its agent starts another."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """This rank's slots, writable."""

    memory: memoryview
    slot_bytes: int
    slots: int
    inode: int
    """Tells this memory from other."""
    may_populate: threading.Event
    """Cleared while somebody reads: two that make page tables at the same time hinder each other."""


@dataclass(frozen=True, slots=True)
class MappedSnapshot:
    """A snapshot as it lies in this node's memory: its manifest is verified, its bytes are not yet."""

    manifest: Manifest
    plan: Plan
    memory: memoryview
    offset: int
    bound: bool = True
    """False: it is of a durable checkpoint without MACs, so its bytes may be anybody's."""

    @property
    def image(self) -> memoryview:
        return self.memory[self.offset : self.offset + int(self.manifest["nbytes"])]


class MemoryClient:
    """Calls to the memory server. Beginning and sealing are not waited for until the next call after them.

    A request that was sent counts even if this process dies at once: the server reads it all the same,
    and answers nobody's question about this rank before it has.

    A thread may seal, and another make any other call at the same time.

    Raises the server's errors as their own types: MemoryTierFullError, StaleGenerationError, ...

    Args:
        another: whether another server follows one that ends, at the same place. Then calls raise MemoryLostError until
            `connect` is called.
    """

    def __init__(self, path: str, *, another: bool = False) -> None:
        self._path, self._another = path, another
        self._speaking = threading.RLock()
        """Held while a request is sent and, where its answer is waited for, until that is here."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connect()

    def connect(self) -> None:
        """To the server that there is now; where another one follows, wait for that. It knows nothing of what the one
        before was asked."""
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
                    why = f"the memory server of this node is gone, and no other one came within {_START_S:g} s"
                    raise errors.JobFailedError(why, hint="The log of the node's agent says why.") from error
                time.sleep(0.01)
        self._handshake_done = False
        self._pending: deque[r.Begin | r.Seal | r.Resolve] = deque()
        self._next_slot: int | None = None

    def close(self) -> None:
        self._socket.close()

    def map(self, owner: int, slot_bytes: int) -> Mapping:
        """Shared memory with slots of at least `slot_bytes` each."""
        mapping = self._map(owner, slot_bytes)
        assert mapping is not None
        return mapping

    def attach(self, owner: int) -> Mapping | None:
        """The slots that an earlier process of this rank has left, if any."""
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
        """Make a plan known, so that saves can name it."""
        self.ask(r.AddPlan(digest=plan.digest, document=plan.to_json()))

    def begin(self, owner: int, step: int, save_id: str, generation: int, when_busy: r.WhenBusy = "wait") -> int | None:
        """Index of the slot to write from now on; None when the save is to be skipped.

        The save before is sealed when this returns.
        """
        self.flush()
        if self._next_slot is None:
            self._next_slot = self.ask(r.NextSlot(owner=owner, when_busy=when_busy)).next_slot
        slot, self._next_slot = self._next_slot, None
        if slot is not None:
            self._ask_later(r.Begin(owner=owner, slot=slot, step=step, save_id=save_id, generation=generation))
        return slot

    def seal(self, owner: int, slot: int, record: dict[str, object]) -> None:
        """Ask for the seal and return at once; its checksum is computed beside the next step."""
        self._ask_later(r.Seal(owner=owner, slot=slot, record=r.SaveRecord.model_validate(record)))

    def resolve(self, owner: int, save_id: str, *, keep: bool) -> None:
        """Keep a provisional snapshot, which may then be copied to other tiers, or drop it."""
        self._ask_later(r.Resolve(owner=owner, save_id=save_id, keep=keep))

    def _ask_later(self, request: r.Begin | r.Seal | r.Resolve) -> None:
        with self._speaking:
            self._send(request)
            self._pending.append(request)

    def stepped(self, owner: int) -> None:
        """Tell that a step was made, without a save. What copies cost is learned from how long steps take."""
        self._send(r.Stepped(owner=owner))

    def flush(self) -> None:
        """Wait until everything asked for is done, and raise the first thing that went wrong with it."""
        with self._speaking:
            self._take_answers(wait=True)
            if self._another and self._has_answer():  # none is due, so this is its end
                raise self._gone()

    def busy(self) -> bool:
        """Whether a save is still in flight."""
        return not self._take_answers(wait=False)

    def forget_slot(self) -> None:
        """Ask anew which slot is next: a restore may have changed which snapshot counts."""
        self._next_slot = None

    def _take_answers(self, *, wait: bool) -> bool:
        """Read the answers that are due, all or those that are here; returns whether none is due any more."""
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
                self._next_slot = None  # what was refused was not written; the server knows which slot is next
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
        """A whole snapshot on this node, own or replica, its manifest and plan verified.

        It is read through `mapped` where that is the memory it lies in: its pages are at hand already. `plan`
        need not be sent again where it is the snapshot's.

        Raises:
            NotFoundError: it is not held on this node.
            CorruptSnapshotError: the manifest is not this job's, or of another snapshot.
        """
        request = r.Open(owner=owner, save_id=save_id, known_plan=plan.digest if plan else "")
        held = self._map_image(request, secret, job, mapped, plan)
        if held.manifest.get("rank") != owner or held.manifest.get("save_id") != without_run(save_id)[0]:
            raise errors.CorruptSnapshotError(f"another snapshot came than {save_id} of rank {owner}")
        return held

    def fetch(self, url: str, folder: str, rank: int, *, secret: bytes, job: str) -> MappedSnapshot:
        """A snapshot of a durable checkpoint, brought into this node's memory first."""
        return self._map_image(r.Fetch(url=url, folder=folder, rank=rank), secret, job)

    def fetch_head(self, url: str, folder: str, rank: int, *, secret: bytes, job: str) -> tuple[Manifest, Plan, bool]:
        """Manifest and layout of a snapshot in a durable tier, both verified, and whether its bytes have MACs."""
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
            else:  # private, so that no mistake here can write to what others restore from
                memory = map_memory(fds[0], os.fstat(fds[0]).st_size, private=True)
        finally:
            _close(fds)
        if plan is None or plan.digest != manifest["plan"]:
            plan = read_plan(answer.plan or {}, manifest["plan"])
        if plan.nbytes != manifest["nbytes"]:
            raise errors.CorruptSnapshotError(f"the plan of {manifest['save_id']} is for {plan.nbytes} bytes")
        return MappedSnapshot(manifest, plan, memory, answer.offset, answer.bound)

    def ask(self, request: Request[A]) -> A:
        """The answer to a request that no descriptor comes with."""
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
        """Wait for an answer. A server that waits for a disk keeps its connections when it is killed: it has ended when
        another one listens in its place."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while self._another and not poll.poll(1000 * _REPLACED_S):
            try:
                replaced = Path(self._path).stat().st_ino != self._inode
            except FileNotFoundError:
                continue
            if replaced:
                raise ConnectionResetError("another memory server has taken its place")

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
        except Exception:  # whatever it is, the caller is given no descriptor that it could close
            _close(fds)
            raise


def _populate(memory: memoryview, fd: int, may: threading.Event) -> None:
    """Have this process find the pages of its slots, beside whatever it does now. They are made by the server: two that
    make the same pages hinder each other."""

    def follow(start: int, end: int) -> bool:
        waited, made = 0.0, -1
        while (now := os.lseek(fd, start, os.SEEK_HOLE)) < end:
            waited, made = (waited + _LOOK_S if now == made else 0.0), now
            if waited > _STOPPED_S:  # it has given this memory up; or it is an older kernel
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
