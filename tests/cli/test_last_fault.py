"""What the event log alone tells of the last fault: its cause, what came of it, what was tried, and how it ended."""

from __future__ import annotations

from typing import Any

import pytest
from hyperpod_ext.cli.report.last_fault import LastFault, last_fault
from made_events import entry, events_of

Entry = dict[str, Any]
BEGUN = [entry(0.0, "job_started"), entry(1.0, "go", step=0)]
KILLED = entry(
    2.0, "fault", rank=1, node=0, step=3, cause="killed by SIGKILL (9)", died=True, kind="signal", phase="backward",
    escalation_level="process",
)  # fmt: skip


def told(*entries: Entry) -> LastFault:
    found = last_fault(events_of([*BEGUN, *entries]))
    assert found is not None
    return found


def test_a_killed_rank_that_was_replaced() -> None:
    found = told(KILLED, entry(3.0, "go", step=2), entry(3.1, "restored", rank=1, step=2, source="live"))
    assert found.sentence == "rank 1 on node 0, step 3 (backward): killed by SIGKILL (9)"
    assert found.tried == ("the process was replaced",)
    assert found.outcome == "all ranks continued after step 2, one rank with the state of a live rank"
    assert (found.recovered, found.kind) == (True, "signal")


def test_the_first_of_several_is_the_cause_and_a_broken_connection_never_is() -> None:
    broken = entry(
        1.9, "fault", rank=2, node=1, step=3, cause="Connection closed by peer", died=False, kind="connection"
    )
    lost = entry(2.5, "node_lost", node=1, cause="the connection to its agent closed")
    of_it = [
        entry(2.6, "fault", rank=rank, node=1, step=3, cause="node 1 is lost: ...", died=True, kind="lost")
        for rank in (2, 3)
    ]
    waits = entry(2.7, "awaiting_node", node=1, seconds=30.0)
    found = told(broken, KILLED, lost, *of_it, waits, entry(9.0, "job_ended", state="failed"))
    assert found.cause.startswith("rank 1 on node 0")
    assert found.chain == (
        "rank 2 on node 1, step 3: Connection closed by peer",
        "node 1 was lost: the connection to its agent closed",
    )
    assert found.tried == ("the process was replaced", "the job waited up to 30 s for another node in place of node 1")
    assert (found.outcome, found.recovered) == ("the job failed", False)


def test_faults_that_were_recovered_from_are_another_story() -> None:
    raised = entry(
        5.0, "fault", rank=0, node=0, step=7, cause="ValueError: bad (t.py:3)\nmore", died=False, kind="exception"
    )
    found = told(KILLED, entry(3.0, "go", step=2), raised)
    assert (found.cause, found.chain) == ("rank 0 on node 0, step 7: ValueError: bad (t.py:3)", ())
    assert found.outcome == "no rank has continued since"


@pytest.mark.parametrize(
    ("after", "outcome", "recovered"),
    [
        ([entry(3.0, "memory_back", node=1, seconds=0.5)], "training continued", True),
        ([entry(3.0, "job_ended", state="failed")], "the job failed", False),
        ([], "no new memory server started", False),
    ],
)
def test_a_memory_server_that_ended(after: list[Entry], outcome: str, recovered: bool) -> None:
    found = told(entry(2.0, "memory_lost", node=1, step=4, cause="the memory server ended: killed"), *after)
    assert found.cause == "node 1, step 4: the memory server ended: killed"
    assert (found.outcome, found.recovered, found.kind) == (outcome, recovered, "memory-server")


def test_no_fault_has_no_story() -> None:
    assert last_fault(events_of(BEGUN)) is None
    assert last_fault(events_of([])) is None
