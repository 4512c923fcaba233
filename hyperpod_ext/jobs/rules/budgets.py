"""Budgets, limits and log rules that contradict themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.jobs.kubernetes.sizes import NEW_POD_S
from hyperpod_ext.jobs.rules import KUBERNETES, Context, rule


@rule(
    "HPX161",
    "error",
    "a budget that is never reached",
    "After max_process_restarts the job has failed; a full restart that needs more restarts than that never comes.",
    "Have after_restarts smaller than max_process_restarts.",
    reads=("relaunch",),
)
def budgets_are_in_order(context: Context) -> Iterator[Finding]:
    again = context.job.relaunch
    if again.after_restarts and again.max_process_restarts and again.after_restarts > again.max_process_restarts:
        message = f"the job has failed after {again.max_process_restarts} restarts, before these {again.after_restarts}"
        yield Finding(("relaunch", "after_restarts"), message, f"write at most {again.max_process_restarts}")
    if again.after_restarts and again.max_times == 0:
        message = "the whole job is to be started anew, but at most 0 times"
        yield Finding(("relaunch", "after_restarts"), message, "write max_times: 1, or remove it")


@rule(
    "HPX162",
    "error",
    "a log rule that the operator refuses or cannot read",
    "A threshold needs an operator and a number that the pattern's first group finds; a pattern must be a regular "
    "expression.",
    "Write both, and put the number of the pattern in parentheses.",
    reads=("log_rules",),
)
def log_rules_are_complete(context: Context) -> Iterator[Finding]:
    for index, one in enumerate(context.job.log_rules):
        path = ("log_rules", index)
        for name in ("pattern", "stop_pattern"):
            text = getattr(one, name)
            try:
                compiled = re.compile(text or "")
            except re.error as error:
                yield Finding((*path, name), f"is not a regular expression: {error}", "look at its brackets")
                continue
            if name == "pattern" and one.threshold is not None and compiled.groups == 0:
                yield Finding(
                    (*path, name), "has no group that finds the number", "write ([0-9.]+) where the number is"
                )
        if (one.threshold is None) != (one.operator is None):
            missing = "operator" if one.operator is None else "threshold"
            yield Finding(path, "threshold and operator go together", f"add {missing}")


@rule(
    "HPX163",
    "warning",
    "a log rule that never says anything",
    "Without a time, a threshold or fault_on_match a match has no consequence.",
    "Add first_within_s, every_s, threshold or fault_on_match.",
)
def log_rules_do_something(context: Context) -> Iterator[Finding]:
    for index, one in enumerate(context.job.log_rules):
        if not (one.first_within_s or one.every_s or one.threshold is not None or one.fault_on_match):
            yield Finding(("log_rules", index), f"`{one.name}` has no consequence", "add every_s, for example")


@rule(
    "HPX164",
    "error",
    "two log rules of one name",
    "The operator tells faults apart by the names of their rules.",
    "Give each rule a name of its own.",
    reads=("log_rules",),
)
def log_rules_have_names(context: Context) -> Iterator[Finding]:
    names = [one.name for one in context.job.log_rules]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Finding(("log_rules", index, "name"), f"a second rule is called `{name}`", "choose another name")


@rule(
    "HPX165",
    "error",
    "less time to end than the newest step needs",
    "checkpoint.grace_s is the time to bring the newest step to the durable tiers; Kubernetes kills it before.",
    "Raise kubernetes.termination_grace_s, or leave it out: it then follows from checkpoint.grace_s.",
)
def pods_have_time_to_save(context: Context) -> Iterator[Finding]:
    job, given = context.job, context.job.kubernetes.termination_grace_s
    needed = job.checkpoint.grace_s
    if given is not None and job.mode == "ours" and given < needed and context.may_be(*KUBERNETES):
        message = f"{given} s are less than checkpoint.grace_s, {needed:g} s"
        yield Finding(("kubernetes", "termination_grace_s"), message, "leave it out")


@rule(
    "HPX166",
    "error",
    "a limit that includes a shorter one",
    "A start may not take longer than the whole run.",
    "Correct the numbers.",
    reads=("timeouts",),
)
def limits_are_in_order(context: Context) -> Iterator[Finding]:
    limits = context.job.timeouts
    if limits.run_s is not None:
        for name in ("start_s", "fault_s"):
            part = getattr(limits, name)
            if part is not None and part > limits.run_s:
                yield Finding(("timeouts", name), f"{part} s are more than run_s, {limits.run_s} s", "write less")


_POD_IS_THERE_S, _POD_COMES_S = 60.0, 300.0
"""What it takes at least until the operator has a spare in the place of a lost pod, and until a new pod runs."""


@rule(
    "HPX167",
    "warning",
    "a lost pod is waited for too shortly",
    "Under AWS's operator with launcher `ours`, the others wait restart.node_wait_s for the pod in the place of a "
    "lost one, and the job has failed after that. A spare is there once the operator has noticed; a new pod has to be "
    "scheduled and to fetch its image, and a machine may have to be replaced first.",
    "Remove restart.node_wait_s, which is then long enough, or write a larger one.",
)
def a_pod_is_waited_for(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target != "hyperpod-eks" or job.kubernetes.launcher != "ours" or job.nodes == 1:
        return
    written = job.restart.node_wait_s if "node_wait_s" in job.restart.model_fields_set else NEW_POD_S
    if written < (_POD_IS_THERE_S if job.spares_in_all else _POD_COMES_S):
        message = (
            f"{written:g} s are too short for a pod in the place of a lost one, and the job fails when they are over"
        )
        yield Finding(("restart", "node_wait_s"), message, f"write {NEW_POD_S:g}, or remove it")
