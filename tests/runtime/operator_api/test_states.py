"""What a pod answers its operator in each state, and which orders its agent gets."""

from __future__ import annotations

from typing import Any

import pytest

from hyperpod_ext.runtime.operator_api import states
from hyperpod_ext.runtime.operator_api.requests import Ranks, Start, Stop
from hyperpod_ext.runtime.operator_api.states import Order, Pod, State

NOW = "2026-01-01T00:00:00+00:00"
TABLE = [{"rank": 0, "ip": "10.0.0.1"}, {"rank": 1, "ip": "10.0.0.2"}]


def ready() -> Pod:
    return states.is_ready(states.enter(Pod(nodes=2), State.INIT, NOW), NOW, agent_runs=False)


def body(**fields: Any) -> dict[str, Any]:
    said = {"rank": 1, "nnodes": 2, "faultCount": 0, "master_addr": "10.0.0.1", "master_port": "1234"}
    return {**said, "ipVersion": "v0", "rankIps": TABLE, **fields}


def running(**fields: Any) -> Pod:
    return states.start(ready(), Start(**body(**fields)), NOW).pod


def test_start_begins_an_agent_and_says_when() -> None:
    answer = states.start(ready(), Start(**body()), NOW)
    assert (answer.status, answer.orders) == (200, (Order.BEGIN,))
    assert answer.pod.node_start.first_node == "10.0.0.1"
    said = states.status(answer.pod, "1")
    assert said == {
        "status": "running",
        "transitions": {"INIT": NOW, "READY": NOW, "RUNNING": NOW},
        "reason": "Running",
        "restartMode": "in_process_restart",
        "ipversion": "v0",
        "agent_version": "1",
        "assigned_rank": "1",
        "spare": "False",
    }


def test_what_comes_as_aws_agent_takes_it() -> None:
    assert Ranks(**body(spare=2)).spare is True
    known = states.update(ready(), Ranks(**body())).pod
    later = states.update(known, Ranks(**body(ipVersion="v1", rankIps=None))).pod
    assert states.status(later, "1")["ipversion"] == "v0"  # the table is still that one
    stopped = states.is_ready(states.stop(running(), Stop(), NOW).pod, NOW, agent_runs=True)
    assert states.status(stopped, "1")["priority"] == "True"
    assert "priority" not in states.status(states.start(stopped, Start(**body()), NOW).pod, "1")


def test_start_that_is_asked_twice_starts_once() -> None:
    answer = states.start(running(), Start(**body()), NOW)
    assert (answer.status, answer.orders, answer.pod.state) == (200, (), State.RUNNING)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"nnodes": 3}, "nnodes is 3; the job has 2 nodes"),
        ({"rank": 2}, "ranks of nodes that train go from 0 to 1"),
        ({"rank": -1}, "ranks of nodes that train go from 0 to 1"),
        ({"rank": 2, "spare": True}, "a spare is started once it has a rank below 2"),
        ({"rankIps": TABLE[:1]}, "rankIps: no address of rank 1"),
        ({"rankIps": [*TABLE, TABLE[0]]}, "rankIps names a rank twice"),
        ({"rankIps": [TABLE[0], {"rank": 1, "ip": "; rm"}]}, "'; rm' of rank 1 is no address"),
    ],
)
def test_start_that_does_not_fit_is_refused_and_changes_nothing(wrong: dict[str, Any], why: str) -> None:
    before = ready()
    answer = states.start(before, Start(**body(**wrong)), NOW)
    assert (answer.status, answer.orders, answer.pod) == (409, (), before)
    assert why in answer.why


def test_an_older_fault_count_is_an_older_call() -> None:
    before = running(faultCount=3)
    for answer in (
        states.start(before, Start(**body(faultCount=2)), NOW),
        states.update(before, Ranks(**body(faultCount=2))),
    ):
        assert (answer.status, answer.pod) == (409, before)
        assert "3 was said before" in answer.why


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"spare": True},
        {"nnodes": 1},
        {"rankIps": [TABLE[0], {"rank": 1, "ip": "10.0.0.9"}]},
    ],
)
def test_a_pod_that_trains_follows_no_update_that_does_not_fit(wrong: dict[str, Any]) -> None:
    before = running()
    answer = states.update(before, Ranks(**body(**wrong)))
    assert (answer.status, answer.pod) == (409, before)


