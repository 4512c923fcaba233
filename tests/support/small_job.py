"""A job without its training processes: real memory servers, and in this process its ranks and its coordinator.

Ranks are real `Run`s over real links and checkpointers, the coordinator is the real `Membership`; only agents and
collectives are left out. So a fault in any tier, and what every rank makes of it, costs a second to try.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from served import JOB, SECRET, Served, serve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError, NoCheckpointError
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.control_plane.stop_at_step import StopAtStep
from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.snapshot.image import Layout
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.select import Decision, Offer
from hyperpod_ext.runtime.state.training_state import TrainingState
from hyperpod_ext.runtime.training.restore import JobLink
from hyperpod_ext.runtime.training.run import Run

MEMORY = {"kind": "memory"}
PEER = {"kind": "peer", "every_steps": 1}

IDLE_S = 100.0
"""A request to S3 that is never answered is given up after 30 s, and made again: one is not what this is about."""

State = dict[str, torch.Tensor]
"""Every tensor of the job, put together from its shards."""


class Vote:
    """What stands for the coordinator in one generation, and for every rank's line to it."""

    def __init__(
        self, membership: Membership, answered: Callable[[Membership, list[m.Action]], list[m.Action]]
    ) -> None:
        self.membership, self._answered = membership, answered
        self.decision: Decision | None = None
        self.errors: list[tuple[int, str]] = []
        self.events: list[dict[str, Any]] = []
        self.go: Callable[[int], None] = lambda step: None
        """Called when all have restored a step, before anybody goes on."""
        self._outcomes: dict[int, tuple[int | None, Decision | None] | HyperpodExtError] = {}
        self._changed = threading.Condition()

    def restored(self, rank: int, attempt: int, error: str) -> tuple[int | None, Decision | None]:
        with self._changed:
            if error:
                self.errors.append((rank, error))
            generation = self.membership.generation
            reported = self.membership.restore_reported(rank, generation, attempt, error)
            for command in self._answered(self.membership, reported):
                match command:
                    case m.Go(step):
                        self.go(step)
                        self._outcomes[attempt] = (step, None)
                    case m.Restore(_, decision):
                        self.decision = decision
                        self._outcomes[attempt] = (None, decision)
                    case m.Fail(_, message):
                        self._outcomes[attempt] = NoCheckpointError(message)
                self._changed.notify_all()
            assert self._changed.wait_for(lambda: attempt in self._outcomes, 60)
            outcome = self._outcomes[attempt]
            if isinstance(outcome, HyperpodExtError):
                raise outcome
            return outcome


@dataclass
class _Line:
    """A rank's line to the coordinator."""

    vote: Vote
    rank: int
    aborted = False
    stop_at_step = StopAtStep()  # nobody asks
    safe_to_commit = False  # no generation ends while it trains

    def restored(self, attempt: int, error: str) -> tuple[int | None, Decision | None]:
        return self.vote.restored(self.rank, attempt, error)

    def event(self, event: str, **fields: Any) -> None:
        self.vote.events.append({"event": event, **fields})


@dataclass
class Rank:
    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    checkpointer: Checkpointer
    run: Run
    link: JobLink
    loop: Iterator[int] | None = None
    _layout: Layout | None = None
    _memory: list[Any] = field(default_factory=list)
    """Where the tensors of that layout are. The layout keeps them, so nothing else comes to lie there."""

    def layout(self) -> Layout:
        parts = TrainingState({"model": self.model, "optimizer": self.optimizer}).take().parts
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parts.tensors]
        memory = [(t.shape, own.data_ptr(), own.shape) for t, own in zip(parts.tensors, local, strict=True)]
        if self._layout is None or memory != self._memory:
            self._layout, self._memory = Layout(parts), memory
        return self._layout

    def make_step(self, step: int) -> None:
        """A step whose numbers follow from the step and the place of each element alone."""
        for position, parameter in enumerate(self.model.parameters()):
            if not parameter.requires_grad:
                continue
            parameter.grad = torch.full_like(parameter, (position + 1) * ((step * 7) % 5 - 2))
        self.optimizer.step()

    def commit(self, step: int) -> None:
        """End a step, as the loop does."""
        self.run._commit(step)

    def restore_also(self, **objects: Any) -> None:
        """Have these in its state, too."""
        self.run._state._objects = {**self.run._state._objects, **objects}


