"""From the event log to the report."""

from __future__ import annotations

from typing import Any

import pytest
from made_events import entry, events_of

from hyperpod_ext.runtime.events import report
from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.report import (
    OWN_LOSS,
    account,
    committed_step,
    find_recoveries,
    kept_steps,
    make_report,
)

Entry = dict[str, Any]


def step(t: float, number: int, rank: int, generation: int = 1, took: float = 1.0) -> Entry:
    return entry(t, "step", step=number, rank=rank, generation=generation, began=t - took, loss=10.0 / number)


def story() -> list[Entry]:
    """Two ranks; 1 is killed while it makes step 3, at t = 13.5; step 3 is whole again at t = 16."""
    return [
        entry(0.0, "job_started"),
        entry(9.0, "joined", rank=0, pid=100),
        entry(9.0, "joined", rank=1, pid=101),
        entry(9.5, "generation", generation=1, step=0),
        entry(10.0, "begun", rank=0, step=0, generation=1),
        entry(10.0, "begun", rank=1, step=0, generation=1),
        *[step(11.0, 1, rank) for rank in (0, 1)],
        *[step(12.0, 2, rank) for rank in (0, 1)],
        entry(13.5, "killed", rank=1, step=3),
        entry(13.6, "fault", rank=1, node=0, step=3, cause="killed by SIGKILL (9)", died=True),
        entry(13.7, "aborted", rank=0, step=2),
        entry(13.75, "joined", rank=0, pid=100),
        entry(14.0, "joined", rank=1, pid=102),
        entry(14.0, "generation", generation=2, step=2),
        entry(14.2, "groups_open", rank=0),
        entry(14.1, "groups_open", rank=1),
        entry(14.5, "go", step=2),
        entry(14.5, "restored", rank=1, step=2, source="memory"),
        entry(14.6, "begun", rank=0, step=2, generation=2),
        entry(14.6, "begun", rank=1, step=2, generation=2),
        *[step(16.0, 3, rank, generation=2, took=1.4) for rank in (0, 1)],
        entry(17.0, "done", rank=0, digest="d"),
        entry(17.0, "done", rank=1, digest="d"),
        entry(18.0, "job_ended"),
    ]


def test_a_recovery_has_its_phases_in_seconds():
    (recovery,) = find_recoveries(events_of(story()), world_size=2)
    assert recovery["phases"] == pytest.approx(
        {
            "fault_seen": 0.1,
            "survivors_freed": 0.1,
            "new_member": 0.3,
            "groups_back": 0.2,
            "state_back": 0.3,
            "first_new_step": 1.5,
        }
    )
    assert recovery["seconds"] == pytest.approx(2.5)
    assert (recovery["resumed_step"], recovery["steps_lost"], recovery["source"]) == (2, 0, "memory")
    assert recovery["survivor_pids_kept"]


def test_how_long_nobody_made_a_step_before_a_fault_is_known():
    (recovery,) = find_recoveries(events_of(story()), world_size=2)
    assert recovery["silent_s"] == pytest.approx(13.6 - 12.0)
    before_any = [e for e in story() if e["event"] not in ("begun", "step") or e["t"] > 14.0]
    assert find_recoveries(events_of(before_any), world_size=2)[0]["silent_s"] is None


def test_a_survivor_with_a_new_process_id_is_noticed():
    events = story()
    for one in events:
        if one["event"] == "joined" and one["t"] == 13.75:
            one["pid"] = 999
    assert not find_recoveries(events_of(events), world_size=2)[0]["survivor_pids_kept"]


def test_going_back_behind_a_committed_step_is_a_lost_step():
    events = story()
    for one in events:
        if one["event"] == "go":
            one["step"] = 1
    assert find_recoveries(events_of(events), world_size=2)[0]["steps_lost"] == 1


