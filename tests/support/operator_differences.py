"""What is compared of AWS's agent and ours, call by call, and in what the two may differ: the table of the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from operator_calls import FAULT, NODES, Asked, Step
from pydantic import ValidationError

from hyperpod_ext.runtime.operator_api.requests import Ranks, Start, is_address


@dataclass(frozen=True)
class Seen:
    """Something in which the two are not alike."""

    step: Step
    field: str
    """`code`; `answer`: keys of what is said; `wrong`: fields that a 422 names; `entered`: states that this step has
    entered; `changed`: what is not as before though ours has refused the call; else a field of `/status`."""
    theirs: Any
    ours: Any
    before: dict[str, Any]
    """What our `/status` said before."""
    accepted: Sequence[Step]
    """Steps before, which both have taken alike."""
    at_once: bool
    """Read before the agent had time to follow."""
    flag: str
    """`--inprocess-restart`, or none."""

    def __str__(self) -> str:
        return f"{self.step}\n    in {self.before['status']} {self.flag}: {self.field}: {self.theirs!r} | {self.ours!r}"

    @property
    def ranks(self) -> Ranks | None:
        """What the call says of ranks and addresses, if it is well formed."""
        return _ranks(self.step)

    @property
    def known(self) -> Ranks | None:
        """The same of the last one that both have taken."""
        taken = [ranks for step in self.accepted if (ranks := _ranks(step))]
        return taken[-1] if taken else None

    @property
    def table(self) -> dict[int, str]:
        """Addresses that both know of."""
        taken = [ranks for step in self.accepted if (ranks := _ranks(step))]
        return {line.rank: line.ip for ranks in taken for line in ranks.rankIps or ()}


def _ranks(step: Step) -> Ranks | None:
    if step.path not in ("/start", "/update") or step.method != "POST":
        return None
    try:
        return (Start if step.path == "/start" else Ranks).model_validate_json(step.body or b"null")
    except ValidationError:
        return None


@dataclass
class Comparison:
    """Sends sequences to both, and keeps what differs."""

    theirs: Asked
    ours: Asked
    flag: str = ""
    """Of `hyperpodrun`."""
    found: list[Seen] = field(default_factory=list)
    last_code: int = 0
    calls: int = 0
    """Of the sequences; those that bring the two to a state, and `/status` after each, are not counted."""
    codes: set[int] = field(default_factory=set)
    states: set[str] = field(default_factory=set)

    def run(self, steps: Sequence[Step]) -> None:
        """One sequence, from agents that know nothing."""
        accepted: list[Step] = []
        before = self._begin_anew(accepted)
        for step in steps:
            if step.what != "call" and any(said["status"] != "running" for said in before):
                continue
            seen, after = self._step(step, before, accepted)
            self.found += seen
            if after[0]["status"] != after[1]["status"] or any(one.field == "code" for one in seen):
                before = self._begin_anew(accepted)  # one has taken what the other has refused
            else:
                accepted.append(step if self.last_code < 400 else Step("turn"))
                before = after

    def _begin_anew(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        for asked in (self.theirs, self.ours):
            asked.new(self.flag)
            for step in steps:
                _take(asked, step)
        return [asked.status() for asked in (self.theirs, self.ours)]

    def _step(
        self, step: Step, before: Sequence[dict[str, Any]], accepted: Sequence[Step]
    ) -> tuple[list[Seen], list[dict[str, Any]]]:
        seen: list[Seen] = []

        def same(name: str, theirs: Any, ours: Any, *, at_once: bool = False) -> None:
            if theirs != ours:
                seen.append(Seen(step, name, theirs, ours, before[1], tuple(accepted), at_once, self.flag))

        def same_status(said: Sequence[dict[str, Any]], *, at_once: bool) -> None:
            for name in sorted({*said[0], *said[1]} - {"transitions", "agent_version"}):
                same(name, said[0].get(name), said[1].get(name), at_once=at_once)
            same("agent_version", *("agent_version" in one for one in said), at_once=at_once)
            same("transitions", *(sorted(one["transitions"]) for one in said), at_once=at_once)
            entered = [
                {name for name, when in now["transitions"].items() if was["transitions"].get(name) != when}
                for was, now in zip(before, said, strict=True)
            ]
            same("entered", *map(sorted, entered), at_once=at_once)

        sides, code, our_code, self.last_code = (self.theirs, self.ours), 0, 0, 0
        if step.what == "call":
            self.calls += 1
            (code, said), (our_code, we_said) = [asked.call(step) for asked in sides]
            self.codes.add(our_code)
            self.last_code = our_code
            same("code", code, our_code)
            if code == our_code:
                if isinstance(said, dict) and isinstance(we_said, dict) and "status" in said:
                    same_status([said, we_said], at_once=True)
                else:
                    same("answer", _shape(said), _shape(we_said))
                same("wrong", _wrong(said), _wrong(we_said))
                if step.path == "/stop":
                    same_status([asked.status() for asked in sides], at_once=True)
        for asked in sides:
            if step.what != "call":
                asked.tell(step.what)
            elif not step.held:
                asked.tell("turn")
        after = [asked.status() for asked in sides]
        self.states.update(one["status"] for one in after)
        if our_code >= 400 and before[1]["status"] != "stopping":
            same("changed", {}, {name: now for name, now in after[1].items() if now != before[1].get(name)})
        if code == our_code:
            same_status(after, at_once=step.held)
        return seen, after


def _take(asked: Asked, step: Step) -> None:
    if step.what != "call":
        asked.tell(step.what)
        return
    asked.call(step)
    if not step.held:
        asked.tell("turn")


def _shape(said: Any) -> Any:
    return sorted(said) if isinstance(said, dict) else type(said).__name__


def _wrong(said: Any) -> Any:
    """Which fields of a body a 422 calls wrong."""
    detail = said.get("detail") if isinstance(said, dict) else None
    if not isinstance(detail, list):
        return None
    return sorted({name for one in detail for name in one["loc"][1:2] if isinstance(name, str)})


# --- what may differ --------------------------------------------------------------------------------

IN_PROCESS = "--inprocess-restart"


@dataclass(frozen=True)
class Difference:
    """One in which the two may differ."""

    call: str
    theirs: str
    ours: str
    why: str
    holds: Callable[[Seen], bool] | None = None
    """Whether what was seen is a case of it; None: these calls have none."""


def _refused(seen: Seen) -> bool:
    """Whether AWS's agent takes it, or dies of it, and ours does not."""
    return seen.field == "code" and seen.theirs in (200, 500) and seen.ours == 409 and seen.ranks is not None


