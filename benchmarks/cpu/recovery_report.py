"""From moments to figures: phases of a recovery, medians over rounds, ratios of rounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

OURS, TORCHRUN, NVRX, TORCHFT = "hyperpod_ext", "torchrun", "NVRx", "torchft"

Stamp = dict[str, Any]
"""`t` (seconds of the machine's monotonic clock), `event`, and fields of its kind."""

LABELS = {
    OURS: {
        "fault_seen": "agent sees the death",
        "survivors_freed": "survivors leave the broken step",
        "new_member": "new worker, forked with its imports done",
        "groups_back": "process groups open again",
        "state_back": "state back from memory",
        "first_new_step": "DDP built again, first new step done",
        "back_past": "back past the killed step",
    },
    TORCHRUN: {
        "survivor_exception": "first exception in a survivor",
        "python_started": "agent ends all workers, new Pythons start",
        "imported": "imports",
        "group_up": "init_process_group",
        "built": "model, DDP and optimizer built",
        "loaded": "dcp.load of the newest checkpoint",
        "first_new_step": "first new step done",
        "back_past": "back past the killed step",
    },
    NVRX: {
        "survivor_exception": "first survivor out of its step",
        "called": "all called again, one from the reserve",
        "group_up": "init_process_group",
        "built": "DDP built",
        "loaded": "dcp.load of the newest checkpoint",
        "first_new_step": "first new step done",
        "back_past": "back past the killed step",
    },
    TORCHFT: {
        "discarded": "survivors discard the step",
        "first_new_step": "first new step done, without the dead rank",
        "imported": "new Python, imports",
        "built": "model, DDP and manager built",
        "all_ranks": "first step of all ranks done",
    },
}
"""Every phase of each side, in order, as people read it. A phase is named after the moment that ends it."""

RATIOS = {
    "first_new_step": "kill to first new step",
    "all_ranks": "kill to first new step of all ranks",
    "past_killed_step": "kill to back past the killed step",
    "first_new_step_less_a_step": "first new step, one ordinary step off",
    "past_killed_step_less_a_step": "back past the killed step, one ordinary step off",
}


@dataclass(frozen=True)
class Recovery:
    """One recovery, in seconds since the kill."""

    phases: dict[str, float | None]
    first_new_step: float
    all_ranks: float
    """Until the end of the first step that all ranks made; where the others go on alone, later than the first."""
    past_killed_step: float
    ordinary_step: float
    """Median wall time of the steps before the kill, in the same run; the first one left out."""
    steps_lost: int
    """Steps that every rank had made and that were made again. The one the kill interrupted is not among them."""
    losses: dict[int, float]
    held_out_loss: float
    load_average: float = 0.0

    def seconds(self, name: str) -> float:
        """One of RATIOS."""
        whole = float(getattr(self, name.removesuffix("_less_a_step")))
        return whole - self.ordinary_step if name.endswith("less_a_step") else whole

    def since_kill(self, phase: str) -> float | None:
        """When `phase` had ended; None if it was not seen."""
        if self.phases[phase] is None:
            return None
        names = list(self.phases)
        return sum(self.phases[name] or 0.0 for name in names[: names.index(phase) + 1])

    def to_json(self) -> dict[str, Any]:
        """As it is kept among the raw rounds; losses as the last one."""
        raw = {name: _rounded(value) for name, value in asdict(self).items() if name != "losses"}
        return raw | {"final_loss": self.losses[max(self.losses)]}


Round = Mapping[str, Recovery]
"""The recoveries of one round, by side."""


def phases_between(moments: Mapping[str, float | None], start: float) -> dict[str, float | None]:
    """Seconds each phase added; one that ended before an earlier one did cost nothing, one not seen is None."""
    phases: dict[str, float | None] = {}
    reached = start
    for name, moment in moments.items():
        phases[name] = None if moment is None else max(0.0, moment - reached)
        reached = reached if moment is None else max(reached, moment)
    return phases


def torchrun_recovery(
    before: Mapping[int, Sequence[Stamp]], after: Mapping[int, Sequence[Stamp]], kill_t: float, killed_step: int
) -> Recovery:
    """Read the stamps of each rank, of the attempt that was killed and the one that followed it.

    Raises:
        ValueError: a rank did not come back past the killed step, or the ranks loaded different checkpoints.
    """
    moments = {"python_started": "started", "imported": "imported", "group_up": "group_up", "built": "built"}
    return _from_checkpoint(before, after, kill_t, killed_step, moments)


def nvrx_recovery(
    before: Mapping[int, Sequence[Stamp]], after: Mapping[int, Sequence[Stamp]], kill_t: float, killed_step: int
) -> Recovery:
    """As `torchrun_recovery`, of the call that was killed and the one that followed it."""
    moments = {"called": "called", "group_up": "group_up", "built": "built"}
    return _from_checkpoint(before, after, kill_t, killed_step, moments)


def _from_checkpoint(
    before: Mapping[int, Sequence[Stamp]],
    after: Mapping[int, Sequence[Stamp]],
    kill_t: float,
    killed_step: int,
    events: Mapping[str, str],
) -> Recovery:
    resumed = {stamp["step"] for stamps in after.values() for stamp in stamps if stamp["event"] == "loaded"}
    if len(resumed) != 1:
        raise ValueError(f"the ranks went on from different checkpoints, or from none: {sorted(resumed)}")
    first = min(resumed) + 1
    moments: dict[str, float | None] = {
        "survivor_exception": min(_all_of(before, "exception"), default=None),
        **{name: _last_of(after, event) for name, event in {**events, "loaded": "loaded"}.items()},
        "first_new_step": _last_of(after, "step_end", first),
        "back_past": _last_of(after, "step_end", killed_step),
    }
    merged = [stamp for stamps in (*before.values(), *after.values()) for stamp in stamps]
    losses = {s["step"]: s["loss"] for s in sorted(merged, key=lambda s: float(s["t"])) if s["event"] == "step_end"}
    made = [max((s["step"] for s in stamps if s["event"] == "step_end"), default=0) for stamps in before.values()]
    return Recovery(
        phases=phases_between(moments, kill_t),
        first_new_step=_last_of(after, "step_end", first) - kill_t,
        all_ranks=_last_of(after, "step_end", first) - kill_t,
        past_killed_step=_last_of(after, "step_end", killed_step) - kill_t,
        ordinary_step=ordinary_step(_stamped_steps(before), killed_step),
        steps_lost=max(0, min(made) - min(resumed)),
        losses=losses,
        held_out_loss=next(s["held_out_loss"] for s in merged if s["event"] == "done"),
    )


def torchft_recovery(
    stamps: Mapping[int, Sequence[Stamp]], again: Sequence[Stamp], kill_t: float, killed_step: int
) -> Recovery:
    """Read the stamps of each rank, and those of the dead rank's new process.

    Raises:
        ValueError: the survivors did not make the killed step, or no step was made by all ranks together again.
    """
    (dead,) = (rank for rank, its in stamps.items() if its[-1]["event"] != "done")
    survivors = {rank: its for rank, its in stamps.items() if rank != dead}
    ends = [s for s in again if s["event"] == "step_end" and s["ranks"] == len(stamps)]
    if not ends:
        raise ValueError("the dead rank's new process made no step with all the others")
    everybody = {**survivors, dead: again}
    all_ranks = _last_of(everybody, "step_end", ends[0]["step"])
    # one of the survivors may have had the killed step's sum; the others then take its state, and skip the step
    made = [{s["step"] for s in its if s["event"] == "step_end"} for its in survivors.values()]
    first = min((step for step in set.intersection(*made) if step >= killed_step), default=0)
    first_new_step = _last_of(survivors, "step_end", first)
    moments: dict[str, float | None] = {
        "discarded": max(
            (s["t"] for its in survivors.values() for s in its if s["event"] == "discarded"), default=None
        ),
        "first_new_step": first_new_step,
        **{name: _all_of({dead: again}, name)[0] for name in ("imported", "built")},
        "all_ranks": all_ranks,
    }
    merged = [stamp for its in stamps.values() for stamp in its]
    steps = {step: times for step, times in _stamped_steps(stamps).items() if step < killed_step}
    return Recovery(
        phases=phases_between(moments, kill_t),
        first_new_step=first_new_step - kill_t,
        all_ranks=all_ranks - kill_t,
        past_killed_step=first_new_step - kill_t,
        ordinary_step=ordinary_step(steps, killed_step),
        steps_lost=0,
        # later ones are of fewer samples
        losses={s["step"]: s["loss"] for s in merged if s["event"] == "step_end" and s["step"] < killed_step},
        held_out_loss=next(s["held_out_loss"] for s in merged if s["event"] == "done"),
    )


def _all_of(ranks: Mapping[int, Sequence[Stamp]], event: str, step: int | None = None) -> list[float]:
    stamps = [stamp for of_rank in ranks.values() for stamp in of_rank if stamp["event"] == event]
    return [stamp["t"] for stamp in stamps if step is None or stamp["step"] == step]


def _last_of(ranks: Mapping[int, Sequence[Stamp]], event: str, step: int | None = None) -> float:
    """When the last rank came this far."""
    moments = _all_of(ranks, event, step)
    if len(moments) != len(ranks):
        raise ValueError(f"{len(moments)} of {len(ranks)} ranks came to {event}{'' if step is None else f' {step}'}")
    return max(moments)


def _stamped_steps(ranks: Mapping[int, Sequence[Stamp]]) -> dict[int, tuple[float, float]]:
    steps = {s["step"] for stamps in ranks.values() for s in stamps if s["event"] == "step_end"}
    return {step: (min(_all_of(ranks, "step_begin", step)), max(_all_of(ranks, "step_end", step))) for step in steps}


def our_recovery(report: Mapping[str, Any], steps: Mapping[int, tuple[float, float]], killed_step: int) -> Recovery:
    """Read the job's report; `steps`: when each kept step began and ended, over all ranks.

    Raises:
        ValueError: the job did not recover exactly once, or not from the kill.
    """
    if len(report["recoveries"]) != 1:
        raise ValueError(f"{len(report['recoveries'])} recoveries where one was wanted")
    (recovery,) = report["recoveries"]
    if recovery["phases"]["fault_seen"] is None:
        raise ValueError("the report does not say when the worker was killed")
    first, killed = recovery["resumed_step"] + 1, max(killed_step, recovery["resumed_step"] + 1)
    again = steps[killed][1] - steps[first][1]
    return Recovery(
        phases=recovery["phases"] | {"back_past": again},
        first_new_step=recovery["seconds"],
        all_ranks=recovery["seconds"],
        past_killed_step=recovery["seconds"] + again,
        ordinary_step=ordinary_step(steps, min(first, killed_step)),
        steps_lost=recovery["steps_lost"],
        losses={int(step): loss for step, loss in report["losses"].items()},
        held_out_loss=report["metrics"]["held_out_loss"],
    )


def ordinary_step(steps: Mapping[int, tuple[float, float]], until: int) -> float:
    """Median wall time of the steps before `until`, without the first, which pays for what is made once."""
    return median(end - begin for step, (begin, end) in steps.items() if 1 < step < until)


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians of each side, and of the ratios of rounds, each to ours. A side that failed is not in every round."""
    found = {side: [one for one in rounds if side in one] for side in LABELS}
    found = {side: some for side, some in found.items() if some}
    ratios = {
        side: {name: [one[side].seconds(name) / one[OURS].seconds(name) for one in some] for name in RATIOS}
        for side, some in found.items()
        if side != OURS
    }
    return {
        "medians": {side: _medians([one[side] for one in some]) for side, some in found.items()},
        "ratios": {
            side: {name: {"median": _rounded(median(of)), "rounds": _rounded(of)} for name, of in names.items()}
            for side, names in ratios.items()
        },
        "checks": _checks(rounds),
    }


def _medians(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    names = list(recoveries[0].phases)
    return {
        "phases": {name: _rounded(_median(one.phases[name] for one in recoveries)) for name in names},
        "since_kill": {name: _rounded(_median(one.since_kill(name) for one in recoveries)) for name in names},
        **{name: _rounded(median(one.seconds(name) for one in recoveries)) for name in RATIOS},
        "ordinary_step": _rounded(median(one.ordinary_step for one in recoveries)),
        "steps_lost": median(one.steps_lost for one in recoveries),
    }


def _checks(rounds: Sequence[Round]) -> dict[str, bool]:
    """What must hold for the figures to mean anything."""
    ours = [one[OURS] for one in rounds]
    wanted = ours[0].losses
    checks = {
        "hyperpod_ext made every step, with equal losses in all rounds": all(one.losses == wanted for one in ours)
    }
    for side in (TORCHRUN, NVRX):
        if theirs := [one[side] for one in rounds if side in one]:
            # DDP lays its gradient buckets out anew after a restart: sums may differ in their last bits
            checks[f"{side} made every step, with the losses of hyperpod_ext to one in a thousand"] = all(
                one.losses.keys() == wanted.keys() and _close(one.losses, wanted) for one in theirs
            )
    if theirs := [one[TORCHFT] for one in rounds if TORCHFT in one]:
        checks["torchft made every step, until the kill with the losses of hyperpod_ext to one in a thousand"] = all(
            bool(one.losses) and one.losses.keys() <= wanted.keys() and _close(one.losses, wanted) for one in theirs
        )
    return checks


def _close(losses: Mapping[int, float], wanted: Mapping[int, float]) -> bool:
    return all(abs(loss - wanted[step]) <= 1e-3 * abs(wanted[step]) for step, loss in losses.items())


def _median(values: Iterable[float | None]) -> float | None:
    return median(known) if (known := [value for value in values if value is not None]) else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
