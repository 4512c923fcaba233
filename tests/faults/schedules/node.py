"""One node and its ranks, all of them real: a memory server behind a socket, and what a worker does with it."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.checkpoint import overlapped_copy as beside
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.checkpoint.staging import Stager
from hyperpod_ext.runtime.memory_server import upload as upload_module
from hyperpod_ext.runtime.memory_server import uploader as uploader_module
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.protocol.requests import AnyRequest, Seal
from hyperpod_ext.runtime.memory_server.replication import sender as peer_sender
from hyperpod_ext.runtime.memory_server.server import Server
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.runtime.memory_server.uploader import Uploader
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.manifest import save_id_of
from hyperpod_ext.runtime.snapshot.select import Decision
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot
from hyperpod_ext.runtime.state.training_state import ConsistentStep, TrainingState
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.object_store import Cancelled, Entry

from .states import START, Kind, Moment, Objects

JOB = "j"
SECRET = b"0123456789abcdef0123456789abcdef"


class Hurried:
    """The clock of threads that poll and back off, so that seconds of patience pass in milliseconds."""

    FACTOR = 50

    @staticmethod
    def monotonic() -> float:
        return Hurried.FACTOR * time.monotonic()

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(seconds / Hurried.FACTOR)


def speed_up(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Give the background threads that clock, and have all but first saves take their checksum on the way."""
    for module in (uploader_module, upload_module, peer_sender):
        set_attribute(module, "time", Hurried)
    set_attribute(beside, "has_room", lambda *_: True)  # or states as small as these were copied plainly
    set_attribute(upload_module, "_POLL_S", tuple(seconds / Hurried.FACTOR for seconds in upload_module._POLL_S))


