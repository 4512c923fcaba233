"""What a run comes to, decided from plain values."""

from __future__ import annotations

from typing import Any

import pytest

from hyperpod_ext.jobs.local.engine import _grace_period
from hyperpod_ext.jobs.local.nodes import GracePeriod, next_action
from hyperpod_ext.jobs.local.result import EMPTY_REPORT, NodeEnd, final_report, lost_result, make_result, same

GOOD: dict[str, Any] = EMPTY_REPORT | {
    "state": "succeeded",
    "losses": {"1": 0.1, "2": 0.2},
    "weights": "abc",
    "steps": 2,
    "goodput": 0.5,
    "seconds": {"wall": 3.0},
}


ALONE = "node 1 stops: the coordinator, node 0, is lost"


def ends(*codes: int) -> list[NodeEnd]:
    """Each node's only end."""
    return [NodeEnd(node, code) for node, code in enumerate(codes)]


def test_the_first_node_that_was_killed_is_the_cause_and_what_came_of_it_follows() -> None:
    seen = [NodeEnd(0, -9, again=True), NodeEnd(1, 7), NodeEnd(0, 130, asked=True)]
    report = GOOD | {"state": "failed", "error": {"code": "ExcludedError", "message": ALONE, "hint": "Three nodes"}}
    settled = final_report(report, seen, False, "node 0: cancelled", {1: ALONE})
    assert settled["error"] == {
        "code": "JobFailedError",
        "message": f"after step 2: node 0 was killed by SIGKILL (9), and was started again. Then: {ALONE}",
        "hint": "Three nodes",
    }
    assert (settled["state"], settled["steps"]) == ("failed", 2)


def test_a_job_that_only_the_engine_had_end_was_not_cancelled() -> None:
    refused = "node 1 stops: it was lost 2 times"
    seen = [NodeEnd(1, -9, again=True), NodeEnd(1, -9, again=True), NodeEnd(1, 7), NodeEnd(0, 130, asked=True)]
    settled = final_report(GOOD | {"state": "cancelled"}, seen, False, "", {1: refused})
    assert settled["state"] == "failed"
    assert settled["error"]["message"].startswith("after step 2: node 1 was killed by SIGKILL (9)")
    assert settled["error"]["message"].endswith(refused)


def test_a_job_whose_agents_somebody_told_to_end_was_cancelled() -> None:
    assert final_report(GOOD | {"state": "cancelled"}, ends(130, 130), False, "")["state"] == "cancelled"


def test_a_coordinators_word_stands_and_says_what_the_engine_saw() -> None:
    report = GOOD | {"state": "failed", "error": {"code": "X", "message": "node 1 is lost", "hint": "h"}}
    settled = final_report(report, [NodeEnd(1, -9), NodeEnd(0, 7)], False, "")
    assert settled["error"] == {
        "code": "X",
        "message": "node 1 is lost. The engine saw: node 1 was killed by SIGKILL (9)",
        "hint": "h",
    }


def test_a_coordinators_word_is_followed_by_what_nodes_said_themselves() -> None:
    """The coordinator saw a connection end, and the engine an exit code."""
    report = GOOD | {"state": "failed", "error": {"code": "X", "message": "node 2 is lost.", "hint": "h"}}
    own = {2: "node 2: the memory server ended: killed by SIGKILL (9)"}
    settled = final_report(report, [NodeEnd(2, 7), NodeEnd(1, 7)], False, "", own)
    assert settled["error"]["message"] == f"node 2 is lost. The engine saw: {own[2]}"


def test_faults_of_lost_nodes_say_how_they_were_killed() -> None:
    """Those who went on have only seen a connection end."""
    lost = {"kind": "lost", "node": 1, "rank": 1, "cause": "node 1 is lost: the connection to its agent closed"}
    other = {"kind": "signal", "node": 1, "rank": 0, "cause": "killed by SIGSEGV (11)"}
    report = GOOD | {"faults": [lost, other], "recoveries": [{"fault": lost}], "nodes_lost": [1]}
    settled = final_report(report, [NodeEnd(1, -9), NodeEnd(0, 0)], False, "")
    cause = f"{lost['cause']}; its agent was killed by SIGKILL"
    assert settled["state"] == "succeeded"
    assert [fault["cause"] for fault in settled["faults"]] == [cause, other["cause"]]
    assert settled["recoveries"][0]["fault"]["cause"] == cause


def test_an_engine_that_was_killed_says_what_it_had_seen() -> None:
    error = lost_result("a", "local://localhost/a", "the engine died", "engine.log", [NodeEnd(1, -9, again=True)])[
        "error"
    ]
    assert error["message"] == "the engine died. Before: node 1 was killed by SIGKILL (9), and was started again"


