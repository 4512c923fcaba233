"""A running job finds the interval of a durable tier: what it hears, and what it makes of it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.planner.intervals import best_interval
from hyperpod_ext.planner.rates import published
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.coordinator.interval_tuner import START_PEER_S, START_S, Tuner, by_clock
from hyperpod_ext.runtime.coordinator.members import Agent
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.control_messages import AgentHandshake, Event, Join
from hyperpod_ext.runtime.membership.actions import Begin, Fault
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.snapshot.select import Decision, Source

AUTO = {"kind": "file", "path": "/x", "every_steps": "auto"}


def policy(*tiers: dict[str, Any]) -> CheckpointPolicy:
    return CheckpointPolicy.model_validate_json(json.dumps({"tiers": [{"kind": "memory"}, *tiers]}))


def going_on(kind: Literal["durable", "peer", "memory"] = "durable") -> Membership:
    """After a fault, all go on from copies there."""
    fault = Fault(0, "killed", 5, died=True, kind="signal")
    membership = Membership({0: 0}, Budgets(9), faults=[fault])
    membership.restoring.decision = Decision(4, {0: (Source(kind, 0),)})
    return membership


def hear_step(tuner: Tuner, step: int, seconds: float = 1.0, **waits: float) -> float:
    """Steps take so long. Returns the time at which this one is done."""
    now = step * seconds
    tuner.heard({"event": "step", "rank": 0, "step": step, "began": now - seconds, "t": now, **waits}, now)
    return now


def hear_copy(tuner: Tuner, newest_step: int | None, now: float, tier: str = "/x/job") -> dict[str, float]:
    """The newest copy that is whole there. Returns the intervals that change with it."""
    return tuner.heard({"event": "copying", "tier": tier, "newest_step": newest_step}, now)


@dataclass(frozen=True)
class Each:
    """Once in `every` steps, after step `at` of them: the step that lies `ahead` of that one."""

    every: int
    at: int
    ahead: int

    def of(self, step: int) -> int | None:
        return step + self.ahead if step % self.every == self.at else None


def seconds_after(tuner: Tuner, checkpoint: CheckpointPolicy, steps: int, named: Each, arrives: Each) -> float:
    """The durable tier's interval after so many steps of 1 s, some of which were named for it and arrived there."""
    for step in range(1, steps + 1):
        hear_step(tuner, step)
        if (due := named.of(step)) is not None:
            tuner.named("file", due)
        if (newest := arrives.of(step)) is not None:
            hear_copy(tuner, newest, step)
    seconds = tuner.seconds(checkpoint.durable()[0])
    assert seconds is not None
    return seconds


class Job:
    """Steps of 1 s; each copy makes the four steps beside it 0.25 s longer, and arrives 4 s after."""

    def __init__(self, tuner: Tuner, checkpoint: CheckpointPolicy, tier: str = "/x/job") -> None:
        self.tuner, self.tier, self.place = tuner, checkpoint.tiers[1], tier
        self.now, self.step, self.drained_at = 0.0, 0, 0.0
        self.due: int | None = None
        self.arrives: float | None = None
        self.copies: list[float] = []
        self.changes: list[float] = []

    def make_steps(self, count: int) -> None:
        for _ in range(count):
            began, self.step = self.now, self.step + 1
            self.now += 1.25 if self.arrives is not None else 1.0
            self.hear({"event": "step", "rank": 0, "step": self.step, "began": began})
            if self.step == self.due:
                self.arrives, self.due = self.now + 4.0, None
                self.copies.append(self.now)
            elif self.arrives is not None and self.now >= self.arrives:
                self.arrives = None
                self.hear({"event": "copying", "tier": self.place, "newest_step": self.step})
            seconds = self.tuner.seconds(self.tier)
            assert seconds is not None
            if self.now - self.drained_at >= seconds:
                self.drained_at, self.due = self.now, self.step + 2
                self.tuner.named(self.tier.kind, self.due)

    def hear(self, event: dict[str, Any]) -> None:
        self.changes += self.tuner.heard({**event, "t": self.now}, self.now).values()


