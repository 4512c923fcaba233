"""World size, parallelism and batch: numbers that must divide each other."""

from __future__ import annotations

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