def _incomplete(seen: Seen) -> bool:
    ranks = seen.ranks
    assert ranks is not None
    table = seen.table | {line.rank: line.ip for line in ranks.rankIps or ()}
    return seen.step.path == "/start" and bool(table) and not set(range(NODES)) <= table.keys()


def _not_of_this_job(seen: Seen) -> bool:
    ranks = seen.ranks
    assert ranks is not None
    lines = ranks.rankIps or []
    return (
        ranks.nnodes != NODES
        or ranks.rank < 0
        or (ranks.rank >= NODES and (not ranks.spare or seen.step.path == "/start"))
        or any(line.rank < 0 or not is_address(line.ip) for line in lines)
        or len({line.rank for line in lines}) < len(lines)
    )


def _older(seen: Seen) -> bool:
    ranks, known = seen.ranks, seen.known
    assert ranks is not None
    return ranks.faultCount < (0 if known is None else known.faultCount)


def _moves_while_it_trains(seen: Seen) -> bool:
    ranks, known = seen.ranks, seen.known
    assert ranks is not None
    if known is None or seen.before["status"] != "running":
        return False
    told = {line.rank: line.ip for line in ranks.rankIps or ()}.get(ranks.rank)
    return ranks.rank != known.rank or ranks.spare or told not in (None, seen.table.get(ranks.rank))


def _anew(seen: Seen) -> bool:
    """Whether processes of `--inprocess-restart` have been begun anew so far."""
    if seen.flag != IN_PROCESS:
        return False
    steps = [*seen.accepted, seen.step]
    spares = [bool(ranks.spare) for step in steps if (ranks := _ranks(step))]
    stops = [step.said.get("restart_mode") or "" for step in steps if step.path == "/stop"]
    return (
        any(step.what in ("fail", "finish") for step in steps)
        or any(str(mode).lower() == "process_level_restart" for mode in stops)
        or any(spare and not before for before, spare in pairwise(spares))
    )


def _keeps_memory(seen: Seen) -> bool:
    """Whether the last `/stop` was of a job that trained, and of no whole restart, with no `/start` since."""
    trains, keeps = False, False
    for step in (*seen.accepted, seen.step):
        if step.path == "/start" and _ranks(step) is not None:
            trains, keeps = True, False
        elif step.what in ("fail", "finish"):
            trains, keeps = False, False
        elif step.path == "/shutdown" and step.method == "POST":
            return False
        elif step.path == "/stop" and step.method == "POST" and trains:
            keeps = str(step.said.get("restart_mode") or "").lower() != "job_level_restart"
            trains = False
    return keeps