def test_a_job_comes_to_the_interval_that_its_own_numbers_ask_for() -> None:
    checkpoint = policy(AUTO)
    job = Job(Tuner(checkpoint, 256, 0.0), checkpoint)
    for _hour in range(40):
        job.make_steps(3000)
        job.tuner.went_on(going_on())  # a failure each hour, or nearly so
    prior = published("llama3-405b").of_job(256)
    rate = 41 / (job.now + 1 / (prior.node + prior.correlated))
    assert job.changes[:2] == [2 * START_S, 4 * START_S]
    assert job.tuner.seconds(job.tier) == pytest.approx(best_interval(1.0, 1 / rate), rel=0.3)
    gaps = [after - before for before, after in zip(job.copies[-6:], job.copies[-5:], strict=False)]
    assert gaps == [pytest.approx(job.tuner.seconds(job.tier), rel=0.05)] * len(gaps)


def test_copies_on_peers_are_tuned_by_the_failures_that_fall_back_to_them() -> None:
    checkpoint = policy({"kind": "peer", "every_steps": "auto"}, {"kind": "file", "path": "/x", "every_steps": 100})
    job = Job(Tuner(checkpoint, 256, 0.0), checkpoint, "peer")
    assert job.tuner.seconds(checkpoint.tiers[2]) is None
    for hour in range(40):
        job.make_steps(3000)
        job.tuner.went_on(going_on("peer"))
        if hour % 2:
            job.tuner.went_on(going_on("durable"))  # another tier's
    rate = 41 / (job.now + 1 / published("llama3-405b").of_job(256).node)
    assert job.changes[:2] == [2 * START_PEER_S, 4 * START_PEER_S]
    assert job.tuner.seconds(job.tier) == pytest.approx(best_interval(1.0, 1 / rate), rel=0.3)
    plain = policy({"kind": "peer", "every_steps": 7})
    assert Tuner(plain, 256, 0.0).seconds(plain.tiers[1]) is None


def test_snapshots_in_memory_are_tuned_when_a_generation_begins() -> None:
    checkpoint = CheckpointPolicy.model_validate_json('{"tiers": [{"kind": "memory", "every_steps": "auto"}]}')
    tuner, now, chosen = Tuner(checkpoint, 256, 0.0), 0.0, []
    for step in range(1, 12_001):
        if step % 400 == 0:  # and then a fault
            tuner.went_on(going_on("memory"))
            chosen.append(tuner.begins(now))
        due, after = (at % (chosen[-1] if chosen else 1) == 0 for at in (step, step - 1))
        now = hear_step(tuner, step, checkpoint_s=0.1 * due + 0.4 * after + 1e-6, snapshot=int(due))
    rate = 31 / (now + 1 / published("llama3-405b").of_job(256).process)
    assert chosen[:3] == [2, 4, 8], "twice as far apart at most"
    assert chosen[-1] == pytest.approx(best_interval(0.5, 1 / rate), rel=0.3)


def test_another_coordinator_goes_on_with_what_was_learned() -> None:
    memory = {"kind": "memory", "every_steps": "auto"}
    checkpoint = CheckpointPolicy.model_validate_json(json.dumps({"tiers": [memory, AUTO]}))
    tuner, now = Tuner(checkpoint, 256, 0.0, unix=5000.0), 0.0
    for step in range(1, 2_001):
        if step % 400 == 0:
            tuner.went_on(going_on("memory"))
            tuner.begins(now)
        now = hear_step(tuner, step, checkpoint_s=0.1, snapshot=1)
        tuner.named("file", step + 2)
        hear_copy(tuner, step, now)
    assert tuner.memory_every not in (None, 1)
    job_state = json.loads(json.dumps(tuner.learned()))
    another = Tuner(checkpoint, 256, 70.0, unix=5000.0 + now)  # on a machine that was just started
    another.inherit(job_state)
    file = checkpoint.durable()[0]
    assert (another.begins(71.0), another.seconds(file)) == (tuner.memory_every, tuner.seconds(file))
    for step in range(2_001, 2_200):
        for each in (tuner, another):
            hear_step(each, step, checkpoint_s=0.1, snapshot=1)
    # as many failures in as much time, so the same is best
    assert another.begins(70.0 + 200) == tuner.begins(now + 200) != 1
    assert another.learned()["fell_back"] == tuner.learned()["fell_back"] == {"memory": 5}
    assert Tuner(policy(), 256, 0.0).learned() == {}


