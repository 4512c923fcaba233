"""Rules for advice about faults and recoveries, which `advice.advise` calls. Pure."""

from __future__ import annotations

import math
from collections import Counter

from hyperpod_ext.config.checkpoint import DURABLE
from hyperpod_ext.planner.advice_model import (
    FEW,
    MATTERS,
    Advice,
    JobReport,
    phase_name,
    seconds_of,
    three_digits,
    wall_of,
)
from hyperpod_ext.planner.costs import Speeds
from hyperpod_ext.planner.rates import fit

_SLOW_PHASE = {
    "fault_seen": "if faults were hangs, lower `restart.hang.floor_s` to detect them sooner",
    "survivors_freed": "find out why ranks do not leave their step: `hp-ext logs` shows the killed ranks",
    "new_member": "put the script's imports into `preload`, or use a spare node",
    "groups_back": "process groups are created again one by one: use fewer groups",
    "state_back": "use a nearer tier: `memory` on every step, or a `peer` tier for the loss of nodes",
    "first_new_step": "check the work of the training function before its first step, such as compiling",
}
HANGS = frozenset({"hang", "heartbeat", "stalled"})
"""Kinds of faults that count as hangs."""
_JOB_RESTART_S = 600.0
"""Assumed seconds that a lost node costs in a job that cannot replace the node."""
_CHANCE = 0.01
"""Maximum probability for advice about a bad node: the probability that faults at random nodes would hit one node as
often as they did."""


def lost_steps(report: JobReport) -> Advice | None:
    """Return advice if training steps had to be repeated after faults."""
    lost, seconds = int(report["steps_lost"]), seconds_of(report, "lost_work")
    made = int((report.get("snapshots") or {}).get("count") or 0) / max(1, int(report["world_size"]))
    if not lost or seconds < MATTERS * wall_of(report) or made > 0.9 * int(report["steps"]):
        return None  # no advice: the cost is small, or almost every step already has a snapshot
    text = f"{lost} steps were lost to faults ({seconds:.2f} s of each rank): save every step to the first tier."
    return Advice("lost-steps", text, seconds)


def slowest_phase(report: JobReport) -> Advice | None:
    """Return advice about the phase that took most of the time of recoveries."""
    recoveries = report["recoveries"]
    sums: dict[str, float] = {}
    for recovery in recoveries:
        for phase, seconds in recovery["phases"].items():
            sums[phase] = sums.get(phase, 0.0) + (seconds or 0.0)
    total = sum(sums.values())
    if not total or total < MATTERS * wall_of(report):
        return None
    worst = max(sums, key=lambda phase: sums[phase])
    how = f"{three_digits(total / len(recoveries))} s per recovery, {100 * sums[worst] / total:.0f} % of it in "
    how += f"`{phase_name(worst)}`"
    slowest = max(recoveries, key=lambda recovery: float(recovery["seconds"]))
    if len(recoveries) > 1 and slowest["seconds"] > total / 2:
        fault = slowest["fault"]
        how += f"; {slowest['seconds']:.2f} s in one of them, rank {fault['rank']} in step {fault['step']}"
    return Advice("slowest-phase", f"{how}: {_SLOW_PHASE.get(worst, 'see the timelines')}.", sums[worst])


def hangs(report: JobReport) -> Advice | None:
    """Return advice if the detection of hangs took a noticeable time, and longer than the recovery from these hangs."""
    hung = [each for each in report["recoveries"] if each["fault"].get("kind") in HANGS]
    steps, kept = int(report["steps"]), float(report["seconds"].get("steps") or 0.0)
    waited = [float(each["silent_s"]) for each in hung if each.get("silent_s") is not None]
    step_s = kept / steps if steps else 0.0
    unseen = sum(max(0.0, each - step_s) for each in waited)
    if not waited or unseen < MATTERS * wall_of(report) or unseen <= sum(float(each["seconds"]) for each in hung):
        return None
    mean = unseen / len(waited)
    text = (
        f"{len(waited)} hangs were detected {mean:.1f} s after the step should have ended (steps take {step_s:.2f} s): "
    )
    return Advice(
        "hangs",
        text + "a lower `restart.hang.floor_s` detects hangs sooner, and saves at most the stated time.",
        unseen,
    )