def test_an_update_of_others_addresses_is_taken_in_parts() -> None:
    moved = body(rankIps=[{"rank": 0, "ip": "fd00::1"}], ipVersion="v1", master_addr="fd00::1")
    answer = states.update(running(), Ranks(**moved))
    assert answer.status == 200
    assert dict(answer.pod.addresses) == {0: "fd00::1", 1: "10.0.0.2"}
    assert states.status(answer.pod, "1")["ipversion"] == "v1"


def test_a_spare_is_told_that_it_is_one_and_gets_a_rank_later() -> None:
    spare = states.update(ready(), Ranks(**body(rank=2, spare=True))).pod
    assert (spare.state, spare.spare, spare.rank) == (State.READY, True, 2)
    answer = states.start(spare, Start(**body(faultCount=1)), NOW)
    assert (answer.orders, answer.pod.state, answer.pod.spare) == ((Order.BEGIN,), State.RUNNING, False)


def test_stop_pauses_what_trains_and_start_resumes_it_where_the_rank_is_the_same() -> None:
    stopped = states.stop(running(), Stop(), NOW)
    assert (stopped.orders, stopped.pod.state) == ((Order.PAUSE,), State.STOPPING)
    assert states.stop(stopped.pod, Stop(), NOW).orders == ()
    paused = states.is_ready(stopped.pod, NOW, agent_runs=True)
    assert states.start(paused, Start(**body(faultCount=1)), NOW).orders == (Order.RESUME,)
    assert states.start(paused, Start(**body(faultCount=1, rank=0)), NOW).orders == (Order.BEGIN,)


def test_stop_ends_what_is_to_begin_anew() -> None:
    assert states.stop(running(), Stop(restart_mode="job_level_restart"), NOW).orders == (Order.END,)
    ended = states.job_ended(running(), NOW, succeeded=False, message="why", restart_mode="job_level_restart")
    assert states.status(ended, "1")["restartMode"] == "job_level_restart"
    assert (ended.state, ended.message) == (State.FAULTED, "why")
    stopped = states.stop(ended, Stop(), NOW)
    assert stopped.orders == (Order.END,)
    again = states.is_ready(stopped.pod, NOW, agent_runs=False)
    answer = states.start(again, Start(**body(faultCount=1)), NOW)
    assert answer.orders == (Order.BEGIN,)
    assert states.status(answer.pod, "1")["restartMode"] == "in_process_restart"


def test_stop_of_a_pod_that_does_nothing_does_nothing() -> None:
    before = ready()
    answer = states.stop(before, Stop(), NOW)
    assert (answer.status, answer.pod, answer.orders) == (200, before, ())


def test_shutdown_ends_the_process_once() -> None:
    answer = states.shutdown(running(), NOW)
    assert (answer.orders, answer.pod.state) == ((Order.LEAVE,), State.SHUTDOWN)
    assert states.shutdown(answer.pod, NOW).orders == ()


def test_a_fault_that_is_mended_in_place_is_shown_while_the_pod_runs() -> None:
    hurt = states.fault_seen(running(), "rank 2, step 5: killed by SIGKILL (9)")
    assert (hurt.state, hurt.reason) == (State.RUNNING, "MendingInPlace")
    said = states.status(states.fault_mended(hurt, 4), "1")
    assert said["status"] == "running"
    assert said["message"] == "rank 2, step 5: killed by SIGKILL (9); mended in place, all ranks train from step 4 on"
    assert said["rank_labels"]["1"]["hyperpod-ext/mended"] == "1"
    assert states.fault_mended(running(), 0) == running()


@pytest.mark.parametrize(
    ("caller", "allowed", "may"),
    [
        ("10.9.0.1", (), True),
        ("10.0.0.2", (), False),
        ("::ffff:10.0.0.2", (), False),
        ("127.0.0.1", (), True),
        ("10.1.2.3", ("10.1.0.0/16",), True),
        ("10.2.2.3", ("10.1.0.0/16",), False),
        ("127.0.0.1", ("10.1.0.0/16",), False),
        ("fd00::7%eth0", ("fd00::/64", "10.1.0.0/16"), True),
        ("::ffff:10.1.0.1", ("10.1.0.0/16",), True),
    ],
)
def test_who_may_give_orders(caller: str, allowed: tuple[str, ...], may: bool) -> None:
    assert states.may_order(caller, allowed, ["10.0.0.1", "10.0.0.2", "fd00::2"]) is may