def test_a_coordinator_that_takes_over_names_steps_as_the_one_before_it_did(tmp_path: Path) -> None:
    async def run() -> None:
        memory = {"kind": "memory", "every_steps": "auto"}
        checkpoint = CheckpointPolicy.model_validate_json(json.dumps({"tiers": [memory, AUTO]}))
        config = by_clock(RuntimeConfig(name="job", nodes=1, workers_per_node=1, spares=1, checkpoint=checkpoint))
        first = Coordinator.first(config, 0, tmp_path, 1)
        first.job.schedule.tuner.inherit({"began": 1.0, "fell_back": {}, "memory_every": 7, "seconds": {"file": 480.0}})
        first.members.members[1] = {"node": 1, "pid": 1, "peer": ("", 2), "address": ("", 3), "domain": ""}
        job_state = first.job.outbox._make_job_state()
        first.stop()
        own = AgentHandshake(
            id="1",
            node=1,
            pid=1,
            peer=("", 2),
            address=("", 3),
            domain="",
            generation=1,
            committed=0,
            workers={},
            exited={},
            job_state=json.loads(json.dumps({**job_state, "number": 1})),
        )
        successor = Coordinator.successor(config, 1, tmp_path, own, [])
        policy_now, tier = successor.job.schedule.policy, checkpoint.durable()[0]
        assert (policy_now.next_due(8), successor.job.schedule.tuner.seconds(tier)) == (14, 480.0)
        assert successor.membership.retention.next_due(8) == 14
        successor.stop()

    asyncio.run(run())


def test_snapshots_in_memory_stay_as_they_are_where_nothing_speaks_against_it() -> None:
    checkpoint = CheckpointPolicy.model_validate_json('{"tiers": [{"kind": "memory", "every_steps": "auto"}]}')
    plain = Tuner(policy(), 256, 0.0)
    tuner = Tuner(checkpoint, 256, 0.0)
    assert (plain.begins(1.0), tuner.begins(1.0)) == (None, 1)
    for step in range(1, 100):
        hear_step(tuner, step)
    assert tuner.begins(100.0) == 1, "nobody waited"


def test_nothing_is_concluded_before_there_is_enough_to_conclude_from() -> None:
    checkpoint = policy(AUTO)
    tuner = Tuner(checkpoint, 2, 0.0)
    tuner.named("file", 1)
    hear_step(tuner, 1)
    assert hear_copy(tuner, 1, 2.0) == {}
    assert tuner.seconds(checkpoint.durable()[0]) == START_S


def test_a_copy_of_an_older_step_is_not_the_one_that_is_waited_for() -> None:
    tuner = Tuner(policy(AUTO), 2, 0.0)
    for step in range(1, 20):
        hear_step(tuner, step)
    tuner.named("file", 20)
    hear_step(tuner, 20)
    assert hear_copy(tuner, 10, 21.0) == {}
    assert hear_copy(tuner, 20, 21.0, "s3://bucket/x/job") == {}
    assert hear_copy(tuner, None, 21.0) == {}


def test_a_copy_that_costs_nothing_that_can_be_seen_is_not_made_all_the_time() -> None:
    checkpoint = policy(AUTO)
    tuner = Tuner(checkpoint, 2, 0.0)
    seconds = seconds_after(tuner, checkpoint, 2000, named=Each(100, 50, 1), arrives=Each(100, 56, -5))
    assert seconds > 10 * START_S  # a copy takes 5 s, and a failure is a thing of months here


