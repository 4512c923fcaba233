"""How the last step comes home: what a node tells of its part, and what the report makes of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from made_events import made

from hyperpod_ext.runtime.agent.copies import CopyMonitor, LastStep
from hyperpod_ext.runtime.events.durable_steps import durable_steps, left_out
from hyperpod_ext.runtime.events.event import Event, Events
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.memory_server.protocol.requests import Held, ServerStatus, Snapshots, Status, UploadProgress

HOME = made(1.0, "final_save", save_id="g1-s13", step=13, made=13, nodes=[0, 1, 2])


def part(*, arrived: bool = False, newest: int | None = 10, ranks: tuple[int, ...] = (0, 1), error: str = "") -> Any:
    left = {"left_ranks": list(ranks), "left_bytes": len(ranks) << 20}
    return {"tier": "/d", "arrived": arrived, "newest_step": newest, **left, "error": error}


def uploaded(node: int, *tiers: Any, in_time: bool = True) -> Event:
    return made(1.0, "uploaded", node=node, in_time=in_time, limit_s=60.0, tiers=list(tiers))


def copied(node: int, step: int | None, tier: str = "/d") -> Event:
    return made(1.0, "copying", tier=tier, node=node, newest_step=step)


# --- what the report says ---------------------------------------------------------------------------


def test_a_tier_has_the_newest_step_that_any_node_has_told_of_and_that_was_not_given_up() -> None:
    events = Events([copied(0, 10), copied(1, 5), copied(0, 90, "peer"), copied(0, None, "/e")])
    assert durable_steps(events) == [{"tier": "/d", "newest_step": 10}, {"tier": "/e", "newest_step": None}]
    back = Events([*events, made(2.0, "go", step=7)])
    assert durable_steps(back)[0] == {"tier": "/d", "newest_step": 5}
    assert durable_steps(Events([*back, uploaded(0, part(newest=13))]))[0] == {"tier": "/d", "newest_step": 13}


def test_nothing_is_left_out_once_one_node_has_seen_the_step_committed() -> None:
    arrived = part(arrived=True, newest=13, ranks=())
    refused = part(ranks=(), error="the store went away")
    assert left_out(Events([HOME, uploaded(0, arrived), uploaded(1, refused)])) == []
    assert left_out(Events([])) == []


def test_what_is_left_out_is_named_with_step_tier_ranks_bytes_and_why() -> None:
    late = uploaded(0, part(), in_time=False)
    refused = uploaded(1, part(newest=None, ranks=(2,), error="No space left on device"))
    waited = uploaded(2, part(ranks=()), in_time=False)
    (line,) = left_out(Events([copied(0, 10), HOME, late, refused, waited]))
    assert line == (
        "step 13 is not in /d, and the newest durable step there is 10: node 0 left out 2 shards of ranks 0, 1, "
        "2.0 MiB (not done within 60 s); node 1 left out 1 shard of rank 2, 1.0 MiB (No space left on device); "
        "node 2 waited for other nodes (not done within 60 s). Started again, the job goes on from its newest durable "
        "step."
    )
    (line,) = left_out(Events([HOME, refused, waited]))
    assert "(not done within 60 s); node 0 was lost. Started" in line
    (line,) = left_out(Events([HOME]))
    assert line == "step 13 may be in no durable tier: nodes 0, 1, 2 did not report an upload"


def test_a_step_that_not_all_ranks_hold_is_told_and_so_are_nodes_that_never_heard_of_it() -> None:
    (line,) = left_out(Events([HOME.model_copy(update={"step": 10}), uploaded(0, part(arrived=True))]))
    assert line == "step 13 was made last, but the newest step with snapshots of all ranks is 10"
    (line,) = left_out(Events([HOME.model_copy(update={"step": None}), uploaded(0)]))
    assert "no step has snapshots of all ranks" in line
    assert left_out(Events([HOME.model_copy(update={"step": None, "made": 0})])) == [], (
        "a job that made no step lacks none"
    )
    (line,) = left_out(Events([uploaded(0, in_time=False), uploaded(1, in_time=False)]))
    assert line == "the newest step that all ranks hold was not known within 60 s, so only due checkpoints are durable"


# --- a node's part ----------------------------------------------------------------------------------


def brought(answers: list[UploadProgress], limit_s: float, name: str | None = "g1-s13") -> list[Any]:
    """What a node tells, whose memory server answers so."""
    told: list[Any] = []

    async def ask(request: Any) -> Any:
        match request:
            case Held():
                return Snapshots(snapshots=(), pieces=())
            case Status():
                return ServerStatus(snapshots=(), copying=())
        told.append((request.op, request.save_id))
        return answers.pop(0)

    def event(kind: str, **fields: Any) -> None:
        told.append((kind, fields.get("in_time")))

    async def run() -> None:
        def tell(report: c.LastSnapshots | c.Uploaded) -> None:
            if isinstance(report, c.LastSnapshots):
                told.append(("leaving", report.held))
                if name is not None:
                    last.name(name)

        memory: Any = SimpleNamespace(ask=ask, ended="")
        last = LastStep(memory, CopyMonitor(ask, event, lambda why, **_: None), tell, event)
        last.name("g1-s1")  # of an earlier upload
        await last.upload((), limit_s)

    asyncio.run(run())
    return told


def test_a_node_tells_how_far_its_part_is_until_it_is_there_or_its_time_is_over() -> None:
    way = UploadProgress(idle=False, tiers=(part(),))
    there = UploadProgress(idle=True, tiers=(part(arrived=True),))
    asked, leaving = ("upload_now", "g1-s13"), ("leaving", ())
    assert brought([way, there], 3600.0) == [leaving, asked, ("uploading", None), asked, ("uploaded", True)]
    assert brought([way], 0.0) == [leaving, asked, ("uploaded", False)]


def test_a_node_that_never_hears_which_step_it_is_waits_no_longer_than_it_may() -> None:
    assert brought([UploadProgress(idle=False, tiers=())], 0.0, None)[-1] == ("uploaded", False)
