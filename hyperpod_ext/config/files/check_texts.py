"""Title, cause and fix of each check of a spec, for `hp-ext explain`."""

from __future__ import annotations

TEXTS: dict[str, tuple[str, str, str]] = {
    "HPX001": (
        "the script is not a Python file",
        "Python starts the script in every worker. To start another program, use `command`.",
        "Name a file that ends in .py, or write `command` and `mode: plain`.",
    ),
    "HPX002": (
        "the script does not exist at the path in the spec",
        "The script must be in the spec's folder or below. There are two exceptions: with working_dir, the script is "
        "in the image; and a job of mode plain may name a path outside the spec's folder, which must exist on all "
        "nodes.",
        "Correct the path, or set working_dir.",
    ),
    "HPX003": (
        "the batch does not divide among the ranks",
        "Every rank gets the same number of samples in each step. With another batch, samples would be left over.",
        "Choose a multiple of nodes x workers_per_node.",
    ),
    "HPX004": (
        "two tiers of the same kind",
        "Two tiers of one kind would hold the same snapshots in the same place.",
        "Keep one of the two tiers.",
    ),
    "HPX005": (
        "more copies than other nodes",
        "Each copy of a snapshot is stored on a different node, and none on the node that made the snapshot.",
        "Reduce the number of copies, or use more nodes.",
    ),
    "HPX006": (
        "a fault for a rank that does not exist",
        "Ranks have the numbers 0 to nodes x workers_per_node - 1.",
        "Name a rank of the job.",
    ),
    "HPX007": (
        "an environment variable that only the launcher may set",
        "Variables that start with HPX_ configure the runtime. A value in the spec would be overwritten, or would "
        "break the runtime. "
        "Users may set only HPX_PORT_BASE, HPX_SOCKET_DIR, HPX_HYPERPODRUN_MODE and HPX_TERMINATION_LOG.",
        "Choose another name, or correct the value.",
    ),
    "HPX008": (
        "two groups with the same name",
        "HyperPod identifies groups of machines by their names.",
        "Give each group a different name.",
    ),
    "HPX009": (
        "more spares than machines",
        "The spares of a group are included in the number of its machines.",
        "Reduce the number of spares, or increase the number of machines.",
    ),
    "HPX011": (
        "a command together with fields that do not apply to a command",
        "A command runs instead of the script. The command's processes use neither this project's runtime nor AWS's.",
        "Remove the script or the command. With a command, write mode: plain and remove args.",
    ),
    "HPX010": (
        "the batch is not a multiple of the micro-batch",
        "elastic.batch divides the global batch into micro-batches of equal size, which any number of ranks can share.",
        "Choose a micro_batch_size that divides the batch of each number of nodes.",
    ),
    "HPX012": (
        "parity that does not fit this job",
        "Each parity group needs as many nodes as the value of `parity`. Parity data is valid only for one number of "
        "ranks.",
        "Choose smaller groups, use more nodes, or use copies (`replicas`).",
    ),
    "HPX013": (
        "unencrypted copies although network.tls is set",
        "network.tls encrypts all traffic between memory servers. NIXL has no encryption.",
        "Remove `transport: nixl`. If the network itself encrypts traffic, remove network.tls instead.",
    ),
    "HPX014": (
        "a job whose healthy ranks cannot continue without a lost rank",
        "Ranks can continue without a lost rank only if this project's agent runs the ranks, the number of nodes is "
        "fixed, and each rank holds the whole state of the model.",
        "Write restart.policy: wait, or remove the fields that exclude `continue`.",
    ),
    "HPX015": (
        "`compat` in a job whose workers are not started by this project",
        "A worker that our agent starts makes the packages of `compat` importable. In modes plain, aws-checkpointless "
        "and aws-managed-tier another program starts the script.",
        "Write `mode: ours` or `mode: run`, or remove compat.",
    ),
}