def test_copies_that_are_named_faster_than_agents_report_are_measured_too() -> None:
    checkpoint = policy({**AUTO, "every_seconds": 2})
    tuner = Tuner(checkpoint, 2, 0.0)
    assert seconds_after(tuner, checkpoint, 199, named=Each(2, 0, 2), arrives=Each(9, 0, -3)) > 2


def test_a_tier_that_never_gets_a_copy_does_not_keep_the_others_from_being_tuned() -> None:
    """Peers, where every node holds the same state."""
    checkpoint = policy(AUTO, {"kind": "peer", "every_steps": "auto"})
    tuner, (tier,) = Tuner(checkpoint, 2, 0.0), checkpoint.durable()
    for step in range(1, 301):
        now = hear_step(tuner, step, 6.0)
        tuner.named("peer", step + 2)
        if step % 20 == 1:
            tuner.named("file", step + 2)
        if step % 20 == 5:
            hear_copy(tuner, step - 2, now)
    seconds = tuner.seconds(tier)
    assert seconds is not None
    assert seconds > 4 * START_S
    assert len(tuner._tiers["peer"]._steps) < 300 / 6


def test_a_copy_is_followed_again_after_the_job_went_back_by_many_steps() -> None:
    checkpoint = policy({**AUTO, "every_seconds": 2})
    tuner = Tuner(checkpoint, 2, 0.0)
    tuner.named("file", 5000)
    assert seconds_after(tuner, checkpoint, 99, named=Each(10, 0, 2), arrives=Each(10, 4, -2)) > 2


def test_tiers_that_say_how_often_are_left_alone() -> None:
    for tier, seconds in (({"every_steps": 50}, None), ({"every_seconds": 30}, 30.0)):
        checkpoint = policy({"kind": "file", "path": "/x", **tier})
        tuner = Tuner(checkpoint, 2, 0.0)
        tuner.named("file", 3)
        assert tuner.heard({"event": "step", "rank": 0, "step": 3, "began": 2.0, "t": 3.0}, 3.0) == {}
        assert tuner.seconds(checkpoint.durable()[0]) == seconds


def test_auto_goes_by_the_coordinators_clock() -> None:
    def settings(**tier: Any) -> RuntimeConfig:
        checkpoint = policy({"kind": "file", "path": "/x", **tier})
        return RuntimeConfig(name="job", nodes=1, workers_per_node=1, checkpoint=checkpoint)

    auto = by_clock(settings(every_steps="auto")).checkpoint.durable()[0]
    assert (auto.auto, auto.every_seconds) == (True, START_S)
    told = by_clock(settings(every_steps="auto", every_seconds=7)).checkpoint.durable()[0]
    assert (told.auto, told.every_seconds) == (True, 7.0)
    plain = settings(every_steps=5)
    assert by_clock(plain) is plain
    once_more = RuntimeConfig.model_validate_json(by_clock(settings(every_steps="auto")).model_dump_json())
    assert once_more.checkpoint.durable()[0].every_seconds == START_S


