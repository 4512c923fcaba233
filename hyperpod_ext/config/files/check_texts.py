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
        "The script must be in the spec's folder or below. Two exceptions: working_dir says that the image has the "
        "script; or a job of mode plain names a path outside, which all nodes must have.",
        "Correct the path, or set working_dir.",
    ),
    "HPX003": (
        "the batch does not divide among the ranks",
        "Every rank gets the same number of samples in each step. A remainder would be lost, or ranks would differ.",
        "Choose a multiple of nodes x workers_per_node.",
    ),
    "HPX004": (
        "two tiers of the same kind",
        "Two tiers of one kind would hold the same snapshots in the same place.",
        "Keep one of the two tiers.",
    ),
    "HPX005": (
        "more copies than other nodes",
        "Each copy of a snapshot needs a node of its own, other than the node of the snapshot.",
        "Reduce the number of copies, or use more nodes.",
    ),
    "HPX006": (
        "a fault for a rank that does not exist",
        "Ranks have the numbers 0 to nodes x workers_per_node - 1.",
        "Name a rank of the job.",
    ),
    "HPX007": (
        "a variable that only the launcher may set",
        "Variables that start with HPX_ configure the runtime. A value in the spec would be lost, or break the "
        "runtime. "
        "Users may set only these: HPX_PORT_BASE, HPX_SOCKET_DIR, HPX_HYPERPODRUN_MODE and HPX_TERMINATION_LOG.",
        "Choose another name, or correct the value.",
    ),
    "HPX008": (
        "two groups with the same name",
        "HyperPod identifies groups of machines by their names.",
        "Give each group a different name.",
    ),
    "HPX009": (
        "more spares than machines",
        "Spares are part of the machines of their group.",
        "Reduce the number of spares, or increase the number of machines.",
    ),
    "HPX011": (
        "a command together with fields that it excludes",
        "A command runs instead of the script. The command's processes use neither this project's runtime nor AWS's.",
        "Keep either the script or the command. With a command, write mode: plain and remove args.",
    ),
    "HPX010": (
        "the batch is not a multiple of the micro-batch",
        "elastic.batch divides the global batch into micro-batches of equal size, which any number of ranks can share.",
        "Choose a micro_batch_size that divides the batch of each number of nodes.",
    ),
    "HPX012": (
        "parity that does not fit this job",
        "Each group needs as many nodes as `parity` says, and parity data is valid only for one number of ranks.",
        "Choose smaller groups, use more nodes, or use copies (`replicas`).",
    ),
    "HPX013": (
        "unencrypted copies although network.tls is set",
        "network.tls encrypts all traffic between memory servers. NIXL has no encryption.",
        "Remove `transport: nixl`. Or remove network.tls, if the network itself encrypts.",
    ),
    "HPX014": (
        "healthy ranks cannot continue",
        "Ranks can continue without a lost rank only if this project's agent runs them, the number of nodes is "
        "fixed, and each rank holds the whole state.",
        "Write restart.policy: wait, or remove the fields that exclude `continue`.",
    ),
    "HPX015": (
        "replaced packages in a job that has none of this project's workers",
        "The packages of `compat` are put in place by the process that our agent starts. In modes plain, "
        "aws-checkpointless and aws-managed-tier another program starts the script.",
        "Write `mode: ours` or `mode: run`, or remove compat.",
    ),
}
