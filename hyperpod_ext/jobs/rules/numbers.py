"""Rules of numbers of a spec that contradict each other: ranks and batch, restarts, time limits and log rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.jobs.rules import Context, rule


@rule(
    "HPX171",
    "error",
    "ranks do not make whole copies of the model",
    "tensor x pipeline x context ranks hold one copy of the model. The world size must be a multiple of this number.",
    "Change nodes, workers_per_node or parallelism.",
    reads=("nodes", "workers_per_node", "parallelism"),
)
def copies_are_complete(context: Context) -> Iterator[Finding]:
    job, each = context.job, context.job.parallelism.ranks_per_copy
    if job.world_size % each:
        message = f"the job has {job.world_size} ranks, which is not a multiple of the {each} ranks of one copy of the "
        message += "model"
        unit = each // math.gcd(each, job.workers_per_node)
        yield Finding(("parallelism",), message, f"write nodes: {-(-job.nodes // unit) * unit}, for example")


@rule(
    "HPX172",
    "error",
    "layers are shared across nodes",
    "Tensor parallelism communicates in every layer. Communication between nodes is far slower than within a node, "
    "so frameworks refuse this or become very slow.",
    "Set tensor to a divisor of workers_per_node. If you intend this: --ignore HPX172.",
    reads=("workers_per_node", "parallelism.tensor"),
)
def tensor_stays_on_a_node(context: Context) -> Iterator[Finding]:
    job, tensor = context.job, context.job.parallelism.tensor
    if tensor > 1 and job.workers_per_node % tensor:
        message = "ranks that share a layer would be on different nodes, because workers_per_node is "
        message += f"{job.workers_per_node}, not a multiple of {tensor}"
        hint = f"write a divisor of {job.workers_per_node}" if job.workers_per_node > 1 else "write tensor: 1"
        yield Finding(("parallelism", "tensor"), message, f"{hint}, or set workers_per_node to a multiple of {tensor}")


@rule(
    "HPX173",
    "error",
    "the batch does not divide on every number of nodes",
    "An elastic job runs on several numbers of nodes. The global batch must divide evenly among the ranks for each "
    "number.",
    "Choose a batch that each possible number of ranks divides, or limit elastic.sizes to numbers that divide it.",
    reads=("global_batch_size", "nodes", "workers_per_node", "elastic"),
)
def batch_divides_at_every_size(context: Context) -> Iterator[Finding]:
    job, elastic, batch = context.job, context.job.elastic, context.job.global_batch_size
    if elastic is None or batch is None or elastic.max_nodes < elastic.min_nodes:
        return
    if elastic.batch.micro_batch_size is not None:
        return  # any number of ranks can share the micro-batches of a global batch
    sizes = elastic.sizes or range(elastic.min_nodes, elastic.max_nodes + 1, elastic.step or 1)
    wrong = [size for size in sizes if batch % (size * job.workers_per_node)]
    if wrong:
        listed = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
        right = [size for size in sizes if size not in wrong]
        instead = " instead of elastic.step" if elastic.step else ""
        hint = f"write elastic.sizes: {right}{instead}" if job.nodes in right else "choose another batch"
        message = f"{batch} cannot be divided evenly among the ranks of {listed} nodes, which elastic allows"
        yield Finding(("global_batch_size",), message, hint)


@rule(
    "HPX161",
    "error",
    "a number of restarts that is never reached",
    "The job fails after max_process_restarts. A restart of the whole job after a larger number never happens.",
    "Choose after_restarts smaller than max_process_restarts.",
    reads=("relaunch",),
)
def budgets_are_in_order(context: Context) -> Iterator[Finding]:
    again = context.job.relaunch
    if again.after_restarts and again.max_process_restarts and again.after_restarts > again.max_process_restarts:
        message = f"is never reached, because the job fails after {again.max_process_restarts} restarts, the value of "
        message += "max_process_restarts"
        yield Finding(("relaunch", "after_restarts"), message, f"write at most {again.max_process_restarts}")
    if again.after_restarts and again.max_times == 0:
        message = "has no effect, because max_times is 0, which allows no restart of the whole job"
        yield Finding(("relaunch", "after_restarts"), message, "write max_times: 1, or remove after_restarts")


@rule(
    "HPX162",
    "error",
    "a log rule that the operator refuses or cannot read",
    "A pattern must be a regular expression. A threshold needs an operator, and a group in the pattern that matches "
    "a number.",
    "Write both threshold and operator, and put the number of the pattern into parentheses.",
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
                hint = "check its brackets, and write \\ before characters that stand for themselves"
                yield Finding((*path, name), f"is not a regular expression: {error}", hint)
                continue
            if name == "pattern" and one.threshold is not None and compiled.groups == 0:
                message = "has no group that matches the number, which threshold needs"
                yield Finding((*path, name), message, "write `([0-9.]+)` in the place of the number")
        if (one.threshold is None) != (one.operator is None):
            missing = "operator" if one.operator is None else "threshold"
            yield Finding(path, "threshold and operator are only valid together", f"add {missing}")


@rule(
    "HPX163",
    "warning",
    "a log rule without an effect",
    "Without a time limit, a threshold or fault_on_match, a match of the rule has no effect.",
    "Add first_within_s, every_s, threshold or fault_on_match.",
)
def log_rules_do_something(context: Context) -> Iterator[Finding]:
    for index, one in enumerate(context.job.log_rules):
        if not (one.first_within_s or one.every_s or one.threshold is not None or one.fault_on_match):
            message = f"a match of `{one.name}` has no effect"
            yield Finding(("log_rules", index), message, "add first_within_s, every_s, threshold or fault_on_match")


@rule(
    "HPX164",
    "error",
    "two log rules with the same name",
    "The operator identifies faults by the names of their rules.",
    "Give each rule a different name.",
    reads=("log_rules",),
)
def log_rules_have_names(context: Context) -> Iterator[Finding]:
    names = [one.name for one in context.job.log_rules]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Finding(
                ("log_rules", index, "name"), f"another rule already has the name `{name}`", "choose another name"
            )


@rule(
    "HPX166",
    "error",
    "a time limit longer than the limit of the whole run",
    "Start and recovery are parts of the run, so their limits cannot exceed run_s.",
    "Lower the limit, or raise run_s.",
    reads=("timeouts",),
)
def limits_are_in_order(context: Context) -> Iterator[Finding]:
    limits = context.job.timeouts
    if limits.run_s is not None:
        for name in ("start_s", "fault_s"):
            part = getattr(limits, name)
            if part is not None and part > limits.run_s:
                yield Finding(("timeouts", name), f"{part} s are more than the {limits.run_s} s of run_s", "write less")
