"""Numbers of a spec that contradict each other: ranks and batch, budgets, limits and log rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.jobs.rules import Context, rule


@rule(
    "HPX171",
    "error",
    "ranks do not make whole copies of the model",
    "tensor x pipeline x context ranks hold one copy of the model; the world size must be a multiple of that.",
    "Change nodes, workers_per_node or parallelism.",
    reads=("nodes", "workers_per_node", "parallelism"),
)
def copies_are_complete(context: Context) -> Iterator[Finding]:
    job, each = context.job, context.job.parallelism.ranks_per_copy
    if job.world_size % each:
        message = f"{job.world_size} ranks are not a multiple of the {each} that one copy of the model takes"
        yield Finding(("parallelism",), message, f"use {-(-job.world_size // each) * each} ranks, for example")


@rule(
    "HPX172",
    "error",
    "layers are shared across nodes",
    "Tensor parallelism talks in every layer; between nodes that is far slower than within one, so that frameworks "
    "refuse it or crawl.",
    "Have tensor a divisor of workers_per_node. If it is meant so: --ignore HPX172.",
    reads=("workers_per_node", "parallelism.tensor"),
)
def tensor_stays_on_a_node(context: Context) -> Iterator[Finding]:
    job, tensor = context.job, context.job.parallelism.tensor
    if tensor > 1 and job.workers_per_node % tensor:
        message = f"{tensor} ranks share each layer, but a node has {job.workers_per_node}"
        yield Finding(("parallelism", "tensor"), message, "write a divisor of workers_per_node")


@rule(
    "HPX173",
    "error",
    "the batch does not divide on every number of nodes",
    "An elastic job runs on several numbers of nodes, and the global batch must divide among the ranks of each.",
    "Choose a batch that is a multiple of all, or give elastic.sizes that divide it.",
    reads=("global_batch_size", "workers_per_node", "elastic"),
)
def batch_divides_at_every_size(context: Context) -> Iterator[Finding]:
    job, elastic, batch = context.job, context.job.elastic, context.job.global_batch_size
    if elastic is None or batch is None or elastic.max_nodes < elastic.min_nodes:
        return
    if elastic.batch.micro_batch_size is not None:
        return  # any number of ranks shares the micro-batches
    sizes = elastic.sizes or range(elastic.min_nodes, elastic.max_nodes + 1, elastic.step or 1)
    wrong = [size for size in sizes if batch % (size * job.workers_per_node)]
    if wrong:
        listed = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
        right = [size for size in sizes if size not in wrong]
        hint = f"write sizes: {right}" if right else "choose another batch"
        yield Finding(("global_batch_size",), f"{batch} does not divide on {listed} nodes", hint)


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
        message = "the whole job may be restarted 0 times, so that these restarts never lead to one"
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
    "The operator identifies faults by the names of their rules.",
    "Give each rule a name of its own.",
    reads=("log_rules",),
)
def log_rules_have_names(context: Context) -> Iterator[Finding]:
    names = [one.name for one in context.job.log_rules]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Finding(("log_rules", index, "name"), f"a second rule is called `{name}`", "choose another name")


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
