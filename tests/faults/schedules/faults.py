"""What may go wrong, each at a random point. A fault that is not possible in the job at hand does nothing."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hyperpod_ext.errors import HyperpodExtError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.snapshot.manifest import save_id_of

from .node import Node
from .oracle import raw_slots
from .states import Moment
from .world import SETTLE_S, World

Fault = Callable[[World], None]


# --- ranks ----------------------------------------------------------------------------------------


def die_in_a_step(world: World, victims: list[int]) -> None:
    """These ranks die somewhere in a step; of the others each is before it, in the middle of it, or done with it."""
    rng, moment = world.rng, world.next_moment()
    for rank in world.shuffled(world.workers):
        worker = world.workers[rank]
        if rank in victims:
            _die(world, rank, moment)
            continue
        match rng.choice(["before", "half", "done", "done"]):
            case "before":
                pass
            case "half":
                worker.compute_half()
            case "done":
                worker.compute(moment)
                world.commit(rank, moment)


def _die(world: World, rank: int, moment: Moment) -> None:
    worker, how = world.workers[rank], world.rng.choice(["before", "computed", "writing", "writing", "asked", "asked"])
    world.say(f"rank {rank} dies {how} at {moment.step}")
    if how == "before":
        world.seal_promised(rank) if not world.policy.overlap else None
        worker.die()
        return
    worker.compute(moment)
    if how == "computed":
        world.seal_promised(rank)
        worker.die()
    elif how == "writing":
        world.seal_promised(rank)
        if world.policy.due(moment.step):
            world.promises.begins(rank)
        worker.die_writing(moment, world.rng.random())
    else:
        worker.node.server.slow_s = world.rng.choice([0.0, 0.003])
        world.commit(rank, moment)
        worker.checkpointer.wait_staged()
        world.seal_promised(rank)
        worker.die()


def a_rank_dies(world: World) -> None:
    rank = world.rng.choice(sorted(world.workers))
    die_in_a_step(world, [rank])
    world.died(rank)


def several_ranks_die(world: World) -> None:
    ranks = world.rng.sample(sorted(world.workers), world.rng.randint(1, len(world.workers)))
    die_in_a_step(world, ranks)
    generation = world.membership.generation
    for rank in ranks:
        world.died(rank, generation)


def a_rank_raises(world: World) -> None:
    """An exception of the script: its process lives on, with a state that may be half changed."""
    rank = world.rng.choice(sorted(world.workers))
    if world.rng.random() < 0.5:
        world.workers[rank].compute_half()
    world.raised(rank)


# --- nodes ----------------------------------------------------------------------------------------


def lose_nodes(world: World, numbers: list[int]) -> None:
    generation = world.membership.generation
    if len(numbers) > 1:
        world.promises.protected = None
    for number in numbers:
        world.replace_node(number)
    for number in numbers:
        for rank in world.ranks_of(number):
            world.died(rank, generation)


def a_node_is_lost(world: World) -> None:
    """At any moment of the copying that goes on."""
    if world.rng.random() < 0.5:
        rest(world)
    if world.rng.random() < 0.5:
        world.train(1)
    lose_nodes(world, [world.rng.choice(sorted(world.nodes))])


def two_nodes_are_lost(world: World) -> None:
    lose_nodes(world, world.rng.sample(sorted(world.nodes), min(2, len(world.nodes))))


def a_peer_is_lost_while_it_receives(world: World) -> None:
    """The holder of replicas goes when the bytes are there and the replica is not."""
    number = world.rng.choice(sorted(world.nodes))
    server = world.nodes[number].memory.peer_server
    if not world.setting.peer_every or server is None:
        return
    reached = []

    def end(token: int) -> None:
        reached.append(token)
        raise ConnectionError("this node is gone")

    # a node that sends and does not receive parts what is kept from what is received: no step need be whole then
    world.promises.protected = None
    server._incoming.end = end  # type: ignore[method-assign]
    for _ in range(world.setting.peer_every + 1):
        world.train(1)
    until = time.monotonic() + 0.05
    while not reached and time.monotonic() < until:
        time.sleep(0.001)
    lose_nodes(world, [number])


def an_upload_is_cut_off(world: World) -> None:
    """A memory server dies between two steps of its upload, and its node with it."""
    if world.root is None:
        return
    number = world.rng.choice(sorted(world.nodes))
    call, name = world.rng.choice(
        [
            ("put_new", r"generations/"),
            ("put_new", r"/plan-"),
            ("put_new", r"/node-"),
            ("put", r"/__\d+_0"),
            ("put_new", r"/done-"),
            ("put", r"/__0_1"),
            ("put", r"\.metadata"),
            ("put_new", r"/manifest"),
            ("delete", r"manifest\.json"),
            ("delete", r"__\d+_0"),
            ("delete", r"(node|done)-"),
        ]
    )
    store = world.nodes[number].stores[0]
    store.die = call, re.compile(name), world.rng.choice(["before", "after"])
    for _ in range(world.setting.durable_every + world.rng.randint(0, 1)):
        world.train(1)
        if world.setting.when_busy == "wait":  # a rank would wait for a thread that no longer is, as none does in life
            while not (store.died.is_set() or world.nodes[number].settle(0.005)):
                pass
        if store.died.wait(0.005):
            break
    if not store.died.wait(0.03):
        store.die = None
        return
    world.say(f"node {number} dies at {call} {name} {store.died}")
    lose_nodes(world, [number])


def the_store_stands_still(world: World) -> None:
    """For some steps nothing is written to the durable tier; what waits for it holds slots."""
    if world.root is None or world.setting.when_busy == "wait":
        return
    stores = [node.stores[0] for node in world.nodes.values()]
    for store in stores:
        store.open.clear()
    world.promises.protected = None
    world.train(world.rng.randint(1, 6))
    if world.rng.random() < 0.5:
        a_rank_dies(world)
        world.settle_membership()
    for store in stores:
        store.open.set()


# --- bytes ----------------------------------------------------------------------------------------


def a_bit_flips(world: World) -> None:
    """In a snapshot in memory, and then somebody needs one."""
    rest(world)
    found = []
    for node in world.nodes.values():
        for name, regions in (("own", node.memory.own), ("replica", node.memory.replicas)):
            for owner, each in regions._regions.items():
                for region in each:
                    for index, slot in enumerate(region.slots):
                        if slot.sealed:
                            found.append((node, name, owner, region, index, slot))
    for node, name, owner, region, index, slot in world.rng.sample(found, min(len(found), world.rng.randint(1, 2))):
        # what is around a tensor's bytes, its rank writes once: there a flip would stay for later snapshots
        item = world.rng.choice([i for i in node.memory.plans[slot.manifest["plan"]].items if i.nbytes])
        at = index * region.slot_bytes + item.data + world.rng.randrange(item.nbytes)
        region.memory[at] ^= 1 << world.rng.randrange(8)
        world.flipped.append(slot)
        commit = slot.step, slot.generation
        if name == "own":
            world.promises.damaged(owner, commit)
        if commit == world.promises.protected:
            world.promises.protected = None
        world.say(f"a bit flips in {name} snapshot {commit} of rank {owner} on node {node.number}")
    world.rng.choice([a_rank_dies, several_ranks_die, a_node_is_lost])(world)


def _files(root: Path) -> list[Path]:
    wanted = re.compile(r"(manifest|plan-\w+)\.json|__\d+_0\.distcp")
    found: list[Path] = []
    for folder in root.glob("step-*"):
        with suppress(FileNotFoundError):  # where nodes wait for a lost one, the copying goes on, and so does pruning
            found += [path for path in folder.iterdir() if wanted.fullmatch(path.name)]
    return sorted(found)


def _damage(path: Path, how: str, rng: random.Random) -> None:
    if how == "remove":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if not data:
        return  # cut off by an earlier fault
    if how == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def a_file_is_damaged(world: World) -> None:
    """In the durable tier: a bit flips, the end is cut off, or it is gone; and then the job needs it."""
    rest(world)
    if world.root is None or not (files := _files(world.root)):
        return
    for path in world.rng.sample(files, min(len(files), world.rng.randint(1, 3))):
        how = world.rng.choice(["flip", "cut", "remove"])
        world.say(f"{how} {path.parent.name}/{path.name}")
        with suppress(FileNotFoundError):  # pruned since
            _damage(path, how, world.rng)
    world.rng.choice([the_job_is_started_anew, all_nodes_are_lost, a_rank_dies])(world)


# --- everything -----------------------------------------------------------------------------------


def all_nodes_are_lost(world: World) -> None:
    if world.rng.random() < 0.7:
        rest(world)
    lose_nodes(world, sorted(world.nodes))


def the_job_is_started_anew(world: World) -> None:
    """By another number of nodes, maybe; of the run before only what is durable is left, and maybe its servers."""
    rng = world.rng
    if rng.random() < 0.7:
        rest(world)
    for worker in world.workers.values():
        worker.die()
    linger = rng.random() < 0.3 and world.root is not None
    for node in world.nodes.values():
        if linger:  # nobody has told them that the job has ended
            node.stores[0].open.clear()
            continue
        node.lose()
    world.graveyard += world.nodes.values()
    before = list(world.nodes.values())
    sizes = [(world.setting.nodes, world.setting.per_node)] * 2 + [(2, 1), (2, 2), (3, 1), (1, 2), (4, 1)]
    nodes, per_node = rng.choice(sizes)
    world.say(f"the job is started anew on {nodes} x {per_node}")
    world.start(nodes, per_node)
    if linger:
        world.train(rng.randint(0, 2))
        if rng.random() < 0.5:
            rest(world)
        for node in before:
            node.stores[0].open.set()
        time.sleep(0.01)


def a_store_fails_and_comes_back(world: World) -> None:
    """The newest checkpoint cannot be read once, so the job goes on from an older one; then it starts anew."""
    if world.root is None:
        return
    world.train(world.setting.durable_every)
    rest(world)
    world.store_fails = True
    world.rng.choice([the_job_is_started_anew, all_nodes_are_lost])(world)
    world.settle_membership()
    world.store_fails = False
    world.train(world.rng.randint(0, world.setting.durable_every))
    rest(world)
    world.rng.choice([the_job_is_started_anew, all_nodes_are_lost])(world)


def rest(world: World) -> None:
    """Wait until what is due has arrived; what has replicas then is protected from the loss of a node."""
    for rank, worker in world.workers.items():
        if not worker.dead:
            worker.checkpointer.flush()
            world.seal_promised(rank)
    # nodes that are to wait for a lost one's part, or for one that another left out, do so for minutes
    waits = world.disturbed or world.setting.when_busy == "skip"
    quiet = [node.settle(0.03 if waits else SETTLE_S) for node in world.nodes.values()]
    if not all(quiet) and not waits:
        status = [node.memory.status()["copying"] for node in world.nodes.values()]
        uploaders = [uploader for node in world.nodes.values() for uploader in node.memory.uploaders]
        works = [(uploader._queue.current, uploader._queue.tasks, uploader._queue._gathering) for uploader in uploaders]
        raise AssertionError(f"the copying does not come to an end: {status} {works}")
    # those that skip leave steps out each for itself, so their replicas may be of different ones
    meet = world.setting.when_busy != "skip"
    if meet and world.setting.peer_every and world.setting.kind.sharing != "same" and len(world.nodes) > 1:
        copies = world.look()
        whole = [c for c in copies.intact if _has_replicas(world, c)]
        world.promises.rested(max(whole, key=lambda c: (c[1], c[0]), default=None))


def _has_replicas(world: World, commit: tuple[int, int]) -> bool:
    """Whether every rank's snapshot is intact in its own node's memory and in another's."""
    places: dict[tuple[str, int], int] = {}
    for node in world.nodes.values():
        for name, owner, slot, data in raw_slots(node):
            if (slot.step, slot.generation) == commit and data == world.copies.image(commit, owner):
                places[name, owner] = node.number
    return all((name, rank) in places for name in ("own", "replica") for rank in world.workers)


