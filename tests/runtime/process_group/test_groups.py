"""Process groups of real processes: opened without a central store, freed from what they wait for, and closed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import Member, Ranks
from waiting import until
from world_of_one import world_of_one

from hyperpod_ext.runtime.process_group import groups, lasting_groups
from hyperpod_ext.runtime.process_group import torch_private as torch_names
from hyperpod_ext.runtime.process_group.gloo import waits as gloo_waits
from hyperpod_ext.runtime.process_group.gloo.sockets import event_loops
from hyperpod_ext.runtime.process_group.gloo.waits import sleeping, threads, work_threads
from hyperpod_ext.runtime.torch_requirements.private_names import Feature, missing

SIZE = 4


def _sum(value: float, group: dist.ProcessGroup | None = None, numel: int = 1) -> float:
    tensor = torch.full((numel,), value)
    dist.all_reduce(tensor, group=group)
    return float(tensor[-1])


# --- every generation ---------------------------------------------------------------------------


def _all_kinds_of_groups(member: Member) -> None:
    while member.join():
        with member.faults():
            rank = member.rank
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            late = dist.new_group([0, 2, 3])
            sums = {
                "world": _sum(rank + 1.0),
                "pair": _sum(rank, pairs[rank // 2]),
                "replicate": _sum(rank, mesh["replicate"].get_group()),
                "shard": _sum(rank, mesh["shard"].get_group()),
                "late": _sum(rank, late) if rank != 1 else -1.0,
            }
            gathered: list[object] = [None] * SIZE
            dist.all_gather_object(gathered, rank)
            dist.barrier()
            member.send("sums", sums, gathered, member.endpoint.requests)
            _sum(1.0)  # of the killed rank there is only the word that it came so far
            while True:
                _sum(1.0, pairs[rank // 2])


def test_groups_meshes_and_user_groups_work_in_every_generation():
    expected = {
        0: {"world": 10, "pair": 1, "replicate": 2, "shard": 1, "late": 5},
        1: {"world": 10, "pair": 1, "replicate": 4, "shard": 1, "late": -1},
        2: {"world": 10, "pair": 5, "replicate": 2, "shard": 5, "late": 5},
        3: {"world": 10, "pair": 5, "replicate": 4, "shard": 5, "late": 5},
    }
    with Ranks(SIZE, _all_kinds_of_groups) as ranks:
        for target in (2, 0, 3):
            ranks.begin()
            told = ranks.hear("sums")
            assert {rank: sums for rank, (sums, _, _) in told.items()} == expected
            assert all(gathered == [0, 1, 2, 3] for _, gathered, _ in told.values())
            ranks.kill(target)
            ranks.abort(target)
            ranks.hear("freed", target)
            ranks.start(target)


def _hold_on(member: Member) -> None:
    """What was made in the first generation is used in all."""
    held: list[dist.ProcessGroup] = []
    while member.join():
        with member.faults():
            now = [dist.group.WORLD, [dist.new_group([0, 1]), dist.new_group([2, 3])][member.rank // 2]]
            held = held or now
            same = all(mine is its for mine, its in zip(held, now, strict=True))
            member.send("sums", same, [_sum(member.rank + 1.0, group) for group in held], dist.get_rank(held[1]))
            while True:
                _sum(1.0, held[0])


@pytest.mark.skipif(bool(missing(Feature.LASTING_GROUPS)), reason="this torch cannot give an open group other ranks")
def test_a_group_made_before_a_fault_is_used_after_it():
    with Ranks(SIZE, _hold_on) as ranks:
        for target in (2, 0, 3, None):
            ranks.begin()
            found = ranks.hear("sums")
            assert {rank: (sums, place) for rank, (_, sums, place) in found.items()} == {
                0: ([10, 3], 0),
                1: ([10, 3], 1),
                2: ([10, 7], 0),
                3: ([10, 7], 1),
            }
            assert all(same for same, _, _ in found.values())
            if target is not None:
                ranks.kill(target)
                ranks.abort(target)
                ranks.hear("freed", target)
                ranks.start(target)


def test_no_rank_serves_more_than_twice_its_share_of_the_requests():
    with Ranks(SIZE, _all_kinds_of_groups) as ranks:
        ranks.begin()
        requests = [count for _, _, count in ranks.hear("sums").values()]
    assert sum(requests) >= 4 * SIZE
    assert max(requests) <= 2 * sum(requests) / SIZE, requests


def _say_who_is_connected(member: Member) -> None:
    while member.join():
        member.send("open", sum(len(loop.connections) for loop in member.gloo.loops()))
        member.inbox.get()  # nobody speaks before all have counted
        _sum(1.0)
        member.send("spoken", sum(len(loop.connections) for loop in member.gloo.loops()))
        member.inbox.get()  # nor closes


@pytest.mark.skipif(torch.__version__ < "2.8", reason="this torch cannot wait with connections of gloo")
def test_ranks_of_groups_that_are_made_anew_connect_when_they_first_speak(monkeypatch):
    """Of many ranks few speak with each other: a connection for each pair would be made at each fault."""
    monkeypatch.setattr(groups, "can_last", lambda world_size, *, nccl: False)
    with Ranks(SIZE, _say_who_is_connected) as ranks:
        ranks.begin()
        assert {connections for (connections,) in ranks.hear("open").values()} == {0}
        ranks.tell("speak")
        assert all(connections for (connections,) in ranks.hear("spoken").values())
        ranks.abort()


# --- freed --------------------------------------------------------------------------------------


def _reduce_for_ever(numel: int):
    def body(member: Member) -> None:
        while member.join():
            with member.faults():
                _sum(1.0, numel=numel)
                member.send("busy")
                while True:
                    _sum(1.0, numel=numel)

    return body


def _first_use(member: Member) -> None:
    """Rank 2 never comes: the others wait for it in the first operation, with connections that nobody made yet."""
    while member.join():
        with member.faults():
            if member.rank == 2:
                member.send("busy")
                threading.Event().wait()
            member.send("busy")
            _sum(1.0)


def _in_a_subgroup(member: Member) -> None:
    while member.join():
        with member.faults():
            pair = dist.new_group([1, 2])
            others = dist.new_group([0, 1, 3])
            _sum(1.0)
            if member.rank == 2:
                member.send("busy")
                threading.Event().wait()
            if member.rank == 1:
                member.send("busy")
                _sum(1.0, pair)
            _sum(1.0, others) if member.rank == 1 else None
            member.send("busy")
            _sum(1.0, others)  # waits for 1, which waits for 2


def _point_to_point(member: Member) -> None:
    """Rank 2 sends more than sockets hold, to a rank that takes it; rank 3 sends to one that does not."""
    while member.join():
        with member.faults():
            _sum(1.0)
            big = torch.zeros(64 << 20, dtype=torch.uint8)
            member.send("busy")
            if member.rank == 0:
                dist.recv(torch.zeros(1), 3)
            elif member.rank == 1:
                while True:
                    dist.recv(big, 2)
            elif member.rank == 2:
                while True:
                    dist.send(big, 1)
            else:
                dist.send(big, 1)


def _gather(member: Member) -> None:
    """When one sender dies, what others send is half received, into buffers that are gone with the operation."""
    while member.join():
        with member.faults():
            _sum(1.0)
            mine = torch.zeros(32 << 20, dtype=torch.uint8)
            parts = [torch.zeros_like(mine) for _ in range(SIZE)] if member.rank == 0 else None
            member.send("busy")
            while True:
                dist.gather(mine, parts)


BODIES = {
    "all-reduces of a few bytes": _reduce_for_ever(1),
    "all-reduces of 40 MB": _reduce_for_ever(10 << 20),
    "connections that are never made": _first_use,
    "a group without the dead rank": _in_a_subgroup,
    "a message of the dead rank half received": _point_to_point,
    "messages of others half received": _gather,
}


@pytest.mark.parametrize("what", BODIES)
def test_every_survivor_is_freed_from(what):
    with Ranks(SIZE, BODIES[what]) as ranks:
        for _ in range(3):
            ranks.begin()
            ranks.hear("busy")
            ranks.kill(2)
            ranks.abort(2)
            ranks.hear(
                "freed", 2
            )  # without a cut it would be half an hour; how soon it is, `make bench-rendezvous` tells
            ranks.start(2)


def test_a_cut_without_a_death_frees_everybody():
    with Ranks(SIZE, _reduce_for_ever(1 << 20)) as ranks:
        for _ in range(5):
            ranks.begin()
            ranks.hear("busy")
            ranks.abort()
            assert all(told["raised"] for (told,) in ranks.hear("freed").values())


def test_groups_of_the_process_that_forked_the_ranks_are_left_alone(monkeypatch):
    """Their epoll sets are inherited, and name sockets by numbers under which a rank has others: its line, say."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = {loop.address for loop in event_loops()}
    ours = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    with Ranks(SIZE, _first_use) as ranks:
        for _ in range(4):
            ranks.begin()
            ranks.hear("busy")
            ranks.kill(2)
            ranks.abort(2)
            ranks.hear("freed", 2)
            ranks.start(2)
    (loop,) = (loop for loop in event_loops() if loop.address not in before)
    assert loop.connections == {}, "a rank has answered for others at its parent's listener"
    del ours


