"""Features that do not combine, with one another or with what runs the job."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.jobs.contract.targets import TARGETS, get_target
from hyperpod_ext.jobs.rules import Context, rule


@rule(
    "HPX101",
    "error",
    "elastic does not combine with AWS's own recovery",
    "AWS says of elastic training that it does not currently support checkpointless training or managed tiered "
    "checkpointing; the operator would accept the job, and it would fail when it scales.",
    "Remove elastic, or use mode `ours` or `plain`. If AWS has changed this: --ignore HPX101.",
    reads=("elastic", "mode"),
)
def elastic_with_aws_recovery(context: Context) -> Iterator[Finding]:
    job = context.job
    if job.elastic is not None and job.mode.startswith("aws-"):
        yield Finding(("elastic",), f"AWS does not support elastic training with {job.mode}", "remove one of the two")


@rule(
    "HPX102",
    "error",
    "the engine and the runtime change the number of nodes in different ways",
    "Kubeflow's operator stops the pods and starts another number of them, and our agent, which is inside, refuses to "
    "start on another number than the spec says. On Slurm our agents take nodes and let them go, and mode `plain` has "
    "none.",
    "On Kubeflow: mode `plain` with a script that handles elastic events itself. On Slurm: mode `ours`. HyperPod takes "
    "both on EKS. Or remove elastic.",
)
def elastic_with_our_runtime(context: Context) -> Iterator[Finding]:
    if context.job.elastic is None:
        return
    if context.job.restarts_script:
        message = "mode `run` runs on exactly `nodes`: the script divides its batch itself"
        yield Finding(("elastic",), message, "remove elastic, or write mode: ours")
    if context.job.mode == "ours" and context.target == "kubeflow":
        message = "mode `ours` runs on exactly `nodes` where Kubeflow's operator starts the pods"
        yield Finding(("elastic",), message, "write mode: plain, or use --target hyperpod-eks, hyperpod-slurm or local")
    if context.job.mode == "plain" and context.target == "hyperpod-slurm":
        yield Finding(("elastic",), "mode `plain` runs on exactly `nodes` on Slurm", "write mode: ours")


@rule(
    "HPX103",
    "error",
    "numbers of an elastic job contradict each other",
    "The operator refuses a job whose first number of nodes, or whose sizes, are outside its bounds.",
    "Have min_nodes <= nodes <= max_nodes, and all sizes between the two, `nodes` among them.",
    reads=("nodes", "elastic.min_nodes", "elastic.max_nodes", "elastic.sizes"),
)
def elastic_bounds(context: Context) -> Iterator[Finding]:
    job, elastic = context.job, context.job.elastic
    if elastic is None:
        return
    if elastic.min_nodes > elastic.max_nodes:
        yield Finding(("elastic", "min_nodes"), f"{elastic.min_nodes} is more than max_nodes", "exchange the two")
    elif not elastic.min_nodes <= job.nodes <= elastic.max_nodes:
        hint = f"write a number from {elastic.min_nodes} to {elastic.max_nodes}"
        yield Finding(("nodes",), f"an elastic job cannot begin with {job.nodes} nodes", hint)
    for index, size in enumerate(elastic.sizes):
        if not elastic.min_nodes <= size <= elastic.max_nodes:
            yield Finding(("elastic", "sizes", index), f"{size} is outside min_nodes and max_nodes", "remove it")
    if elastic.sizes and list(elastic.sizes) != sorted(set(elastic.sizes)):
        listed = ", ".join(map(str, sorted(set(elastic.sizes))))
        yield Finding(("elastic", "sizes"), "sizes go from small to large, each once", f"write [{listed}]")
    elif elastic.sizes and job.nodes not in elastic.sizes:
        yield Finding(("nodes",), f"{job.nodes} is not one of elastic.sizes", "begin with one of them")


@rule(
    "HPX104",
    "error",
    "spares need a queue",
    "The operator reserves spare pods through Kueue; without it, a HyperPodPyTorchJob with spares fails.",
    "Set scheduling.queue to the local queue of the namespace, or remove the spares.",
)
def spares_need_a_queue(context: Context) -> Iterator[Finding]:
    job = context.job
    asked = job.spares_in_all
    if context.target == "hyperpod-eks" and asked and job.scheduling.queue is None:
        hint = "add scheduling.queue: NAMESPACE-localqueue, or remove the spares"
        yield Finding(("spares",), f"{asked} spares, but no queue of Kueue that would reserve them", hint)


@rule(
    "HPX127",
    "error",
    "spares that no group has",
    "The operator keeps spares per group. If the nodes are in groups, only spares of groups are rendered, and spares "
    "of the whole job would be lost silently.",
    "Write spares in the groups that are to have them.",
    targets={"hyperpod-eks"},
)
def spares_are_those_of_groups(context: Context) -> Iterator[Finding]:
    job = context.job
    grouped = job.node_groups and not any(group.spares for group in job.node_groups)  # HPX147 reports both
    if job.spares and grouped:
        hint = f"remove it, and write node_groups.0.spares: {job.spares}, for example"
        yield Finding(("spares",), "the nodes are in groups, and none of them has these spares", hint)


@rule(
    "HPX106",
    "error",
    "checkpointless training needs two copies of the model",
    "A lost rank takes its state from another copy. With one data-parallel replica there is none.",
    "Use at least two times as many ranks as one copy of the model takes.",
    reads=("mode", "nodes", "workers_per_node", "parallelism"),
)
def checkpointless_needs_replicas(context: Context) -> Iterator[Finding]:
    job = context.job
    copies = job.world_size // job.parallelism.ranks_per_copy
    if job.mode == "aws-checkpointless" and copies < 2:
        ranks = f"{job.world_size} ranks hold {copies} copy of the model"
        yield Finding(("nodes",), ranks, f"use at least {2 * job.parallelism.ranks_per_copy} ranks")


@rule(
    "HPX107",
    "warning",
    "checkpoint policy that nothing reads",
    "Only the runtime of this project reads `checkpoint`; in other modes the script must write its own checkpoints.",
    "Remove checkpoint, or use mode `ours`.",
)
def checkpoint_is_read(context: Context) -> Iterator[Finding]:
    job = context.job
    if job.mode != "ours" and job.checkpoint != type(job).model_fields["checkpoint"].default:
        yield Finding(("checkpoint",), f"is not read in mode {job.mode}", "the script must save its own checkpoints")


@rule(
    "HPX120",
    "error",
    "elastic on spot machines",
    "AWS says of elastic training that it does not currently support Spot: a machine that goes is no "
    "reason to scale to the operator.",
    "Use on-demand machines, or a job that is not elastic. If AWS has changed this: --ignore HPX120.",
    targets={"hyperpod-eks"},
)
def elastic_on_spot(context: Context) -> Iterator[Finding]:
    groups = context.cluster.instance_groups if context.cluster else ()
    spot = [group.name for group in groups if group.capacity == "spot"]
    if context.job.elastic is not None and spot:
        yield Finding(("elastic",), f"the cluster's group {spot[0]} is of spot machines", "use on-demand machines")


@rule(
    "HPX121",
    "error",
    "managed tiered checkpointing that the cluster does not have",
    "AWS's daemon that keeps checkpoints in memory runs only on clusters with tiered storage enabled.",
    "Enable tiered_storage of the cluster (`hp-ext update-cluster`), or use mode `ours`, which needs no daemon.",
)
def cluster_has_the_managed_tier(context: Context) -> Iterator[Finding]:
    job, cluster = context.job, context.cluster
    if job.mode != "aws-managed-tier" or cluster is None:
        return
    if cluster.tiered_storage is None or not cluster.tiered_storage.enabled:
        yield Finding(("mode",), f"cluster {cluster.name} has no tiered storage", "enable it, or write mode: ours")


@rule(
    "HPX126",
    "error",
    "checkpointless training on a cluster that replaces no nodes",
    "Checkpointless training continues without a checkpoint when a faulty node has been replaced. With node_recovery "
    "None it is not replaced, and the job waits on paid machines.",
    "Set node_recovery: Automatic of the cluster (`hp-ext update-cluster`), or use another mode.",
)
def checkpointless_needs_node_recovery(context: Context) -> Iterator[Finding]:
    job, cluster = context.job, context.cluster
    if job.mode == "aws-checkpointless" and cluster is not None and cluster.node_recovery == "None":
        message = f"cluster {cluster.name} has node_recovery None"
        yield Finding(("mode",), message, "write node_recovery: Automatic in the cluster, or another mode")


@rule(
    "HPX109",
    "error",
    "elastic is not for a TrainJob",
    "TrainJob has no fields for it: the number of nodes is fixed when it is made.",
    "Write kubernetes.kubeflow_api: pytorchjob, or remove elastic.",
)
def elastic_needs_a_pytorchjob(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target == "kubeflow" and job.elastic is not None and job.kubernetes.kubeflow_api == "trainjob":
        yield Finding(("elastic",), "a TrainJob has a fixed number of nodes", "write kubeflow_api: pytorchjob")


@rule(
    "HPX110",
    "error",
    "groups of nodes are not for Kubeflow",
    "A PyTorchJob has one master and workers that are all alike; a TrainJob has nodes that are all alike.",
    "Remove node_groups, or use --target hyperpod-eks.",
)
def groups_need_the_operator(context: Context) -> Iterator[Finding]:
    if context.target == "kubeflow" and context.job.node_groups:
        yield Finding(("node_groups",), "the nodes of a Kubeflow job are all alike", "remove node_groups")


@rule(
    "HPX108",
    "warning",
    "an elastic job loses its pace when Karpenter feeds it",
    "With node autoscaling, an elastic job takes every machine that the autoscaler can buy, up to max_nodes.",
    "Give the namespace a ResourceQuota, or max_nodes that you are ready to pay for.",
)
def elastic_with_autoscaling(context: Context) -> Iterator[Finding]:
    scaling = context.cluster.auto_scaling if context.cluster else None
    if context.job.elastic is not None and scaling is not None and scaling.enabled:
        yield Finding(("elastic", "max_nodes"), "the cluster buys machines until there are this many", "set a quota")


@rule(
    "HPX123",
    "error",
    "the cluster has another orchestrator",
    "A HyperPod cluster is run by EKS or by Slurm, never by both: the job would be sent to a place that is not there.",
    "Use --target hyperpod-slurm on clusters with Slurm, hyperpod-eks or kubeflow on those with EKS.",
)
def orchestrator_is_the_targets(context: Context) -> Iterator[Finding]:
    cluster, needed = context.cluster, context.capabilities.orchestrator if context.capabilities else ""
    if cluster is not None and needed and cluster.orchestrator != needed:
        message = f"cluster {cluster.name} is run by {cluster.orchestrator}; target {context.target} needs {needed}"
        right = [one for one in TARGETS if get_target(one).capabilities().orchestrator == cluster.orchestrator]
        yield Finding((), message, f"use --target {' or '.join(right)}")


@rule(
    "HPX124",
    "warning",
    "copies of nodes that do not meet",
    "With when_busy: skip, each node leaves out the steps for which it is busy. The newest copies of two nodes may "
    "then be of different steps, and after the loss of a node the job goes back to the newest step that all have.",
    "Write when_busy: supersede or wait; the copies of all nodes are then of the same steps.",
)
def skipped_copies_meet(context: Context) -> Iterator[Finding]:
    job = context.job
    skips = job.mode == "ours" and job.nodes > 1 and job.checkpoint.when_busy == "skip"
    on_disks = any(tier.on_node for tier in job.checkpoint.durable())
    if skips and (on_disks or job.checkpoint.peer() is not None):
        yield Finding(("checkpoint", "when_busy"), "each node skips steps of its own", "write supersede")


_ROOTLESS = ("HPCT_USE_CONN_DATA", "HPCT_USE_ROOTLESS", "TORCH_SKIP_TCPSTORE")


@rule(
    "HPX138",
    "warning",
    "a switch of AWS's checkpointless container that cannot be turned off here",
    "HPCT_USE_CONN_DATA, HPCT_USE_ROOTLESS and TORCH_SKIP_TCPSTORE enable process groups without a root process and "
    "without a TCPStore in AWS's container. Mode `ours` has no other kind: 1 is accepted and changes nothing, 0 has no "
    "effect.",
    "Remove the variable.",
    reads=("env", "mode"),
)
def rootless_stays_on(context: Context) -> Iterator[Finding]:
    if context.job.mode != "ours":
        return
    for name in _ROOTLESS:
        if context.job.env.get(name, "1") != "1":
            message = f"{name} has no effect in mode `ours`, whose process groups use no root process and no TCPStore"
            yield Finding(("env", name), message, "remove it")