# --- those that should not be there any more ------------------------------------------------------


def _record(save_id: str) -> r.SaveRecord:
    return r.SaveRecord(
        save_id=save_id, world_size=1, own_digest="", plan="?", nbytes=100, values=[], extras={}, saved_at=0.0
    )


def a_zombie_speaks(world: World) -> None:
    """A process that was given up goes on as if nothing had happened: it is refused, and changes nothing."""
    old = world.rng.choice(sorted(world.workers))
    generation = world.membership.generation
    zombie = world.workers[old].node.client()
    mapped = zombie.attach(old)
    a_rank_dies(world)
    world.settle_membership()
    node = world.nodes[old // world.per_node]
    if mapped is None or zombie is None or node is not world.workers[old].node:
        zombie.close()
        return
    if world.membership.generation == generation:
        zombie.close()
        return
    world.workers[old].checkpointer.flush()
    before = _own(node, old)
    step = max(0, world.step + world.rng.randint(-1, 2))
    with_begin, slot, save_id = (
        world.rng.random() < 0.5,
        world.rng.randrange(mapped.slots),
        save_id_of(generation, step),
    )
    try:
        if with_begin:
            zombie.ask(r.Begin(owner=old, slot=slot, step=step, save_id=save_id, generation=generation))
        else:
            zombie.ask(r.Seal(owner=old, slot=slot, record=_record(save_id)))
    except (StaleGenerationError, NotFoundError):
        pass
    except HyperpodExtError as error:
        raise AssertionError(f"a zombie met {error!r}") from error
    else:
        raise AssertionError("a zombie was not refused")
    finally:
        zombie.close()
    assert _own(node, old) == before, "a zombie changed what is held"


def _own(node: Node, rank: int) -> list[tuple[int, int]]:
    found = [slot for name, owner, slot, _ in raw_slots(node) if (name, owner) == ("own", rank)]
    return sorted((slot.step, slot.generation) for slot in found)


def _twice(world: World) -> None:
    """Messages that come twice, late or for another generation mean nothing."""
    membership, rng = world.membership, world.rng
    before = membership.generation, membership.phase, membership.attempt
    rank = rng.choice(sorted(world.workers))
    from hyperpod_ext.runtime.membership.actions import Fault as Told

    for _ in range(rng.randint(1, 3)):
        match rng.randrange(5):
            case 0:
                answer = membership.join(rank, None, [])
            case 1:
                answer = membership.restore_reported(rank, membership.generation, membership.attempt, "late")
            case 2:
                answer = membership.restore_reported(rank, membership.generation - 1, 1, "")
            case 3:
                answer = membership.fault(
                    Told(rank, f"late {os.urandom(2).hex()}", 1, died=False, kind="exception"),
                    membership.generation - 1,
                )
            case _:
                answer = membership.finished(rank, membership.generation - 1, "")
        assert answer == [], answer
    assert before == (membership.generation, membership.phase, membership.attempt)


def messages_come_twice(world: World) -> None:
    _twice(world)


FAULTS: dict[Fault, int] = {
    a_rank_dies: 5,
    several_ranks_die: 3,
    a_rank_raises: 2,
    a_node_is_lost: 4,
    two_nodes_are_lost: 1,
    a_peer_is_lost_while_it_receives: 2,
    an_upload_is_cut_off: 3,
    the_store_stands_still: 2,
    a_bit_flips: 5,
    a_file_is_damaged: 3,
    all_nodes_are_lost: 1,
    the_job_is_started_anew: 2,
    a_store_fails_and_comes_back: 2,
    a_zombie_speaks: 1,
    messages_come_twice: 1,
}


# --- faults while another one is being recovered from ---------------------------------------------


class Interruptions:
    """Faults while ranks join, restore and commit what they restored. A few in each schedule."""

    def __init__(self, world: World, chance: float) -> None:
        self._world, self._chance, self.left = world, chance, 3

    def _now(self, share: float = 1.0) -> bool:
        if self.left and self._world.rng.random() < self._chance * share:
            self.left -= 1
            return True
        return False

    def settling(self, where: str) -> bool:
        if not self._now():
            return False
        world, rng = self._world, self._world.rng
        rank = rng.choice(sorted(world.workers))
        if where == "restoring":
            match rng.randrange(4):
                case 0:  # a rank that could not, although its copy is good
                    waiting = sorted(set(world.workers) - world.reported)
                    rank = rng.choice(waiting)
                    assert world.last is not None
                    if world.last.decision.source(rank).kind in ("fresh", "self"):
                        return False
                    world._restore(rank, world.last.decision, "an error that comes and goes")
                    return True
                case 1:
                    lose_nodes(world, [rng.choice(sorted(world.nodes))])
                    return True
        world.say(f"rank {rank} dies while {where}")
        world.workers[rank].die()
        world.died(rank)
        return True

    def committing(self, rank: int, moment: Moment) -> bool:
        if not self._now():
            return False
        world = self._world
        world.say(f"rank {rank} dies while it commits what it restored")
        world.seal_promised(rank)
        if world.policy.due(moment.step):
            world.promises.begins(rank)
        world.workers[rank].die_writing(moment, world.rng.random())
        world.died(rank)
        return True
