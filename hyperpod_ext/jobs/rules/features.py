"""Rules of features that cannot be combined with each other, or with the cluster or target that runs the job."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.jobs.contract.targets import TARGETS, get_target
from hyperpod_ext.jobs.rules import Context, rule


@rule(
    "HPX101",
    "error",
    "elastic together with AWS's own recovery",
    "AWS's documentation says that elastic training does not support checkpointless training or managed tiered "
    "checkpointing. The operator would accept the job, and the job would fail when it scales.",
    "Remove elastic, or use mode `ours` or `plain`. If AWS has changed this: --ignore HPX101.",
    reads=("elastic", "mode"),
)
def elastic_with_aws_recovery(context: Context) -> Iterator[Finding]:
    job = context.job
    if job.elastic is not None and job.mode.startswith("aws-"):
        yield Finding(
            ("elastic",),
            f"AWS does not support elastic training with mode {job.mode}",
            "remove elastic, or use another mode",
        )


@rule(
    "HPX102",
    "error",
    "elastic on a target that cannot resize jobs of this mode",
    "Kubeflow's operator stops all pods and starts another number of them, but this project's agent only starts on "
    "the number in the spec. On Slurm only this project's agents can resize a job, and mode `plain` has no agents.",
    "On Kubeflow, use mode `plain` with a script that handles elastic events itself. On Slurm, use mode `ours`. "
    "HyperPod on EKS supports both. Or remove elastic.",
)
def elastic_with_our_runtime(context: Context) -> Iterator[Finding]:
    if context.job.elastic is None:
        return
    if context.job.restarts_script:
        message = "mode `run` has a fixed number of nodes, because the script divides its batch itself"
        yield Finding(("elastic",), message, "remove elastic, or write mode: ours")
    if context.job.mode == "ours" and context.target == "kubeflow":
        message = "mode `ours` has a fixed number of nodes if Kubeflow's operator starts the pods"
        yield Finding(("elastic",), message, "write mode: plain, or use --target hyperpod-eks, hyperpod-slurm or local")
    if context.job.mode == "plain" and context.target == "hyperpod-slurm":
        yield Finding(("elastic",), "mode `plain` has a fixed number of nodes on Slurm", "write mode: ours")


@rule(
    "HPX103",
    "error",
    "numbers of an elastic job contradict each other",
    "The operator refuses a job whose first number of nodes, or whose sizes, are outside its bounds.",
    "Set min_nodes <= nodes <= max_nodes. Each of elastic.sizes must be between min_nodes and max_nodes, and one of "
    "them must be `nodes`.",
    reads=("nodes", "elastic.min_nodes", "elastic.max_nodes", "elastic.sizes"),
)
def elastic_bounds(context: Context) -> Iterator[Finding]:
    job, elastic = context.job, context.job.elastic
    if elastic is None:
        return
    if elastic.min_nodes > elastic.max_nodes:
        yield Finding(
            ("elastic", "min_nodes"), f"{elastic.min_nodes} is more than max_nodes", "exchange min_nodes and max_nodes"
        )
    elif not elastic.min_nodes <= job.nodes <= elastic.max_nodes:
        hint = f"write a number from {elastic.min_nodes} to {elastic.max_nodes}"
        yield Finding(("nodes",), f"{job.nodes} is not between elastic.min_nodes and elastic.max_nodes", hint)
    for index, size in enumerate(elastic.sizes):
        if not elastic.min_nodes <= size <= elastic.max_nodes:
            yield Finding(("elastic", "sizes", index), f"{size} is outside min_nodes and max_nodes", "remove it")
    if elastic.sizes and list(elastic.sizes) != sorted(set(elastic.sizes)):
        listed = ", ".join(map(str, sorted(set(elastic.sizes))))
        yield Finding(
            ("elastic", "sizes"), "sizes must be sorted, smallest first, without repetitions", f"write [{listed}]"
        )
    elif elastic.sizes and job.nodes not in elastic.sizes:
        hint = f"write {' or '.join(map(str, elastic.sizes))}"
        yield Finding(("nodes",), f"{job.nodes} is not one of elastic.sizes", hint)


@rule(
    "HPX104",
    "error",
    "spares need a queue",
    "The operator reserves spare pods through Kueue. Without a queue, a HyperPodPyTorchJob with spares fails.",
    "Set scheduling.queue to the local queue of the namespace, or remove the spares.",
)
def spares_need_a_queue(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target == "hyperpod-eks" and job.spares_in_all and job.scheduling.queue is None:
        hint = "add scheduling.queue, such as NAMESPACE-localqueue, or remove the spares"
        yield Finding(("spares",), "spares are reserved through a queue of Kueue, but the job has no queue", hint)


@rule(
    "HPX127",
    "error",
    "spares outside the groups of nodes",
    "The operator counts spares per group. If the job has groups, only the spares of the groups are rendered, and "
    "`spares` of the job itself would be ignored.",
    "Write `spares` in the groups that should have spares.",
    targets={"hyperpod-eks"},
)
def spares_are_those_of_groups(context: Context) -> Iterator[Finding]:
    job = context.job
    # HPX147 reports jobs with spares both in the job and in a group
    grouped = job.node_groups and not any(group.spares for group in job.node_groups)
    if job.spares and grouped:
        hint = f"remove this field, and write `spares: {job.spares}` in a group of node_groups"
        yield Finding(("spares",), "has no effect, because each group in node_groups has its own spares", hint)


@rule(
    "HPX106",
    "error",
    "checkpointless training needs two copies of the model",
    "A lost rank gets its state from another copy of the model. With one data-parallel replica there is no other copy.",
    "Use at least twice as many ranks as one copy of the model needs.",
    reads=("mode", "nodes", "workers_per_node", "parallelism"),
)
def checkpointless_needs_replicas(context: Context) -> Iterator[Finding]:
    job = context.job
    copies = job.world_size // job.parallelism.ranks_per_copy
    if job.mode == "aws-checkpointless" and copies < 2:
        least = 2 * job.parallelism.ranks_per_copy
        message = f"mode {job.mode} restores a lost rank from a second copy of the model, which needs {least} ranks, "
        message += f"but the job has {job.world_size}"
        yield Finding(("nodes",), message, f"raise nodes or workers_per_node, to at least {least} ranks in total")


@rule(
    "HPX107",
    "warning",
    "checkpoint settings have no effect in this mode",
    "Only this project's runtime reads `checkpoint`. In other modes the script must save its own checkpoints.",
    "Remove checkpoint, or use mode `ours`.",
)
def checkpoint_is_read(context: Context) -> Iterator[Finding]:
    job = context.job
    if job.mode != "ours" and job.checkpoint != type(job).model_fields["checkpoint"].default:
        yield Finding(
            ("checkpoint",),
            f"has no effect in mode {job.mode}",
            "remove checkpoint, and let the script save its own checkpoints",
        )


@rule(
    "HPX120",
    "error",
    "elastic on spot machines",
    "AWS's documentation says that elastic training does not support Spot. The operator does not scale a job when a "
    "machine is taken away.",
    "Use on-demand machines, or a job that is not elastic. If AWS has changed this: --ignore HPX120.",
    targets={"hyperpod-eks"},
)
def elastic_on_spot(context: Context) -> Iterator[Finding]:
    groups = context.cluster.instance_groups if context.cluster else ()
    spot = [group.name for group in groups if group.capacity == "spot"]
    if context.job.elastic is not None and spot:
        message = f"AWS's elastic training does not support spot machines, but instance group `{spot[0]}` has them"
        yield Finding(("elastic",), message, "use on-demand machines, or remove elastic")


@rule(
    "HPX121",
    "error",
    "managed tiered checkpointing on a cluster without tiered storage",
    "AWS's daemon that stores checkpoints in memory runs only on clusters with tiered storage.",
    "Enable tiered_storage of the cluster (`hp-ext cluster update`), or use mode `ours`, which needs no daemon.",
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
    "checkpointless training on a cluster that does not replace nodes",
    "Checkpointless training continues after a faulty node has been replaced. With node_recovery None the node is "
    "not replaced, and the job waits on paid machines.",
    "Set node_recovery: Automatic of the cluster (`hp-ext cluster update`), or use another mode.",
)
def checkpointless_needs_node_recovery(context: Context) -> Iterator[Finding]:
    job, cluster = context.job, context.cluster
    if job.mode == "aws-checkpointless" and cluster is not None and cluster.node_recovery == "None":
        message = f"cluster {cluster.name} has node_recovery None, so a faulty node is not replaced and the job waits"
        yield Finding(("mode",), message, "set node_recovery: Automatic in the cluster, or use another mode")


@rule(
    "HPX109",
    "error",
    "elastic in a TrainJob",
    "A TrainJob has no fields for elasticity. The number of nodes is fixed when the TrainJob is created.",
    "Write kubernetes.kubeflow_api: pytorchjob, or remove elastic.",
)
def elastic_needs_a_pytorchjob(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target == "kubeflow" and job.elastic is not None and job.kubernetes.kubeflow_api == "trainjob":
        hint = "write kubernetes.kubeflow_api: pytorchjob, or remove elastic"
        yield Finding(("elastic",), "a TrainJob has a fixed number of nodes", hint)


@rule(
    "HPX110",
    "error",
    "groups of nodes on Kubeflow",
    "A PyTorchJob has one master and equal workers; a TrainJob has equal nodes.",
    "Remove node_groups, or use --target hyperpod-eks.",
)
def groups_need_the_operator(context: Context) -> Iterator[Finding]:
    if context.target == "kubeflow" and context.job.node_groups:
        yield Finding(("node_groups",), "all nodes of a Kubeflow job are equal", "remove node_groups")


@rule(
    "HPX108",
    "warning",
    "an elastic job on a cluster with node autoscaling",
    "The autoscaler buys machines for an elastic job until it has max_nodes.",
    "Set a ResourceQuota for the namespace, or choose a max_nodes that you accept to pay for.",
)
def elastic_with_autoscaling(context: Context) -> Iterator[Finding]:
    scaling = context.cluster.auto_scaling if context.cluster else None
    if context.job.elastic is not None and scaling is not None and scaling.enabled:
        yield Finding(
            ("elastic", "max_nodes"),
            f"the cluster's autoscaler buys machines until the job has {context.job.elastic.max_nodes} nodes",
            "set a ResourceQuota for the namespace, or lower max_nodes",
        )


@rule(
    "HPX123",
    "error",
    "the cluster has another orchestrator",
    "A HyperPod cluster has either EKS or Slurm as its orchestrator. The target needs the other one.",
    "Use --target hyperpod-slurm for clusters with Slurm, hyperpod-eks or kubeflow for clusters with EKS.",
)
def orchestrator_is_the_targets(context: Context) -> Iterator[Finding]:
    cluster, needed = context.cluster, context.capabilities.orchestrator if context.capabilities else ""
    if cluster is not None and needed and cluster.orchestrator != needed:
        has = f"cluster {cluster.name} has orchestrator {cluster.orchestrator}"
        message = f"{has}, but target {context.target} needs {needed}"
        right = [one for one in TARGETS if get_target(one).capabilities().orchestrator == cluster.orchestrator]
        yield Finding((), message, f"use --target {' or '.join(right)}")


@rule(
    "HPX124",
    "warning",
    "copies of different steps on different nodes",
    "With when_busy: skip, each node skips steps while it is busy. The newest copies on two nodes can be of different "
    "steps. After the loss of a node, the job restarts from the newest step that all nodes have.",
    "Write when_busy: supersede or wait. All nodes then copy the same steps.",
)
def skipped_copies_meet(context: Context) -> Iterator[Finding]:
    job = context.job
    skips = job.mode == "ours" and job.nodes > 1 and job.checkpoint.when_busy == "skip"
    on_disks = any(tier.on_node for tier in job.checkpoint.durable())
    if skips and (on_disks or job.checkpoint.peer() is not None):
        message = "nodes may skip different steps, so a restart may lose more steps: it uses the newest step that all "
        message += "nodes have"
        yield Finding(("checkpoint", "when_busy"), message, "write supersede or wait")


_ROOTLESS = ("HPCT_USE_CONN_DATA", "HPCT_USE_ROOTLESS", "TORCH_SKIP_TCPSTORE")


@rule(
    "HPX138",
    "warning",
    "a variable of AWS's checkpointless container without effect",
    "In AWS's container, HPCT_USE_CONN_DATA, HPCT_USE_ROOTLESS and TORCH_SKIP_TCPSTORE enable process groups "
    "without a root process and without a TCPStore. Mode `ours` always uses such process groups, so neither 1 nor 0 "
    "has an effect.",
    "Remove the variable.",
    reads=("env", "mode"),
)
def rootless_stays_on(context: Context) -> Iterator[Finding]:
    if context.job.mode != "ours":
        return
    for name in _ROOTLESS:
        if context.job.env.get(name, "1") != "1":
            yield Finding(("env", name), "has no effect in mode `ours`", "remove it")