def test_threads_of_gloo_that_have_no_name_are_found(monkeypatch):
    """As in torch 2.8; from 2.13 on they have one."""
    before = set(threads())

    def found() -> set[int]:
        return set(gloo_waits.work_threads()) - before

    with world_of_one(), monkeypatch.context() as patch:
        patch.setattr(gloo_waits, "threads", lambda name="": [] if name else threads())
        until(lambda: len(found()) >= 2 and set(threads("pt_gloo")) - before <= found())
        assert not {thread.native_id for thread in threading.enumerate()} & set(gloo_waits.work_threads())


def _leave_with_a_forgotten_sum(member: Member) -> None:
    """Rank 0 leaves with a sum under way that it does not wait for, and gloo never hears that its connections end."""
    while member.join():
        _sum(1.0)
        if member.rank == 0:
            member.gloo._hold = lambda connection: None  # type: ignore[method-assign]
            dist.all_reduce(torch.ones(1 << 18), async_op=True)
            while not any(sleep and sleep.timed for sleep in map(sleeping, work_threads())):
                os.sched_yield()
        else:
            member.inbox.get()  # the abort, once rank 0 is out: until then its connections stay
        member.groups.abort()
        member.groups.leave()
        member.send("left")


def test_a_sum_that_nobody_waits_for_and_gloo_has_forgotten_does_not_keep_its_rank():
    with Ranks(SIZE, _leave_with_a_forgotten_sum) as ranks:
        ranks.begin()
        ranks.hear("left", 1, 2, 3)
        ranks.abort(0)
        ranks.hear("left", 0)