def recovery(t: float, generation: int, step_of_go: int | None, decided: int) -> list[Entry]:
    """Rank 1 dies at `t`, and all go on after a step; None: the next fault comes first."""
    chosen = [
        entry(t, "fault", rank=1, node=0, step=9, cause="killed by SIGKILL (9)", died=True),
        *[entry(t + 0.1, "joined", rank=rank, pid=200 + generation) for rank in (0, 1)],
        entry(t + 0.2, "generation", generation=generation, step=decided),
    ]
    if step_of_go is None:
        return chosen
    begun = [entry(t + 0.3, "begun", rank=rank, step=step_of_go, generation=generation) for rank in (0, 1)]
    return [*chosen, entry(t + 0.3, "go", step=step_of_go), *begun]


def test_a_lost_step_is_lost_once():
    """All go back from step 5 to 2, make step 3, and lose nothing in the recovery after that."""
    begin = [entry(0.0, "job_started"), entry(0.5, "generation", generation=1, step=0), entry(0.6, "go", step=0)]
    steps = [step(float(number), number, rank) for number in range(1, 6) for rank in (0, 1)]
    again = [step(8.0, 3, rank, generation=2) for rank in (0, 1)]
    events = [*begin, *steps, *recovery(6.0, 2, 2, decided=2), *again, *recovery(9.0, 3, 3, decided=3)]
    assert [one["steps_lost"] for one in find_recoveries(events_of(events), world_size=2)] == [3, 0]


def test_a_choice_that_nobody_went_on_from_loses_nothing():
    begin = [entry(0.0, "job_started"), entry(0.5, "generation", generation=1, step=0), entry(0.6, "go", step=0)]
    steps = [step(float(number), number, rank) for number in range(1, 6) for rank in (0, 1)]
    events = [*begin, *steps, *recovery(6.0, 2, None, decided=1), *recovery(7.0, 3, 4, decided=4)]
    assert [one["steps_lost"] for one in find_recoveries(events_of(events), world_size=2)] == [0, 1]


def test_what_recoveries_cost_grows_with_the_log_not_with_their_number(monkeypatch):
    """Each event is looked at for one recovery, or two: not for all that come after it."""
    events = [entry(0.0, "job_started"), entry(0.5, "generation", generation=1, step=0), entry(0.6, "go", step=0)]
    for number in range(1, 31):
        events += [step(10.0 * number + 1, number, rank, generation=number) for rank in (0, 1)]
        events += recovery(10.0 * number + 2, number + 1, number, decided=number)
    looked_at = []  # sizes of the parts in which steps are looked for
    monkeypatch.setattr(
        report,
        "committed_step",
        lambda part, world_size: looked_at.append(len(part)) or committed_step(part, world_size),
    )
    assert [one["steps_lost"] for one in find_recoveries(events_of(events), world_size=2)] == [0] * 30
    assert sum(looked_at) <= len(events)


def test_a_step_that_one_rank_never_finished_is_not_committed():
    assert committed_step(events_of([step(1.0, 1, 0), step(1.0, 1, 1), step(2.0, 2, 0)]), world_size=2) == 1


def test_who_struck_unannounced_has_no_time_of_striking():
    events = [one for one in story() if one["event"] != "killed"]
    (recovery,) = find_recoveries(events_of(events), world_size=2)
    assert recovery["phases"]["fault_seen"] is None
    assert recovery["seconds"] == pytest.approx(2.4)


def test_every_second_is_accounted_for_once():
    events = events_of(story())
    seconds = account(events, kept_steps(events), find_recoveries(events, 2))
    assert seconds["wall"] == 18.0
    assert seconds["startup"] == 10.0
    assert seconds["steps"] == pytest.approx(2.0 + 1.4)
    assert seconds["recovery"] == pytest.approx(1.0)
    assert sum(value for name, value in seconds.items() if name != "wall") == pytest.approx(18.0)


def test_the_report_of_a_whole_run():
    made = make_report(events_of(story()), state="succeeded", error=None, world_size=2)
    assert made["losses"] == {"1": 10.0, "2": 5.0, "3": 10.0 / 3}
    assert made["weights"] == "d"
    assert made["generations"] == 2
    assert made["goodput"] == pytest.approx(3.4 / 18, abs=1e-4)


