"""What a pod answers its operator in each state, and which orders its agent gets."""

from __future__ import annotations

from typing import Any

import pytest

from hyperpod_ext.runtime.operator_api import states
from hyperpod_ext.runtime.operator_api.requests import Ranks, Start, Stop
from hyperpod_ext.runtime.operator_api.states import Caller, Order, Pod, State

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
        ({"rank": 2, "spare": True}, "a spare is started when it has a rank below 2"),
        ({"rankIps": TABLE[:1]}, "rankIps: no address of rank 1"),
        ({"rankIps": [*TABLE, TABLE[0]]}, "rankIps names a rank twice"),
        ({"rankIps": [TABLE[0], {"rank": 1, "ip": "; rm"}]}, "'; rm' of rank 1 is no address"),
        ({"rankIps": [TABLE[0], TABLE[0] | {"rank": 1}]}, "ranks 0, 1 have the same address, 10.0.0.1"),
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
        assert "3 was sent before" in answer.why


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


def test_stop_pauses_what_trains_and_start_resumes_it_whatever_its_rank_is_then() -> None:
    stopped = states.stop(running(), Stop(), NOW)
    assert (stopped.orders, stopped.pod.state) == ((Order.PAUSE,), State.STOPPING)
    assert states.stop(stopped.pod, Stop(), NOW).orders == ()
    paused = states.is_ready(stopped.pod, NOW, agent_runs=True)
    assert states.start(paused, Start(**body(faultCount=1)), NOW).orders == (Order.RESUME,)
    lost = [{"rank": 0, "ip": "10.0.0.2"}, {"rank": 1, "ip": "10.0.0.9"}]  # the new pod got the last rank
    answer = states.start(paused, Start(**body(faultCount=1, rank=0, rankIps=lost)), NOW)
    assert (answer.orders, answer.gone, answer.pod.rank) == ((Order.RESUME,), {"10.0.0.1"}, 0)
    alone = states.start(paused, Start(**body(faultCount=1, rank=0)), NOW)  # it is told to be where another pod is
    assert alone.orders == (Order.BEGIN,)


def test_where_nobody_tells_addresses_the_rank_says_whether_an_agent_goes_on() -> None:
    began = states.start(ready(), Start(**body(rankIps=None)), NOW).pod
    paused = states.is_ready(states.stop(began, Stop(), NOW).pod, NOW, agent_runs=True)
    assert states.start(paused, Start(**body(rankIps=None)), NOW).orders == (Order.RESUME,)
    assert states.start(paused, Start(**body(rankIps=None, rank=0)), NOW).orders == (Order.BEGIN,)


def test_a_pod_that_goes_on_hears_which_nodes_are_other_pods_now() -> None:
    def stopped(pod: Pod) -> Pod:
        return states.is_ready(states.stop(pod, Stop(), NOW).pod, NOW, agent_runs=True)

    lost = stopped(running())
    moved = [{"rank": 0, "ip": "10.0.0.9"}, TABLE[1]]
    told = states.update(lost, Ranks(**body(faultCount=1, rankIps=moved[:1], ipVersion="v1"))).pod
    answer = states.start(told, Start(**body(faultCount=1, rankIps=moved, ipVersion="v1")), NOW)
    assert (answer.orders, answer.gone) == ((Order.RESUME,), {"10.0.0.1"})
    again = states.start(stopped(answer.pod), Start(**body(faultCount=1, rankIps=moved)), NOW)
    assert (again.orders, again.gone) == ((Order.RESUME,), frozenset()), "it has heard that"
    new = states.start(ready(), Start(**body(rank=0, faultCount=1, rankIps=moved)), NOW)
    assert (new.orders, new.gone) == ((Order.BEGIN,), frozenset())
    at = new.pod.node_start
    assert (at.address, at.others, at.faults) == ("10.0.0.9", ("10.0.0.2",), 1)