# --- nothing left -------------------------------------------------------------------------------


def _count(member: Member) -> None:
    """20 aborts in one process: what it has open, before and after."""
    while member.join():
        with member.faults():
            pair = dist.new_group([0, 1]), dist.new_group([2, 3])
            _sum(1.0, pair[member.rank // 2])
            _sum(1.0, numel=1 << 18)
            member.send("open", _open())
            while True:
                _sum(1.0, numel=1 << 18)


def _open() -> dict[str, int]:
    fds = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            fds.append(str(fd.readlink()).split(":")[0])
    return {"threads": len(list(Path("/proc/self/task").iterdir())), "fds": len(fds), **Counter(fds)}


def test_twenty_aborts_leave_no_thread_descriptor_or_socket():
    with Ranks(SIZE, _count) as ranks:
        counts = []
        for turn in range(22):
            ranks.begin()
            counts.append({rank: told[0] for rank, told in ranks.hear("open").items()})
            if turn % 2:
                ranks.abort()
                ranks.hear("freed")
            else:
                ranks.kill(3)
                ranks.abort(3)
                ranks.hear("freed", 3)
                ranks.start(3)
    for rank in (0, 1, 2):
        first, last = counts[1][rank], counts[-1][rank]
        assert last["threads"] <= first["threads"], counts
        # lines to the other ranks' servers: at most one more to each than there were
        assert last["fds"] <= first["fds"] + SIZE, (first, last)
        assert last["socket"] <= first["socket"] + SIZE, (first, last)


def test_the_kernel_tells_of_every_name_that_is_used():
    """Where these are missing, groups open eagerly and a lost wait is left to the agent."""
    from hyperpod_ext.runtime.process_group.gloo.waits import LostWakeups

    assert Path("/proc/self/syscall").exists()
    assert LostWakeups.find() is not None


class _Part:
    """A backend that may abort by itself, as NCCL's second implementation does."""

    supports_reconfigure = supports_abort_hooks = True

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[], None]] = {}

    def register_abort_hook(self, number: int, hook: Callable[[], None]) -> None:
        assert number not in self.hooks, "once for each backend"
        self.hooks[number] = hook

    def get_reconfigure_handle(self) -> bytes:
        return b"0"

    def aborts_by_itself(self) -> None:
        for hook in self.hooks.values():
            hook()