def test_a_report_and_clean_exits_stand_as_they_are() -> None:
    assert final_report(GOOD, ends(0, 0), False, "") == GOOD


def test_no_report_is_a_failure_that_shows_the_log() -> None:
    settled = final_report(None, ends(0, 1), False, "Traceback: boom")
    assert settled["state"] == "failed"
    assert settled["error"]["message"] == "node 1 ended with exit code 1 without a report\nTraceback: boom"


def test_success_with_a_dead_node_is_no_success() -> None:
    settled = final_report(GOOD, ends(0, -9), False, "")
    assert (settled["state"], settled["error"]["message"]) == (
        "failed",
        "node 1 was killed by SIGKILL (9) after its report",
    )


def test_a_failure_keeps_the_error_of_its_report() -> None:
    report = GOOD | {"state": "failed", "error": {"code": "X", "message": "why", "hint": ""}}
    assert final_report(report, ends(7, 7), False, "log")["error"]["message"] == "why"


@pytest.mark.parametrize("report", [GOOD, None])
def test_a_cancelled_run_is_cancelled_whatever_else_it_says(report: dict[str, Any] | None) -> None:
    assert final_report(report, ends(130, -9), True, "")["state"] == "cancelled"


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({}, True),
        ({"losses": {"1": 0.1, "2": 0.2 + 1e-16}}, False),
        ({"losses": {"1": 0.1}}, False),
        ({"losses": {}}, None),
    ],
)
def test_losses_are_equal_only_when_every_one_is(change: dict[str, Any], equal: bool | None) -> None:
    assert same(GOOD, GOOD | change, "losses") is equal
    assert same(GOOD | change, GOOD, "losses") is equal


def test_nothing_to_compare_with_is_neither_yes_nor_no() -> None:
    result = make_result("a", "local://localhost/a", GOOD, None)
    assert (result["loss_equal"], result["weights_equal"], result["undisturbed"]) == (None, None, None)


def test_the_result_has_both_runs() -> None:
    result = make_result("a", "local://localhost/a", GOOD, GOOD | {"weights": "abd"})
    assert (result["loss_equal"], result["weights_equal"]) == (True, False)
    assert result["undisturbed"] == {"steps": 2, "seconds": 3.0, "goodput": 0.5}
    assert (result["name"], result["target"], result["state"]) == ("a", "local", "succeeded")


def test_a_run_that_resumed_is_compared_from_its_first_step_on() -> None:
    resumed = GOOD | {"resumed_step": 1, "losses": {"2": 0.2}}
    assert make_result("a", "local://localhost/a", resumed, GOOD)["loss_equal"] is True
    other = GOOD | {"losses": {"1": 0.1, "2": 0.3}}
    assert make_result("a", "local://localhost/a", resumed, other)["loss_equal"] is False
    begun = GOOD | {"losses": {"2": 0.2}}
    assert make_result("a", "local://localhost/a", begun, GOOD)["loss_equal"] is False


def test_a_comparison_that_could_not_be_made_fails_the_job() -> None:
    undisturbed = final_report(None, ends(1), False, "boom")
    result = make_result("a", "local://localhost/a", GOOD, undisturbed)
    assert result["state"] == "failed"
    assert "run without faults" in result["error"]["message"]
    assert result["loss_equal"] is None


@pytest.mark.parametrize(
    ("now", "failed_at", "asked_at", "cancelled", "wanted"),
    [
        (0.0, None, None, False, ("wait", None)),
        (1.0, None, None, True, ("terminate", 0.0)),
        (5.0, 0.0, None, False, ("wait", 5.0)),
        (10.0, 0.0, None, False, ("terminate", 0.0)),
        (12.0, 0.0, 10.0, True, ("wait", 3.0)),
        (15.0, 0.0, 10.0, False, ("kill", None)),
    ],
)
def test_nodes_are_left_alone_then_asked_then_killed(
    now: float, failed_at: float | None, asked_at: float | None, cancelled: bool, wanted: tuple[str, float | None]
) -> None:
    assert next_action(now, failed_at, asked_at, cancelled, GracePeriod()) == wanted


def test_nodes_that_are_told_to_end_have_their_grace_before_they_are_killed() -> None:
    restart = {"lease_s": 6.0, "node_wait_s": 60.0, "max_node_losses": 3}
    job = {"nodes": 2, "spares": 0, "elastic": None, "restart": restart}
    memory, file = {"kind": "memory"}, {"kind": "file", "path": "/d"}
    kept = [
        _grace_period(job | {"checkpoint": {"grace_s": 25.0, "tiers": tiers}}) for tiers in ([memory], [memory, file])
    ]
    assert [patience.after_asking_s for patience in kept] == [5.0, 30.0]