class DyingStore(FileStore):
    """A directory store that can stand still, and whose user can die just before or after a call of it.

    SystemExit is what ends a thread in the middle of anything, as a kill ends a process.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.open = threading.Event()
        self.open.set()
        self.die: tuple[str, re.Pattern[str], str] | None = None
        """The call, whose name matches what, and `before` or `after`."""
        self.died = threading.Event()

    def _at(self, call: str, name: str, when: str) -> None:
        if self.died.is_set():
            raise SystemExit
        if self.die is not None and self.die[0] == call and self.die[2] == when and self.die[1].search(name):
            self.died.set()
            raise SystemExit

    def _wait(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        while not self.open.wait(0.002):
            if self.died.is_set():
                raise SystemExit
            if cancelled():
                raise Cancelled

    def put(self, name: str, data: memoryview, crc64nvme: str, **more: Any) -> None:
        self._at("put", name, "before")
        self._wait(more.get("cancelled", lambda: False))
        super().put(name, data, crc64nvme, **more)
        self._at("put", name, "after")

    def put_new(self, name: str, data: bytes, **options: Any) -> bool:
        self._at("put_new", name, "before")
        self._wait(options.get("cancelled", lambda: False))
        created = super().put_new(name, data, **options)
        self._at("put_new", name, "after")
        return created

    def list(self, prefix: str = "", **options: Any) -> list[Entry]:
        self._at("list", prefix, "before")
        return super().list(prefix, **options)

    def delete(self, names: Sequence[str], **options: Any) -> None:
        for name in names:
            self._at("delete", name, "before")
            super().delete([name], **options)
            self._at("delete", name, "after")


class _End:
    """A task that ends the thread of an uploader."""

    generation, save_id, pins = 0, "", {}
    stack = ExitStack()

    @property
    def step(self) -> int:
        raise SystemExit

    def drop(self) -> None:
        """It ends the thread all the same, which has let go of the line by now."""


class SlowServer(Server):
    """A memory server that may be slow to seal."""

    slow_s = 0.0

    def _answer(self, connection: Any, request: AnyRequest) -> Any:
        if isinstance(request, Seal) and self.slow_s:
            time.sleep(self.slow_s)
        return super()._answer(connection, request)


class Node:
    """A node's memory server, and the agent's line to it."""

    def __init__(self, number: int, nodes: int, owners: int, policy: CheckpointPolicy, folder: Path) -> None:
        self.number = number
        usable = lambda: 1 << 40  # noqa: E731
        where: dict[str, Any] = {"node": number, "nodes": nodes, "owners": owners}
        before = set(threading.enumerate())
        self.memory = NodeMemory(policy, job=JOB, secret=SECRET, usable_bytes=usable, **where)
        mine = ("upload", "replicate")
        self._threads = {t for t in set(threading.enumerate()) - before if t.name.startswith(mine)}
        self.stores: list[DyingStore] = []
        for uploader in self.memory.uploaders:
            store = DyingStore(uploader.url)
            uploader.checkpoints.store = store
            self.stores.append(store)
        self._path = folder / f"{number}.{os.urandom(4).hex()}"
        config = RuntimeConfig(name=JOB, nodes=nodes, workers_per_node=owners, checkpoint=policy)
        self.server = SlowServer(self._path, self.memory, config)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen(16)
        self._accepting = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._accepting.start()
        self.address = "127.0.0.1", self.memory.listen("127.0.0.1")
        self.agent = MemoryClient(str(self._path))
        self.lost = False

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self.server._converse, args=(connection,), daemon=True).start()

    def client(self) -> MemoryClient:
        return MemoryClient(str(self._path))

    def lose(self) -> None:
        """The node is gone, with all that it holds and does."""
        self.lost = True
        for store in self.stores:
            store.died.set()
        for uploader in self.memory.uploaders:
            _end(uploader)
        if self.memory.replicator is not None:
            self.memory.replicator.close()
        if self.memory.peer_server is not None:
            self.memory.peer_server.close()
        self.agent.close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()  # else its next accept may be on the descriptor that another node has by then
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def bury(self) -> None:
        """Give its memory back, once no thread of it is left that might use it."""
        for thread in self._threads:
            thread.join(5)
        for regions in (self.memory.own, self.memory.replicas):
            for owner in regions.owners():
                regions.drop(owner)
        self.memory._restore_cache.forget()

    def settle(self, timeout_s: float) -> bool:
        """Until everything due has arrived or failed."""
        return self.memory.wait_idle(timeout_s)


def _end(uploader: Uploader) -> None:
    with uploader._changed:
        for task in uploader._queue.tasks:
            task.stack.close()
        uploader._queue.tasks[:] = [_End()]  # type: ignore[list-item]
        uploader._changed.notify_all()


class _HalfStager(Stager):
    """Copies a part of the state, and its process is dead."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.copied = share, threading.Event()

    def copy(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
        if not sources:
            return
        with torch.no_grad():
            whole = int(len(sources) * self.share)
            for source, destination in zip(sources[: whole + 1], destinations, strict=False):
                count = source.numel() if destination is not destinations[whole] else source.numel() // 2
                destination.view(-1)[:count].copy_(source.view(-1)[:count])
        self.copied.set()
        raise SystemExit


def _exit() -> None:
    raise SystemExit


class Worker:
    """One rank's process, as far as its state goes. What the loop around a training function does, it does."""

    def __init__(self, rank: int, world_size: int, node: Node, kind: Kind, policy: CheckpointPolicy) -> None:
        self.rank, self.world_size, self.node, self.kind, self.policy = rank, world_size, node, kind, policy
        self.client = node.client()
        before = set(threading.enumerate())
        self.checkpointer = Checkpointer(
            self.client,
            rank,
            world_size=world_size,
            job=JOB,
            secret=SECRET,
            overlap=policy.overlap,
            when_busy=policy.when_busy,
        )
        self._threads = [t for t in set(threading.enumerate()) - before if t.name == "hpx-stage"]
        self.objects = Objects(kind, rank, world_size)
        self.state = TrainingState(self.objects.named())
        self.whole: ConsistentStep | None = None
        self.moment: Moment | None = None
        """What its state is now, if it is whole."""
        self.generation = 0
        self.asked: tuple[int, int] | None = None
        """Step and generation of the save that is on its way."""
        self.dead = False

    # --- training -------------------------------------------------------------------------------

    def compute(self, moment: Moment) -> None:
        """Make a step: what is being copied of the one before must be copied first."""
        self.checkpointer.wait_staged()
        self.whole = self.moment = None
        self.objects.write(moment)

    def compute_half(self) -> None:
        """Be caught in the middle of changing the state."""
        self.checkpointer.wait_staged()
        self.whole = self.moment = None
        self.objects.spoil()

    def commit(self, moment: Moment) -> bool:
        """Declare the state whole, and save it when that is due; whether a save began."""
        step = moment.step
        taken = self.state.take()
        self.moment = moment
        self.whole = ConsistentStep(step, save_id_of(self.generation, step), taken.own_digest(), taken.sharing())
        if not self.policy.due(step):
            return False
        own = {id(tensor) for tensor in taken.own}
        return self.checkpointer.save(
            step,
            self.whole.save_id,
            self.generation,
            taken.parts,
            {"sharing": self.whole.sharing},
            own_digest=self.whole.own_digest,
            changing=lambda tensor: id(tensor) in own,
        )

    def die_writing(self, moment: Moment, share: float) -> None:
        """Die when a part of the bytes is in the slot."""
        self.checkpointer.wait_staged()
        stager = self.checkpointer._stager = _HalfStager(share)
        self.checkpointer._room = beside.Room()  # it knows of no save before this one: the stager copies it
        try:
            if self.commit(moment):
                stager.copied.wait(5)
        except SystemExit:
            pass
        self.die()

    def die(self) -> None:
        """kill -9; what was sent to the memory server before still counts."""
        self.dead = True
        self.whole = None
        if self.checkpointer._background is not None:
            self.checkpointer._background._work.put(_exit)
        self.client.close()
        for thread in self._threads:  # a process that is gone writes to no memory, which others may have been given
            thread.join()
        for peer in self.checkpointer._peers.values():
            peer.close()

    # --- from generation to generation ------------------------------------------------------------

    def leave(self) -> None:
        """The generation is over."""
        with suppress(StaleGenerationError, NotFoundError):
            self.checkpointer.flush()

    def check_live(self, save_id: str) -> None:
        if self.whole is None or self.whole.save_id != save_id:
            raise AssertionError(f"rank {self.rank} is to go on from {save_id} and has {self.whole}")

    def restore(self, decision: Decision, addresses: dict[int, tuple[str, int]], workers: dict[int, Worker]) -> str:
        """This rank's part of a decision; returns what went wrong."""
        sources = decision.sources[self.rank]
        first = sources[0]
        if first.kind == "self":
            self.check_live(first.save_id)
            return ""
        self.whole = self.moment = None
        if first.kind == "fresh":
            self.objects.write(START)
            return ""
        try:
            if first.kind == "live":
                workers[first.rank].check_live(first.save_id)
                snapshots = [workers[first.rank].send(decision.step)]
            else:
                snapshots = [self._read(source, addresses) for source in sources]
            self.state.load(snapshots)
        except HyperpodExtError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _read(self, source: Any, addresses: dict[int, tuple[str, int]]) -> Snapshot:
        match source.kind:
            case "memory":
                return self.checkpointer.load(source.rank, source.save_id)
            case "peer":
                return self.checkpointer.read_peer(addresses[source.node], source.rank, source.save_id)
            case _:
                return self.checkpointer.fetch(source.url, source.folder, source.rank)

    def send(self, step: int) -> Snapshot:
        """The live state as another rank receives it."""
        parts = self.state.take().parts
        layout = Layout(parts)
        image = bytearray(layout.plan.nbytes)
        Stager().copy(layout.locals, views(layout.plan, image))
        return Snapshot(step, layout.plan, parts.values, lambda: memoryview(image))