def test_ranks_that_end_with_different_state_show_it():
    events = story()
    events[-2]["digest"] = "e"
    assert make_report(events_of(events), state="succeeded", error=None, world_size=2)["weights"] == "d/e"


def test_a_job_that_never_started_has_a_report_too():
    made = make_report(Events(), state="failed", error={"code": "x"}, world_size=4)
    assert (made["steps"], made["weights"], made["goodput"]) == (0, "", 0.0)


def test_two_lost_of_a_parity_group_are_a_warning_of_the_report():
    told = [*story(), entry(13.9, "parity_short", step=3, ranks=[0, 1], restored_step=2)]
    (warning,) = make_report(events_of(told), state="succeeded", error=None, world_size=2)["warnings"]
    assert warning.endswith("the snapshots of ranks 0, 1 are missing. All ranks continued from step 2.")


def test_what_no_snapshot_holds_is_a_warning_once_there_was_a_fault():
    unsaved = [entry(10.6, "unsaved", rank=0, objects=["mean (float)"]) for _ in range(2)]
    told = sorted([*story(), *unsaved], key=lambda each: each["t"])
    report = make_report(events_of(told), state="succeeded", error=None, world_size=2)
    (warning,) = report["warnings"]
    assert "mean (float)" in warning
    assert report["in_no_snapshot"] == ["mean (float)"]
    assert report_of(unsaved)["warnings"] == []


def test_a_process_that_began_with_another_script_is_a_warning():
    began = [entry(10.1 + rank, "worker_started", rank=rank, pid=1, node=0, script="aa") for rank in (0, 1)]
    assert report_of(began)["warnings"] == []
    later = entry(13.0, "worker_started", rank=1, pid=2, node=0, script="bb")
    (warning,) = report_of([*began, later])["warnings"]
    assert "rank 1 started with another version than rank 0" in warning


def test_numbers_that_ranks_log_differently_are_named():
    def made(number: int, rank: int, generation: int = 1, **logged: float | None) -> Entry:
        return entry(float(number), "step", step=number, rank=rank, generation=generation, began=0.0, **logged)

    same = [made(1, rank, loss=1.5, skipped=None) for rank in (0, 1)]
    again = [made(1, rank, 2, loss=1.25) for rank in (0, 1)]  # made once more: ranks of one making are compared
    own = [made(2, rank, loss=float(rank), lr=0.1, seconds=0.5 + rank) for rank in (0, 1)]
    assert report_of([*same, *again])["differs_by_rank"] == []
    report = report_of([*same, *again, *own])
    assert report["differs_by_rank"] == ["loss", "seconds"]
    assert report["warnings"] == [OWN_LOSS]


def test_a_number_of_the_whole_run_that_ranks_log_differently_is_warned_of():
    logged = [entry(9.0, "metric", rank=rank, generation=1, steps_a_second=5.0, held_out=rank / 2) for rank in (0, 1)]
    (warning,) = report_of(logged)["warnings"]
    assert "different values of held_out" in warning


def test_a_report_says_which_checkpoint_an_earlier_run_left():
    report = report_of([entry(1.0, "go", step=4, checkpoint="/tier/a/step-000000004-g000001")])
    assert (report["resumed_step"], report["resumed_from"]) == (4, "/tier/a/step-000000004-g000001")
    assert report_of([entry(1.0, "go", step=0)])["resumed_from"] == ""


def report_of(events: list[Entry]) -> Entry:
    return make_report(events_of(events), state="succeeded", error=None, world_size=2)


def test_a_node_on_which_no_worker_was_started_was_a_spare() -> None:
    nodes = [entry(0.1, "network", generation=1, node=node, interface="", address="127.0.0.1") for node in range(4)]
    workers = [
        entry(1.0 + rank, "worker_started", generation=1, node=(0, 1, 3)[rank], rank=rank, pid=9) for rank in range(3)
    ]
    report = make_report(events_of([*nodes, *workers]), state="succeeded", error=None, world_size=2)
    assert report["spares"] == [2]