def _last_is_a_fault(seen: Seen) -> bool:
    """And no `/start` has begun anything since."""
    fault = stopped = stopping = False
    for step in (*seen.accepted, seen.step):
        if step.what in ("fail", "finish"):
            fault, stopped, stopping = step.what == "fail", False, False
        elif step.path == "/stop" and step.method == "POST":
            stopping = True
        elif step.path == "/start" and stopped and _ranks(step) is not None:
            fault = False
        if stopping and not step.held:
            stopped, stopping = True, False
    return fault


def _lines_are_malformed(seen: Seen) -> bool:
    lines = seen.step.said.get("rankIps")
    return isinstance(lines, list) and any(
        not isinstance(line, dict) or not isinstance(line.get("rank"), int) or not isinstance(line.get("ip"), str)
        for line in lines
    )


DIFFERENCES: list[Difference] = [
    Difference(
        "`/start` whose `rankIps` lack a node",
        "200, and the agent may die of it",
        "409",
        "the job cannot begin",
        lambda seen: _refused(seen) and _incomplete(seen),
    ),
    Difference(
        "`/start`, `/update` with `nnodes` that the job cannot have, a rank or an address that is none or comes twice",
        "200, or 500",
        "409, nothing changes",
        "they are not of this job",
        lambda seen: _refused(seen) and _not_of_this_job(seen),
    ),
    Difference(
        "an older `faultCount`",
        "200",
        "409",
        "it is an older call",
        lambda seen: _refused(seen) and _older(seen),
    ),
    Difference(
        "`/start`, `/update` with another rank or own address, or as a spare, while the pod trains",
        "200",
        "409",
        "ranks change after `/stop`",
        lambda seen: _refused(seen) and _moves_while_it_trains(seen),
    ),
    Difference(
        "orders from the job's other pods, from outside of `operator_addresses`, or from another than the operator",
        "200",
        "403",
        "a pod that somebody has broken into stops no other",
    ),
    Difference(
        "a line of `rankIps` without `rank` or `ip`, an `ip` that is no text",
        "200 or 500",
        "422",
        "it is malformed",
        lambda seen: (
            seen.field == "code" and seen.theirs in (200, 500) and seen.ours == 422 and _lines_are_malformed(seen)
        ),
    ),
    Difference(
        "`rank` in `rankIps` as text",
        "500",
        "read as a number",
        "as elsewhere in a body",
        lambda seen: seen.field == "code" and (seen.theirs, seen.ours) == (500, 200) and _lines_are_malformed(seen),
    ),
    Difference(
        "`rankIps` with a rank over 100,000",
        "500",
        "it is passed over",
        "as others past the last node",
        lambda seen: (
            seen.field == "code"
            and (seen.theirs, seen.ours) == (500, 200)
            and any(line.rank > 100_000 for line in (seen.ranks and seen.ranks.rankIps) or ())
        ),
    ),
    Difference(
        "`NaN` in a body",
        "500",
        "422",
        "it is malformed",
        lambda seen: (
            seen.field == "code" and (seen.theirs, seen.ours) == (500, 422) and b"NaN" in (seen.step.body or b"")
        ),
    ),
    Difference(
        "a body that is no UTF-8",
        "400",
        "422",
        "as others that are malformed",
        lambda seen: (
            seen.field == "code" and (seen.theirs, seen.ours) == (400, 422) and (seen.step.body or b"")[:1] == b"\xff"
        ),
    ),
    Difference(
        "a body whose `Content-Type` is not JSON",
        "500",
        "read as JSON",
        "it is",
        lambda seen: seen.field == "code" and seen.theirs == 500 and seen.step.content_type != "application/json",
    ),
    Difference(
        "`/docs`, `/openapi.json`, `/redoc`, a `/` too much at the end of a path",
        "200 or 405, 307",
        "404",
        "an operator asks for none",
        lambda seen: (
            seen.field == "code"
            and seen.theirs in (200, 307, 405)
            and seen.ours == 404
            and seen.step.path in ("/docs", "/status/")
        ),
    ),
    Difference(
        "`assigned_rank` after `/update`",
        "that of the last `/start`, without `--inprocess-restart`",
        "the new one",
        "as with that flag",
        lambda seen: (
            seen.field == "assigned_rank" and not seen.flag and seen.ours == str(getattr(_newest(seen), "rank", None))
        ),
    ),
    Difference(
        "`spare`",
        "`True`, without `--inprocess-restart`",
        "what `/update` or `/start` said",
        "as with that flag",
        lambda seen: (
            seen.field == "spare" and not seen.flag and seen.ours == str(getattr(_newest(seen), "spare", None))
        ),
    ),
    Difference(
        "`restartMode`",
        "`process_level_restart`; with `--inprocess-restart` `in_process_restart`, until workers ask for another",
        "`in_process_restart`; from a fault to the next `/start` the one that mends it",
        "as with that flag",
        lambda seen: (
            seen.field == "restartMode"
            and seen.ours == ("process_level_restart" if _last_is_a_fault(seen) else "in_process_restart")
        ),
    ),
    Difference(
        "`reason`, `message` of `faulted`",
        "what torch says of a process",
        "`JobFailed`, and the job's cause",
        "the cause may be on another node",
        lambda seen: (
            _last_is_a_fault(seen)
            and (seen.field, seen.theirs, seen.ours)
            in (
                ("reason", "WorkerCrash", "JobFailed"),
                ("message", "A training worker process has crashed:\n", FAULT),
            )
        ),
    ),
    Difference(
        "`reason` after `/start`",
        "with `--inprocess-restart` `RunningStarted` until workers are told to start",
        "`Running`",
        "as without that flag",
        lambda seen: (
            seen.flag == IN_PROCESS and (seen.field, seen.theirs, seen.ours) == ("reason", "RunningStarted", "Running")
        ),
    ),
    Difference(
        "`rank_labels`",
        "with `--inprocess-restart` there, if only empty",
        "where there are any",
        "an empty one says nothing",
        lambda seen: seen.flag == IN_PROCESS and (seen.field, seen.theirs, seen.ours) == ("rank_labels", {}, None),
    ),
    Difference(
        "`/stop` of a pod that trains",
        "`stopping` until workers have stopped",
        "`ready` at once, but after a graceful one",
        "what comes next waits for the workers' end",
        lambda seen: (
            seen.at_once
            and seen.step.path == "/stop"
            and seen.before["status"] == "running"
            and (seen.field, seen.theirs, seen.ours)
            in (
                ("status", "stopping", "ready"),
                ("transitions", *(sorted({*seen.before["transitions"], "STOPPING"}),) * 2),
                ("entered", ["STOPPING"], ["READY", "STOPPING"]),
                ("priority", None, "True"),
            )
        ),
    ),
    Difference(
        "`/stop` with `process_level_restart`, `/stop` after a fault, `/start` as a spare of what was none",
        "with `--inprocess-restart` new processes: `init`, then `ready`; `ipversion` and a `/start` are forgotten",
        "no `init`; `ipversion` stays, `/start` counts",
        "as without that flag",
        lambda seen: (
            _anew(seen)
            and (
                (seen.field == "ipversion" and seen.theirs is None)
                or (seen.field == "entered" and {*seen.theirs} ^ {*seen.ours} <= {"INIT", "READY"})
                or (
                    seen.step.path == "/start"
                    and (seen.field, seen.theirs, seen.ours)
                    in (
                        ("status", "ready", "running"),
                        ("reason", None, "Running"),
                        ("status", "ready", "faulted"),
                        ("reason", None, "JobFailed"),
                        ("message", None, FAULT),
                    )
                )
            )
        ),
    ),
    Difference(
        "`priority`",
        "with `--inprocess-restart` `True` from a `/stop` that keeps processes to the next `/start`",
        "`True` from a `/stop` that keeps memory to the next `/start` or `/shutdown`",
        "such a pod goes on sooner than another",
        lambda seen: seen.field == "priority" and _keeps_memory(seen) is (seen.ours == "True"),
    ),
    Difference(
        "`log_monitoring_configuration`",
        "in each pod, of its first rank; a broken rule is `faulted`",
        "of rank 0 alone, whose process is replaced in place",
        "as other faults; most scripts print on rank 0 alone",
    ),
    Difference("`worker_data`, `progress` of `/start`", "handed to workers", "not used", "ranks agree themselves"),
    Difference(
        "`worker_data` of `/status`",
        "with `--inprocess-restart` what each worker has sent",
        "the newest step of each rank, and whether its fault is being mended",
        "ranks agree themselves, and a person may look",
    ),
    Difference("`pod_resourceconfig.json`", "written", "not written", "only AWS's containers read it"),
]


def _newest(seen: Seen) -> Ranks | None:
    """What both have been told last, the call itself included."""
    return seen.ranks or seen.known


def unexplained(found: Sequence[Seen]) -> list[Seen]:
    """What is no case of a difference that may be."""
    return [seen for seen in found if not any(one.holds is not None and one.holds(seen) for one in DIFFERENCES)]


def table() -> str:
    """All of them, for the docs."""
    rows = [f"| {one.call} | {one.theirs} | {one.ours} | {one.why} |\n" for one in DIFFERENCES]
    return "| call, or field of `/status` | `hyperpodrun` 1.1.3 | ours | why |\n|---|---|---|---|\n" + "".join(rows)