def nearer_tier(report: JobReport) -> Advice | None:
    """Return advice if state was restored from storage, although other nodes could have kept copies in memory."""
    slow = [each for each in report["recoveries"] if each["source"] in DURABLE]
    nodes = int((report.get("capacity") or {}).get("nodes") or 0)
    if not slow or nodes < 2:
        return None
    took = sum(float(each["phases"].get("state_back") or 0.0) for each in slow)
    steps, kept = int(report["steps"]), float(report["seconds"].get("steps") or 0.0)
    lost = sum(int(each["steps_lost"]) for each in slow) * (kept / steps if steps else 0.0)
    traffic = report.get("traffic") or {}
    moved = sum(int(traffic.get(kind, {}).get("bytes_moved", 0)) for kind in DURABLE)
    gain = took - moved / nodes / Speeds().peer + lost
    if gain < MATTERS * wall_of(report):
        return None
    what = f"{len(slow)} recoveries read their state from storage, {took:.2f} s, and lost {lost:.2f} s of steps"
    if any(tier["tier"] == "peer" for tier in report.get("tiers") or []):
        how = "copies on peers were lost, too: survive more failures at once with `replicas: 2`, smaller groups of "
        how += "`parity`, or nodes in other failure domains"
    else:
        how = "a `peer` tier keeps copies in other nodes' memory"
    return Advice("nearer-tier", f"{what}: {how}. The change saves at most the stated time.", gain)


def spare_needed(report: JobReport) -> Advice | None:
    """Return advice if the job waited longer for replacements of lost nodes than a spare would have been idle."""
    capacity, wall = report.get("capacity") or {}, wall_of(report)
    missing, nodes = float(capacity.get("missing_node_s") or 0.0), int(capacity.get("nodes") or 0)
    gain = (missing - wall) / nodes if nodes else 0.0
    if gain <= MATTERS * wall or capacity.get("spares"):
        return None
    text = f"Lost nodes were missing for {missing:.0f} node-seconds of the job's {wall:.0f} s: one node in `spares` "
    return Advice("spare-needed", text + "would have cost less than it saved.", gain)


def spare_idle(report: JobReport) -> Advice | None:
    """Return advice if spares cost more than lost nodes would cost without spares, even at the upper confidence limit
    of the rate of losses."""
    capacity, wall = report.get("capacity") or {}, wall_of(report)
    nodes, spares = int(capacity.get("nodes") or 0), int(capacity.get("spares") or 0)
    lost = len(report.get("nodes_lost") or [])
    if not spares or not nodes or not wall:
        return None
    most = fit(lost, wall).high
    without, share = most * _JOB_RESTART_S, spares / (nodes + spares)
    if without >= share:
        return None
    which = "No node was" if not lost else "1 node was" if lost == 1 else f"{lost} nodes were"
    text = f"{which} lost in {wall / 3600:.1f} h, and {spares} of {nodes + spares} nodes were spares. Even at the "
    text += f"highest plausible rate of losses, restarts of {_JOB_RESTART_S / 60:.0f} minutes would cost "
    return Advice(
        "spare-idle", f"{text}{100 * without:.1f} %; spares cost {100 * share:.1f} %.", wall * (share - without)
    )


def bad_node(report: JobReport) -> Advice | None:
    """Return advice if one node had more faults than faults at random nodes would explain."""
    faults = report.get("faults") or []
    nodes = int((report.get("capacity") or {}).get("nodes") or 0)
    if nodes < 2 or len(faults) < FEW:
        return None
    node, its = Counter(int(each["node"]) for each in faults).most_common(1)[0]
    if its < FEW or nodes * _at_least(its, len(faults), 1 / nodes) > _CHANCE:
        return None
    cost = sum(float(each["seconds"]) for each in report["recoveries"] if int(each["fault"]["node"]) == node)
    text = f"Node {node} had {its} of {len(faults)} faults, more than chance explains for one of {nodes}: check it "
    return Advice("bad-node", text + "(`health`), or remove it.", cost)


def _at_least(count: int, tries: int, chance: float) -> float:
    """Return the probability of `count` or more hits in `tries`, each with probability `chance`."""

    def exactly(k: int) -> float:  # use logarithms, because a float cannot hold a large binomial coefficient
        combinations = math.lgamma(tries + 1) - math.lgamma(k + 1) - math.lgamma(tries - k + 1)
        return math.exp(combinations + k * math.log(chance) + (tries - k) * math.log1p(-chance))

    return math.fsum(map(exactly, range(count, tries + 1)))


RULES = (lost_steps, slowest_phase, hangs, nearer_tier, spare_needed, spare_idle, bad_node)