def test_an_abort_that_a_backend_makes_by_itself_is_heard_of_in_its_generation(monkeypatch):
    heard: list[str] = []
    part, group = _Part(), SimpleNamespace(group_name="0")
    monkeypatch.setattr(lasting_groups, "_reconfigure", lambda part, uuid, handles: None)
    monkeypatch.setattr(torch_names, "parts_of", lambda group: {"cuda": part})
    monkeypatch.setattr(torch_names, "open_groups", lambda: {"0": group})
    lasting = lasting_groups.LastingGroups(0, 1, "cpu:gloo,cuda:nccl", lambda: heard.append("aborts"))
    lasting._store.become(dist.HashStore())
    lasting._listen(group)
    for generation in (1, 2):
        lasting._wake(group, [0])
        part.aborts_by_itself()
        assert heard == ["aborts"] * generation
        lasting.leave()
        part.aborts_by_itself()
        assert len(heard) == generation, "of one that was left"
        lasting._store.become(dist.HashStore())


def test_a_backend_that_never_aborts_by_itself_is_not_asked_to_say_so():
    asked: list[str] = []

    def register(number: int, hook: Callable[[], None]) -> None:
        asked.append("asked")
        raise RuntimeError("Backend gloo does not support registerAbortHook")

    lasting_groups._hear(SimpleNamespace(supports_abort_hooks=False, register_abort_hook=register), lambda: None)
    assert not asked
    lasting_groups._hear(SimpleNamespace(register_abort_hook=register), lambda: None)  # torch 2.14 does not say
    assert asked


_NEVER_AWAKE = """
import sys, threading
from hyperpod_ext.runtime.process_group import lasting_groups
lasting_groups._WAKE_S = 0.1
groups = lasting_groups.LastingGroups(0, 2, sys.argv[2])
waiting = threading.Event()
def give_ranks(group, ranks):
    waiting.set()
    if sys.argv[1] != "comes out":
        threading.Event().wait(None if "nccl" in sys.argv[2] else 0.3)  # NCCL waits for good for a rank that has died
groups._give_ranks = give_ranks
if sys.argv[1] == "before":
    groups.give_up()
elif sys.argv[1] == "within":
    threading.Thread(target=lambda: (waiting.wait(), groups.give_up()), daemon=True).start()
groups._wake(None, [0, 1])
groups.give_up()
"""


@pytest.mark.parametrize(
    ("given_up", "backends", "code"),
    [
        ("before", "cpu:gloo,cuda:nccl", 1),
        ("within", "cpu:gloo,cuda:nccl", 1),
        ("comes out", "cpu:gloo,cuda:nccl", 0),
        ("within", "gloo", 0),
    ],
)
def test_a_rank_that_waits_for_a_dead_one_in_the_set_up_of_nccl_is_ended(given_up: str, backends: str, code: int):
    command = [sys.executable, "-c", _NEVER_AWAKE, given_up, backends]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "still sets up a process group" in done.stderr) == (code, code == 1), done.stderr
