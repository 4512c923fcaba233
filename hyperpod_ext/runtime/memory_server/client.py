"""A worker's connection to its node's memory server."""

from __future__ import annotations

import mmap
import os
import socket
from dataclasses import dataclass

from hyperpod_ext import errors
from hyperpod_ext.runtime import wire
from hyperpod_ext.runtime.checkpoint.manifest import Manifest, check_bytes, check_manifest


@dataclass(frozen=True, slots=True)
class Mapping:
    """This rank's slots, writable."""

    memory: mmap.mmap
    slot_bytes: int
    slots: int


class MemoryClient:
    """Calls to the memory server. Beginning and sealing are not waited for until the next call after them.

    A request that was sent counts even if this process dies at once: the server reads it all the same,
    and answers nobody's question about this rank before it has.

    Raises the server's errors as their own types: MemoryTierFullError, StaleGenerationError, ...
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._pending = 0
        self._next_slot: int | None = None
        self._slots = 1

    def map(self, owner: int, slot_bytes: int) -> Mapping:
        """Shared memory with two slots of at least `slot_bytes` each."""
        answer, fds = self._call({"op": "map", "owner": owner, "slot_bytes": slot_bytes})
        try:
            memory = mmap.mmap(fds[0], answer["slot_bytes"] * answer["slots"])
        finally:
            _close(fds)
        self._next_slot, self._slots = int(answer["next_slot"]), int(answer["slots"])
        return Mapping(memory, answer["slot_bytes"], answer["slots"])

    def begin(self, owner: int, step: int, save_id: str, generation: int) -> int:
        """Index of the slot to write from now on. The save before is sealed when this returns."""
        self.flush()
        if self._next_slot is None:
            self._next_slot = int(self._call({"op": "next_slot", "owner": owner})[0]["next_slot"])
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % self._slots
        request = {"op": "begin", "owner": owner, "slot": slot, "step": step, "save_id": save_id}
        self._ask_later({**request, "generation": generation})
        return slot

    def seal(self, owner: int, slot: int, record: dict[str, object]) -> None:
        """Ask for the seal and return at once; its checksum is computed beside the next step."""
        self._ask_later({"op": "seal", "owner": owner, "slot": slot, "record": record})

    def _ask_later(self, request: wire.Message) -> None:
        wire.send(self._socket, request)
        self._pending += 1

    def flush(self) -> None:
        """Wait until everything asked for is done, and raise the first thing that went wrong with it."""
        self._take_answers(wait=True)

    def busy(self) -> bool:
        """Whether a save is still in flight."""
        return not self._take_answers(wait=False)

    def _take_answers(self, *, wait: bool) -> bool:
        """Read the answers that are due, all or those that are here; returns whether none is due any more."""
        errors_met = []
        while self._pending and (wait or self._has_answer()):
            self._pending -= 1
            try:
                self._answer()
            except errors.HyperpodExtError as error:
                errors_met.append(error)
        if errors_met:
            self._next_slot = None  # what was refused was not written; the server knows which slot is next
            raise errors_met[0]
        return not self._pending

    def _has_answer(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def read(self, owner: int, save_id: str, *, secret: bytes, job: str) -> tuple[Manifest, memoryview]:
        """Manifest and bytes of a sealed snapshot, both verified before they are returned.

        Raises:
            NotFoundError: it is not held on this node.
            CorruptSnapshotError: the manifest is not this job's, or the bytes are not the manifest's.
        """
        answer, fds = self._call({"op": "open", "owner": owner, "save_id": save_id})
        manifest, offset = answer["manifest"], int(answer["offset"])
        try:
            check_manifest(manifest, secret, job=job)
            memory = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
        finally:
            _close(fds)
        data = memoryview(memory)[offset : offset + int(manifest["nbytes"])]
        check_bytes(manifest, data)
        return manifest, data

    def _call(self, request: wire.Message) -> tuple[wire.Message, list[int]]:
        self.flush()
        wire.send(self._socket, request)
        return self._answer()

    def _answer(self) -> tuple[wire.Message, list[int]]:
        answer, fds = wire.receive_fds(self._socket, max_fds=1)
        if answer is None:
            raise errors.JobFailedError("the memory server of this node is gone")
        if "error" in answer:
            _close(fds)
            raise error_of(answer["error"])
        return answer, fds


def error_of(described: wire.Message) -> errors.HyperpodExtError:
    """The error that `HyperpodExtError.to_json` described on the other side."""
    kind = getattr(errors, str(described.get("code")), errors.HyperpodExtError)
    if not (isinstance(kind, type) and issubclass(kind, errors.HyperpodExtError)) or issubclass(
        kind, errors.ConfigError
    ):
        kind = errors.HyperpodExtError
    return kind(str(described.get("message")), hint=str(described.get("hint") or ""))


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
