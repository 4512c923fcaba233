"""Advice from a job's measurements. Each rule is a function that gets a job's report and returns advice, or None.

Most rules return advice only if the problem cost more than the share `MATTERS` of the job's time. A rule estimates the
seconds that the advised change would have saved. If the text of the advice says "at most", the estimate is an upper
bound. The module `advice_faults` has the rules about faults. Pure.
"""

from __future__ import annotations

from hyperpod_ext.config.checkpoint import DURABLE
from hyperpod_ext.planner import advice_faults
from hyperpod_ext.planner.advice_model import FEW, MATTERS, Advice, JobReport, seconds_of, wall_of
from hyperpod_ext.planner.intervals import best_interval, goodput


def advise(report: JobReport) -> list[Advice]:
    """Return all advice for a job, sorted by the time that it would have saved, largest first."""
    rules = (
        data_wait,
        checkpoint_wait,
        startup,
        snapshot_interval,
        failed_copies,
        copies_left_out,
        *advice_faults.RULES,
    )
    found = [advice for rule in rules if (advice := rule(report)) is not None]
    return sorted(found, key=lambda advice: -advice.gain_s)


def data_wait(report: JobReport) -> Advice | None:
    """Return advice if ranks waited for training samples for at least 5 % of the job's time."""
    waited, wall = seconds_of(report, "data"), wall_of(report)
    if not wall or waited < 0.05 * wall:
        return None
    text = f"Each rank waited {_share(waited, wall)} for data: prefetch, or use more loader workers."
    return Advice("data-wait", text, waited)


def checkpoint_wait(report: JobReport) -> Advice | None:
    """Return advice if ranks waited for snapshots for at least 1 % of the job's time."""
    waited, wall = seconds_of(report, "checkpoint"), wall_of(report)
    if not wall or waited < 0.01 * wall:
        return None
    how = "let snapshots overlap with the next step, or take them less often"
    return Advice("checkpoint-wait", f"Each rank waited {_share(waited, wall)} for snapshots: {how}.", waited)


def startup(report: JobReport) -> Advice | None:
    """Return advice if ranks waited for the first step for at least 20 % of the job's time."""
    waited, wall = seconds_of(report, "startup"), wall_of(report)
    if not wall or waited < 0.2 * wall:
        return None
    how = "before the first step: a long job needs no change; in a short job, use `preload`"
    return Advice("startup", f"Each rank waited {_share(waited, wall)} {how}.")


def snapshot_interval(report: JobReport) -> Advice | None:
    """Return advice if snapshots were more or less frequent than is best for the measured cost of a snapshot and the
    measured rate of faults."""
    snapshots, wall = report.get("snapshots") or {}, wall_of(report)
    steps, kept = int(report["steps"]), float(report["seconds"].get("steps") or 0.0)
    fell_back = [each for each in report["recoveries"] if each["source"] in {"memory", "peer", *DURABLE}]
    made = int(snapshots.get("count") or 0) / max(1, int(report["world_size"]))
    if len(fell_back) < FEW or made < 1 or not steps or not wall or not kept:
        return None
    step_s, mtbf_s, cost_s = kept / steps, wall / len(fell_back), float(snapshots["mean_s"])
    every = max(1, round(steps / made))
    best = max(1, round(best_interval(cost_s, mtbf_s) / step_s))
    now, then = (goodput(each * step_s, cost_s, mtbf_s) for each in (every, best))
    gain = wall * (then - now)
    if best == every or gain < MATTERS * wall:
        return None
    which = "too seldom" if every > best else "too often"
    measured = f"a fault every {mtbf_s:.1f} s and {1000 * cost_s:.2f} ms of waiting for each"
    text = f"Snapshots were taken {which}, {_every(every)}: with {measured}, {_every(best)} is best."
    return Advice("snapshot-interval", text, gain)


def failed_copies(report: JobReport) -> Advice | None:
    """Return advice if copies to another tier failed."""
    failed = [tier for tier in report.get("tiers") or [] if tier["failed"]]
    if not failed:
        return None
    worst = max(failed, key=lambda tier: int(tier["failed"]))
    more = f", {sum(int(tier['failed']) for tier in failed)} in all" if len(failed) > 1 else ""
    text = f"{worst['failed']} copies from node {worst['node']} to {worst['tier']} failed{more}: {worst['last_error']}."
    return Advice("failed-copies", text)


def copies_left_out(report: JobReport) -> Advice | None:
    """Return advice if 5 or more copies were skipped because the previous copy was unfinished."""
    left_out = {str(tier["tier"]): int(tier["skipped"]) for tier in report.get("tiers") or [] if tier["skipped"]}
    if not left_out or max(left_out.values()) < 5:
        return None
    tier = max(left_out, key=lambda name: left_out[name])
    text = f"{left_out[tier]} copies to {tier} were skipped, because the previous copies were unfinished. A larger "
    return Advice("copies-left-out", text + "`every_steps` for this tier avoids skipped copies.")


def _share(seconds: float, wall: float) -> str:
    return f"{seconds:.2f} s ({100 * seconds / wall:.0f} %)"


def _every(steps: int) -> str:
    return "after every step" if steps == 1 else f"every {steps} steps"