class Sent:
    """An agent's end of its connection, which keeps what the coordinator says."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.transport = self

    def write(self, frame: bytes) -> None:
        self.messages.append(wire.decode(frame[4:]))

    def get_write_buffer_size(self) -> int:
        return 0


def listening(coordinator: Coordinator) -> list[dict[str, Any]]:
    """What the agent of node 0 is told."""
    sent: Any = Sent()
    coordinator.members.agents[0] = Agent(sent, time.monotonic())
    return sent.messages


def test_a_coordinator_names_the_steps_and_changes_how_often(tmp_path: Path) -> None:
    """Fed with what agents report, it asks for copies by its clock, twice as far apart after each that arrived."""

    async def run() -> list[dict[str, Any]]:
        config = by_clock(
            RuntimeConfig(name="job", nodes=1, workers_per_node=1, checkpoint=policy({**AUTO, "every_seconds": 0.05}))
        )
        coordinator = Coordinator.first(config, 0, tmp_path, 1)
        told = listening(coordinator)
        step, copies, t = 0, 0, 100.0  # an agent's own clock is another than the coordinator's
        until = time.monotonic() + 100
        while copies < 4 and time.monotonic() < until:
            copying = bool(told) and told[-1].get("step") == step
            step, took = step + 1, 0.02 if copying else 0.01
            t += took
            fields = {"step": step, "began": t - took, "node": 0}
            coordinator.reports.take(0, Event(event="step", rank=0, t=t, generation=1, fields=fields))
            if copying:
                copies += 1
                fields = {"tier": "/x/job", "newest_step": step - 1, "node": 0}
                coordinator.reports.take(0, Event(event="copying", t=t, generation=1, fields=fields))
            await asyncio.sleep(0)
        coordinator.stop()
        coordinator.events.close()
        return told

    told = asyncio.run(run())
    log = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    tuned = [event["every_seconds"] for event in log if event["event"] == "tuned"]
    assert tuned == [0.1, 0.2, 0.4, 0.8]
    assert {message["kind"] for message in told if message["type"] == "schedule_save"} == {"file"}


def _peer_job(tmp_path: Path, nodes: int, sharing: str, step_s: float) -> list[dict[str, Any]]:
    """What agents are told in 400 steps with copies on peers as often as can be, and in a new generation after them."""

    async def run() -> list[dict[str, Any]]:
        config = RuntimeConfig(
            name="job", nodes=nodes, workers_per_node=1, checkpoint=policy({"kind": "peer", "every_steps": "auto"})
        )
        coordinator = Coordinator.first(config, 0, tmp_path, 1)
        told = listening(coordinator)
        coordinator.members.members = {
            node: {"peer": ["127.0.0.1", 1], "address": ["127.0.0.1", 2], "domain": f"node {node}"}
            for node in range(nodes)
        }
        coordinator.job.schedule.tuner._tiers["peer"].interval = 0.0
        for rank in range(nodes):
            coordinator.reports.take(rank, Join(rank=rank, live=None, pid=1, store_port=1))
        for step in range(400):
            kind = "step" if step else "begun"
            fields = {"step": step, "sharing": sharing, "began": (step - 1) * step_s, "node": 0}
            coordinator.reports.take(0, Event(event=kind, rank=0, t=step * step_s, generation=1, fields=fields))
        told[:] = [message for message in told if message["type"] != "begin"]
        coordinator.actions.carry_out([Begin(2, Decision(380, {}))])
        coordinator.stop()
        coordinator.events.close()
        return told

    return asyncio.run(run())


def test_steps_for_peers_are_named_before_any_node_can_have_made_them(tmp_path: Path) -> None:
    told = _peer_job(tmp_path, 2, "shard", 0.01)
    named = [message["step"] for message in told if message["type"] == "schedule_save"]
    assert named[1] == named[0] + 102, "a second ahead, and not before the last one that was named is made"
    assert len(named) == 4


def test_nodes_that_come_later_hear_which_step_was_named_for_peers(tmp_path: Path) -> None:
    told = _peer_job(tmp_path, 2, "shard", 1.0)
    named = [message["step"] for message in told if message["type"] == "schedule_save"]
    begin = next(message for message in told if message["type"] == "begin")
    assert begin["peer_step"] == named[-1]


@pytest.mark.parametrize(("nodes", "sharing"), [(2, "same"), (1, "shard")])
def test_nothing_is_named_for_peers_where_nothing_is_copied_to_them(tmp_path: Path, nodes: int, sharing: str) -> None:
    told = _peer_job(tmp_path, nodes, sharing, 1.0)
    assert [message["type"] for message in told if message["type"] == "schedule_save"] == []
    assert next(message for message in told if message["type"] == "begin")["peer_step"] is None