class RestartedOperator:
    """Drives two pods by its rules, and is restarted before any of its calls: it then begins from what pods say.

    Args:
        pods: what each pod is at first.
        end: number of the call before which it ends.
    """

    def __init__(self, pods: list[Pod], end: int) -> None:
        self.pods, self.calls, self.end = pods, 0, end

    def ask(self, number: int, answer: states.Answer) -> None:
        if self.calls == self.end:
            self.end = -1
            raise InterruptedError
        self.calls += 1
        assert answer.status == 200, answer.why
        runs = answer.pod.agent_rank is not None and Order.END not in answer.orders
        self.pods[number] = states.is_ready(answer.pod, NOW, agent_runs=runs)

    def recover(self, faults: int) -> None:
        """After a fault: stop all, tell all who they are, start all."""
        for number in (0, 1):
            self.ask(number, states.stop(self.pods[number], Stop(), NOW))
        for number in (0, 1):
            self.ask(number, states.update(self.pods[number], Ranks(**body(rank=number, faultCount=faults))))
        for number in (0, 1):
            self.ask(number, states.start(self.pods[number], Start(**body(rank=number, faultCount=faults)), NOW))


@pytest.mark.parametrize("counts_on", [False, True], ids=["same faultCount", "one more"])
@pytest.mark.parametrize("end", range(6))
def test_an_operator_may_be_restarted_anywhere_in_a_fault(end: int, counts_on: bool) -> None:
    pods = [states.start(ready(), Start(**body(rank=number)), NOW).pod for number in (0, 1)]
    pods[1] = states.job_ended(pods[1], NOW, succeeded=False, message="why", restart_mode="process_level_restart")
    operator = RestartedOperator(pods, end)
    with pytest.raises(InterruptedError):
        operator.recover(1)
    operator.recover(2 if counts_on else 1)
    assert [(pod.state, pod.agent_rank, pod.restart_mode) for pod in operator.pods] == [
        (State.RUNNING, rank, "in_process_restart") for rank in (0, 1)
    ]


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


def test_of_a_job_that_goes_on_without_lost_ranks_it_is_said_how_many_train_meanwhile() -> None:
    hurt = states.fault_seen(running(), "rank 2, step 5: killed by SIGKILL (9)")
    for ranks in (2, 3):  # one of the two that were lost is back
        hurt = states.goes_on_without(hurt, 4, ranks, 4)
    told = "rank 2, step 5: killed by SIGKILL (9); meanwhile 3 of 4 ranks train from step 4 on"
    assert (hurt.reason, hurt.message) == ("MendingInPlace", told)
    assert states.fault_mended(hurt, 9).message == f"{told}; mended in place, all ranks train from step 9 on"
    assert states.goes_on_without(running(), 4, 3, 4) == running()


def test_a_job_that_has_gone_on_to_its_end_while_the_operator_stopped_it_is_not_begun_anew() -> None:
    stopped = states.stop(running(), Stop(), NOW).pod
    ended = states.job_ended(stopped, NOW, succeeded=True, message="", restart_mode="")
    ended = states.is_ready(ended, NOW, agent_runs=False)
    answer = states.start(ended, Start(**body(faultCount=1)), NOW)
    assert (answer.orders, answer.pod.state) == ((), State.COMPLETED)
    anew = states.is_ready(states.stop(answer.pod, Stop(), NOW).pod, NOW, agent_runs=False)
    assert states.start(anew, Start(**body(faultCount=2)), NOW).orders == (Order.BEGIN,), "who wants that, asks for it"


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
    why = states.why_refused(caller, allowed, ["10.0.0.1", "10.0.0.2", "fd00::2"], Caller(), 5.0)
    assert (why == "") is may, why


def test_who_ordered_first_is_the_operator_as_long_as_it_calls() -> None:
    def why(caller: str, now: float) -> str:
        return states.why_refused(caller, (), ["10.0.0.2"], operator, now)

    operator = states.obeyed(Caller(), "127.0.0.1", 1.0)
    assert operator == Caller(), "what is in the pod itself is nobody that others are kept out for"
    operator = states.obeyed(operator, "::ffff:10.9.0.1", 100.0)
    assert why("10.9.0.1", 101.0) == ""
    assert "10.9.0.1 is, and called 5 s ago" in why("10.9.0.7", 105.0)
    operator = states.heard(operator, "10.9.0.1", 150.0)  # it polls
    operator = states.heard(operator, "10.9.0.7", 200.0)  # so may anybody
    assert why("10.9.0.7", 209.0) != ""
    assert why("10.9.0.7", 210.0) == "", "it was started again at another address"
    assert why("10.0.0.2", 210.0) != "", "a pod of the job is it never"
    operator = states.obeyed(operator, "10.9.0.7", 211.0)
    assert "10.9.0.7 is" in why("10.9.0.1", 212.0), "the former one is none any more"
    assert why("127.0.0.1", 212.0) == ""
