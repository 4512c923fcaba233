"""Messages and faults in any order. What follows from each message is in `scenarios/`."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_job import Job

from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.node_states import NodeState
from hyperpod_ext.runtime.membership.renumbering import Renumbering

MANY = 10**6
RANKS = range(4)


def test_a_node_that_is_lost_too_often_is_not_taken_again() -> None:
    job = Job(2, 2, spares=2, quarantine_after=2, max_node_losses=9)
    job.begin(live=None)
    job.say("node-lost", 1, "gone")
    assert not job.membership.is_shut_out(1)
    job.say("node-came", 1)
    job.say("node-lost", 2, "gone")
    job.say("node-lost", 3, "gone")
    job.say("node-lost", 1, "gone")
    assert job.membership.is_shut_out(1)


def test_a_node_that_has_missed_several_renumberings_gets_its_number_in_the_last_one() -> None:
    renumbering = Renumbering({2: {1: 1, 2: 2, 3: 0}, 3: {1: 1, 2: 0}})
    assert renumbering.since(1) == {1: 1, 2: 0}
    assert renumbering.since(2) == {1: 1, 2: 0}
    assert renumbering.since(3) is None
    assert [renumbering.rank_now(rank, 1) for rank in (0, 2, 3)] == [None, 0, None]
    assert renumbering.rank_now(0, 3) == 0


@pytest.mark.parametrize("seed", range(300))
def test_random_histories_end_with_everybody_in_one_generation(seed: int) -> None:
    """Messages of live processes arrive in any order between ranks; deaths strike at any moment."""
    chance, job = random.Random(seed), Job(2, 2, max_restarts=1000)
    state, generation = dict.fromkeys(RANKS, "joining"), dict.fromkeys(RANKS, 1)
    deaths = chance.randrange(6)

    def obey(commands: list[m.Action]) -> None:
        for command in commands:
            match command:
                case m.Begin(begun, _):
                    assert set(state.values()) == {"waiting"}, "began without somebody"
                    assert begun >= max(generation.values())
                    state.update(dict.fromkeys(RANKS, "restoring"))
                    generation.update(dict.fromkeys(RANKS, begun))
                case m.Go():
                    assert set(state.values()) == {"restored"}
                    state.update(dict.fromkeys(RANKS, "training"))
                case m.Abort():
                    state.update({rank: "joining" for rank in RANKS if state[rank] != "dead"})
                case m.Replace(rank):
                    assert state[rank] == "dead"
                    state[rank] = "joining"
                case m.Finish():
                    state.update(dict.fromkeys(RANKS, "finished"))
                case _:
                    raise AssertionError(command)

    for turn in range(400):
        rank = chance.choice([rank for rank in RANKS if state[rank] != "dead"])
        if deaths and chance.random() < 0.1:
            deaths -= 1
            state[rank] = "dead"
            obey(job.died(rank, turn, cause=f"killed, turn {turn}"))
        elif state[rank] == "joining":
            state[rank] = "waiting"
            obey(job.join(rank, live=4 if chance.random() < 0.8 else None, held=4, sharing="same"))
        elif state[rank] == "restoring":
            state[rank] = "restored"
            obey(job.say("restored", rank, generation=generation[rank]))
        elif state[rank] == "training":
            state[rank] = "done"
            obey(job.say("finished", rank, generation=generation[rank]))
        if set(state.values()) == {"finished"}:
            break
    assert set(state.values()) == {"finished"}


@given(st.lists(st.tuples(st.sampled_from(["comes or goes", "given up", "revived"]), st.integers(0, 3)), max_size=30))
@settings(max_examples=500, deadline=None)
def test_no_node_ever_has_more_ranks_than_a_node_has(history: list[tuple[str, int]]) -> None:
    job, present = Job(2, 2, max_restarts=1000, max_node_losses=1000), {0, 1}
    for number, (what, node) in enumerate(history):
        if what == "comes or goes" and node in present:
            present.discard(node)
            job.say("node-lost", node, f"gone {number}")
        elif what == "comes or goes":
            present.add(node)
            job.say("node-came", node)
        elif what == "given up" and (ranks := job.membership.ranks_on(node)):
            job.died(ranks[0], 1, cause=f"broken {number}", node_lost=True)
            present.discard(node)  # it has left the job, and may come again as a new one
            job.decommissioned(node)
        elif what == "revived":
            job.revive()
        membership = job.membership
        has = Counter(its for rank, its in membership.nodes.items() if rank not in membership.unassigned)
        assert membership.phase is not m.JobPhase.ENDED
        assert set(has) <= present
        assert set(has.values()) <= {2}


def test_nodes_and_ranks_that_fail_in_any_order_leave_nobody_behind() -> None:
    for seed in range(300):
        rng, job = random.Random(seed), Job(2, 2, spares=3, max_restarts=1000, max_node_losses=1000, max_on_node=2)
        alive = set(range(5))
        for _ in range(rng.randint(1, 30)):
            rank = rng.choice(RANKS)
            match rng.randrange(6):
                case 0:
                    job.died(rank, rng.randint(1, 1000))
                case 1 if len(alive) > 1:
                    alive.discard(node := rng.choice(sorted(alive)))
                    job.say("node-lost", node, f"gone {rng.random()}")
                case 2 if len(alive) < 5:
                    alive.add(node := min(set(range(5)) - alive))
                    job.say("node-came", node)
                case _ if rank not in job.membership.unassigned:
                    job.join(rank, live=1)
            membership = job.membership
            assert {membership.nodes[rank] for rank in RANKS if rank not in membership.unassigned} <= alive
            forming = membership.phase is m.JobPhase.FORMING
            assert not (forming and membership.unassigned & membership.restoring.joined.keys())


# --- other numbers of nodes -------------------------------------------------------------------------


def settle(job: Job) -> list[m.Action]:
    """Make the change that is under way, until all train."""
    actions = list[m.Action]()
    while job.membership.rescaling.change is not None or job.membership.phase is m.JobPhase.FORMING:
        actions += job.stop() if job.membership.rescaling.change is not None else []
        actions += job.decommissioned(sorted(job.membership.states.those(NodeState.DECOMMISSIONED)))
        actions += job.begin()
    return actions


def test_in_a_storm_of_orders_each_is_answered_and_the_last_one_counts() -> None:
    for seed in range(100):
        rng, answered = random.Random(seed), list[str]()
        job = Job(rng.randint(1, 4), 1, (1, 2, 3, 4))
        job.begin(live=None)

        def note(commands: list[m.Action], answered: list[str] = answered) -> None:
            done = [c for c in commands if isinstance(c, m.Log) and c.event in ("resize_refused", "world")]
            answered += [c.fields["order"] for c in done if c.fields["order"]]

        def next_comes(job: Job = job) -> list[m.Action]:
            return job.say("node-came", max([*job.membership.nodes.values(), *job.membership.states.spares]) + 1)

        for number in range(20):
            note(job.say("resize", last := rng.randint(1, 4), f"{number:02}"))
            note(next_comes() if rng.random() < 0.3 else [])
            note(settle(job) if rng.random() < 0.3 else [])
        while job.membership.size < last:
            note(settle(job))
            note(next_comes() if job.membership.size < last else [])
        note(settle(job))
        assert sorted(answered) == [f"{number:02}" for number in range(20)], seed
        assert job.membership.size == last


def test_whatever_happens_in_whatever_order_the_ranks_are_those_of_a_world_that_is_allowed() -> None:
    """Random orders, leaves, losses and arrivals: a world is never half of one."""
    newest = 0
    for seed in range(300):
        rng = random.Random(seed)
        job = Job(rng.randint(1, 4), each := rng.choice([1, 2]), (1, 2, 3, 4), max_restarts=MANY, max_node_losses=MANY)
        job.begin(live=None)
        for _ in range(30):
            membership = job.membership
            members, states = sorted(set(membership.nodes.values())), membership.states
            match rng.randrange(7):
                case 0:
                    job.say("resize", rng.randint(1, 4), "x")
                case 1 if gone := [node for node in range(6) if states[node] in (NodeState.ABSENT, NodeState.RELEASED)]:
                    job.say("node-came", gone[0])
                case 2 if membership.size > 1:
                    job.say("node-lost", rng.choice(members), "gone")
                case 3 if membership.size > 1 and not membership.unassigned:
                    job.say("leave", rng.choice(members))
                case 4 if membership.rescaling.change is not None and not membership.unassigned:
                    job.stop()
                case 5 if membership.phase is m.JobPhase.RUNNING:
                    job.say("move", rng.choice(members), "y")
                case _ if membership.phase is m.JobPhase.FORMING and not membership.unassigned:
                    job.decommissioned(sorted(states.those(NodeState.DECOMMISSIONED)))
                    job.begin()
            blocks = [membership.nodes[block * each] for block in range(len(membership.nodes) // each)]
            assert len(set(blocks)) == len(blocks)
            assert membership.size in membership.rescaling.scale.sizes or membership.unassigned
            assert membership.rescaling.moving is None or membership.rescaling.order == "y"
            newest = max(newest, membership.renumbering.newest)
    assert newest > 3


def test_many_faults_of_a_job_that_continues_leave_a_world_without_gaps() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        nodes, each, spares = rng.randint(1, 3), rng.randint(1, 3), rng.randint(0, 2)
        if nodes * each > 1:
            budgets = {"max_restarts": MANY, "max_node_losses": MANY, "quarantine_after": MANY}
            job = Job(nodes, each, spares=spares, continues=True, **budgets)
            job.begin(live=None)
            absent = _shake(rng, job, nodes * each)
            _mend(job, absent)
            assert [job.membership.nodes[rank] for rank in range(0, nodes * each, each)] == [
                job.membership.nodes[rank] for rank in range(each - 1, nodes * each, each)
            ], "each node has a block of ranks again"
            assert len(job.membership.nodes) == nodes * each
            assert not job.membership.continuing.is_short


def _shake(rng: random.Random, job: Job, full_size: int) -> set[int]:
    """Faults at random; returns the nodes that are gone after them."""
    membership, absent = job.membership, set[int]()
    for moment in range(25):
        ranks = sorted(rank for rank in membership.nodes if rank not in membership.unassigned)
        match rng.choice(["kill", "kill", "lose", "leave", "come", "ready", "go", "die joining"]):
            case "kill" if ranks:
                job.died(rng.choice(ranks), 100 * moment)
            case "lose" if len(there := membership.states.those(*NodeState) - absent) > 1:
                absent.add(node := rng.choice(sorted(there)))
                job.say("node-lost", node, "gone")
            case "leave" if len(members := sorted({membership.nodes[rank] for rank in ranks})) > 1:
                node = rng.choice(members)
                if any(isinstance(action, m.Decommission) for action in job.say("leave", node)):
                    job.decommissioned(node)
            case "come" if absent:
                absent.discard(node := rng.choice(sorted(absent)))
                job.say("node-came", node)
            case "go" if membership.phase is m.JobPhase.FORMING and not membership.unassigned:
                if not membership.states.those(NodeState.DECOMMISSIONED):
                    job.begin()
            case "ready" if membership.rescaling.change is not None:
                job.stop()
            case "die joining" if (change := membership.rescaling.change) is not None:
                job.prepared(min(change.joining), "exit code 1")
        assert membership.full_size == full_size
    return absent


def _mend(job: Job, absent: set[int]) -> None:
    """All nodes come back, and all ranks with them."""
    membership = job.membership
    for node in sorted(absent):
        job.say("node-came", node)
    for _ in range(4):
        for node in sorted(membership.states.those(NodeState.RELEASED)):  # its agent has ended, and another begins
            job.say("node-came", node)
        job.decommissioned(sorted(membership.states.those(NodeState.DECOMMISSIONED)))
        if membership.phase is m.JobPhase.FORMING:
            job.begin()
        membership.continuing.gave_up = False
        job.say("nodes-released")
        if membership.rescaling.change is not None:
            job.stop()