@dataclass
class SmallJob:
    """A job of `nodes` nodes of `workers` ranks each, over `tiers`."""

    folder: Path
    tiers: Sequence[dict[str, Any]] = (MEMORY,)
    nodes: int = 2
    workers: int = 1
    kind: str = "sharded"
    """`sharded`: FSDP2 over all ranks; `hybrid`: two replicas of it; `same`: everything on every rank;
    `large`: the same, and three slots of it fill a budget of 1 MiB to more than three quarters; `huge`: FSDP2 over all
    ranks, 530 MB with AdamW's moments; `adapted`: FSDP2 over all ranks, with 4 MB of frozen parameters."""
    policy: dict[str, Any] = field(default_factory=dict)
    servers: dict[int, Served] = field(default_factory=dict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    generation: int = 0
    vote: Vote | None = None
    said: list[m.Log] = field(default_factory=list)
    """Events of the last decision."""
    states: dict[int, State] = field(default_factory=dict)
    """What the whole job held at each step."""
    _machines: Iterator[int] = field(default_factory=itertools.count)
    _stack: ExitStack = field(default_factory=ExitStack)
    peers: dict[int, tuple[str, int]] = field(default_factory=dict)

    # --- nodes ----------------------------------------------------------------------------------

    def start(self) -> SmallJob:
        """Start the nodes' memory servers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for node in range(self.nodes):
            self.start_node(node)
        self.meet()
        return self

    def start_node(self, node: int) -> None:
        place = self.folder / str(next(self._machines))
        running = serve(place, *self.tiers, node=node, nodes=self.nodes, workers=self.workers, **self.policy)
        self.servers[node] = self._stack.enter_context(running)

    def meet(self) -> None:
        """Tell the servers of each other."""
        self.peers = {
            node: ("127.0.0.1", server.ask("listen", host="127.0.0.1")["port"]) for node, server in self.servers.items()
        }
        parity = any(tier.get("parity") for tier in self.tiers)
        ranks = {str(node): [node * self.workers + each for each in range(self.workers)] for node in self.peers}
        group = {"group": ranks} if parity else {}
        for server in self.servers.values():
            server.ask("peers", peers={str(n): list(a) for n, a in self.peers.items()}, domains={}, **group)

    def lose_node(self, node: int) -> None:
        """kill -9 of its memory server, and with it of all that the node held."""
        self.servers.pop(node).kill()

    def stop(self) -> None:
        self.end_trainers()
        with suppress(ProcessLookupError):
            self._stack.close()

    # --- trainers -------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers

    def begin_trainers(self) -> None:
        """Fresh processes of every rank, which know nothing."""
        self.end_trainers()
        document = {"name": JOB, "nodes": self.nodes, "workers_per_node": self.workers}
        document["checkpoint"] = {"tiers": tuple(self.tiers), **self.policy}
        document["restart"] = {"compare_replicas_every": 0}  # there are no groups to do it in
        config = RuntimeConfig.model_validate(document)
        for number in range(self.world_size):
            model = self.build(number)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
            node = number // self.workers
            checkpointer = Checkpointer(
                self.servers[node].client(),
                number,
                world_size=self.world_size,
                job=JOB,
                secret=SECRET,
                overlap=config.checkpoint.overlap,
                when_busy=config.checkpoint.when_busy,
            )
            link = JobLink(_Line(Vote(Membership({}, Budgets(0)), self._answered), number), number, checkpointer)  # type: ignore[arg-type]
            run = Run(config, number, number % self.workers, link, checkpointer)
            run._unsaved.see = lambda *_: None  # state of other ranks, and of the test, is within its reach here
            self.ranks[number] = Rank(number, model, optimizer, checkpointer, run, link)

    def end_trainers(self) -> None:
        """kill -9 of every trainer."""
        for rank in self.ranks.values():
            rank.checkpointer._client.close()
        self.ranks.clear()

    def build(self, number: int) -> nn.Module:
        torch.manual_seed(7)
        inputs, width, outputs = (4700, 4700, 4700) if self.kind == "huge" else (7, 5, 3)
        model = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.Linear(width, outputs, bias=False))
        if self.kind == "large":
            model = nn.Sequential(nn.Linear(150, 150))
        if self.kind in ("same", "large"):
            return model
        if self.kind == "adapted":
            model.append(nn.Linear(1000, 1000, bias=False).requires_grad_(False))
        with _as_rank(number, self.world_size):
            # named after the rank: torch remembers what it computed for a mesh, and here one process is all ranks
            name = f"_{number}_of_{self.world_size}"
            if self.kind == "hybrid":
                shape, names = (2, self.world_size // 2), (f"replicate{name}", f"shard{name}")
            else:
                shape, names = (self.world_size,), (f"shard{name}",)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            for layer in (model[0], *model[2:]):
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)

    def _answered(self, membership: Membership, commands: list[m.Action]) -> list[m.Action]:
        """What follows once the durable tiers have said what they hold, as often as that is asked."""
        while commands and isinstance(commands[0], m.AskDurable):
            found = self.servers[0].ask("durable", exclude=commands[0].exclude)
            stored = [Offer.of_all(summary) for summary in found["checkpoints"]]
            commands = membership.durable_answered(stored, found["generation"], tuple(found["problems"]))
        return commands

    def resume(self, *, committed: int = 0) -> int:
        """Fresh trainers agree on a step and restore it; returns the step. `committed`: what ranks had told before.

        Raises:
            NoCheckpointError: there is none, as the job would say.
        """
        self.begin_trainers()
        nodes = {number: number // self.workers for number in self.ranks}
        durable = any(tier["kind"] in ("file", "s3") for tier in self.tiers)
        membership = Membership(nodes, Budgets(3), durable=durable, generation=self.generation + 1)
        membership.step_committed(committed)
        self.vote = Vote(membership, self._answered)
        commands: list[m.Action] = []
        for number, node in nodes.items():
            held = self.servers[node].ask("held", owner=number, pid=os.getpid())
            offers = [Offer.of_memory(summary, node) for summary in held["snapshots"]]
            offers += [Offer.of_piece(piece, node) for piece in held["pieces"]]
            commands += membership.join(number, None, offers)
        *said, command = self._answered(membership, commands)
        self.said = [log for log in said if isinstance(log, m.Log)]
        if isinstance(command, m.Fail):
            raise NoCheckpointError(command.message, hint=command.hint)
        assert isinstance(command, m.Begin)
        self.generation = command.generation
        self.vote.decision, self.vote.go = command.decision, self._enter
        for server in self.servers.values():
            server.ask("fence", generation=self.generation)
        keys = dist.HashStore()  # one a generation
        errors = self._in_threads(lambda rank: self._restore(rank, command, keys))
        if errors:
            raise errors[0]
        steps = {rank.run.step for rank in self.ranks.values()}
        assert len(steps) == 1, f"ranks restored different steps: {steps}"
        return steps.pop()

    def _enter(self, step: int) -> None:
        """The generation begins at `step`; until all had it, one before might have been needed yet."""
        assert self.vote is not None
        assert self.vote.decision is not None
        fields = {"generation": self.generation, "step": step, "run": f"run-{id(self)}"}
        for server in self.servers.values():
            server.ask("fence", stored=self.vote.decision.stored, **fields)

    def _restore(self, rank: Rank, begin: m.Begin, keys: dist.Store) -> None:
        assert self.vote is not None
        rank.link._session = _Line(self.vote, rank.number)  # type: ignore[assignment]
        rank.link.enter(begin.decision, keys, self.peers)  # type: ignore[arg-type]
        rank.run.enter(begin.generation, fresh=begin.decision.source(rank.number).kind == "fresh")
        rank.run.restore(model=rank.model, optimizer=rank.optimizer)

    def _in_threads(self, work: Any) -> list[BaseException]:
        errors: list[BaseException] = []

        def guarded(rank: Rank) -> None:
            try:
                work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in self.ranks.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def train(self, last: int, *, settle: bool = True) -> None:
        """Make the steps up to `last` in lockstep; `settle`: each has reached every tier before the next."""
        loops = [rank.run.steps(last) for rank in self.ranks.values()]
        for _ in itertools.zip_longest(*loops):
            self._remember()
            if settle:
                self.settle()
            for rank in self.ranks.values():
                if rank.run.step < last:
                    rank.make_step(rank.run.step + 1)
        self._remember()
        self.settle()

    def _remember(self) -> None:
        (step,) = {rank.run.step for rank in self.ranks.values()}
        self.states[step] = self.whole_state()

    def settle(self) -> None:
        """Until all that is due is sealed and has arrived everywhere."""
        for rank in self.ranks.values():
            rank.checkpointer.flush()
        for server in self.servers.values():
            idle = server.ask("wait_idle", timeout_s=IDLE_S)["idle"]
            assert idle, f"still on its way: {server.ask('status')}"

    def whole_state(self) -> State:
        """All tensors of the job, copied, put together from every rank's shards."""
        whole: State = {}
        filled: dict[str, torch.Tensor] = {}
        for rank in self.ranks.values():
            layout = rank.layout()
            for item, local in zip(layout.plan.items, layout.locals, strict=True):
                into = whole.setdefault(item.fqn, torch.zeros(item.shape, dtype=local.dtype))
                mask = filled.setdefault(item.fqn, torch.zeros(item.shape, dtype=torch.bool))
                place = tuple(slice(o, o + s) for o, s in zip(item.offsets, item.sizes, strict=True))
                if mask[place].all() and mask[place].numel():
                    assert torch.equal(into[place], local), f"two ranks hold different {item.fqn}"
                into[place], mask[place] = local, True
        assert all(mask.all() for mask in filled.values())
        return whole

    def assert_holds(self, step: int) -> None:
        """Every rank holds what the job held at `step`, bit for bit."""
        now, then = self.whole_state(), self.states[step]
        assert now.keys() == then.keys()
        for name, tensor in now.items():
            assert torch.equal(tensor, then[name]), name

    # --- harm -----------------------------------------------------------------------------------

    def image(self, node: int, owner: int, step: int, *, replica: bool = False) -> Image:
        """A snapshot in a node's memory, writable."""
        server = self.servers[node]
        summary = next(
            one
            for one in server.ask("held")["snapshots"]
            if (one["rank"], one["step"], one["replica"]) == (owner, step, replica)
        )
        held = server.client().open(owner, summary["save_id"], secret=SECRET, job=JOB)
        name = f"memfd:hpx-{'replica' if replica else 'own'}-{owner}"
        for link in Path(f"/proc/{server.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if name == str(link.readlink()).removeprefix("/").partition(" ")[0]:
                    descriptor = os.open(link, os.O_RDWR)
                    try:
                        memory = mmap.mmap(descriptor, 0)
                    finally:
                        os.close(descriptor)
                    if memory[held.offset : held.offset + held.plan.nbytes] == bytes(held.image):
                        return Image(held.plan, memory, held.offset)
        raise AssertionError(f"node {node} has no {name}")

    def images(self, owner: int) -> list[Image]:
        """All that any memory holds of a rank."""
        return [
            self.image(node, owner, summary["step"], replica=summary["replica"])
            for node, server in self.servers.items()
            for summary in server.ask("held")["snapshots"]
            if summary["rank"] == owner
        ]


@dataclass
class Image:
    """Bytes of one snapshot, and what lies where in them."""

    plan: Plan
    memory: Any
    offset: int = 0

    def flip(self, where: str) -> None:
        """Flip one bit in a region of the file."""
        place = self.offset + place_of(self.plan, where)
        self.memory[place] ^= 1


def trained(job: SmallJob, last: int) -> SmallJob:
    """A job that has begun from nothing and made `last` steps."""
    assert job.resume() == 0
    job.train(last)
    return job


def relaunched(make_job: Callable[..., SmallJob], before: SmallJob, **changes: Any) -> SmallJob:
    """The job started again: new memory servers, which hold nothing."""
    before.stop()
    shape = {"nodes": before.nodes, "workers": before.workers, "kind": before.kind, "policy": before.policy}
    job = make_job(*before.tiers, **{**shape, **changes})
    job.states, job.generation = before.states, before.generation
    return job


def replaced(job: SmallJob, *nodes: int) -> SmallJob:
    """Nodes lost as a whole, at once, and other machines in their places."""
    for node in nodes:
        job.lose_node(node)
    for node in nodes:
        job.start_node(node)
    job.meet()
    return job


REGIONS = ("first byte", "archive header", "data", "archive directory", "gap", "last byte")


def place_of(plan: Plan, where: str) -> int:
    """A byte of this region of the image."""
    items = [item for item in plan.items if item.nbytes]
    item = items[len(items) // 2]
    match where:
        case "first byte":
            return 0
        case "archive header":
            return item.start + 10
        case "data":
            return item.data + item.nbytes // 2
        case "archive directory":
            return item.data + item.nbytes + (item.end - item.data - item.nbytes) // 2
        case "gap":
            return next(a.end for a, b in itertools.pairwise(plan.items) if b.start > a.end)
        case "last byte":
            return plan.nbytes - 1
    raise ValueError(where)


@contextmanager
def _as_rank(number: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
