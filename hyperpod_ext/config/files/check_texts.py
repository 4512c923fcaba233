"""Title, cause and fix of each check of a spec, for `hp-ext explain`."""

from __future__ import annotations

TEXTS: dict[str, tuple[str, str, str]] = {
    "HPX001": (
        "the script is not a Python file",
        "Workers are started by Python; another program is started by `command`.",
        "Name a file that ends in .py, or write `command` and `mode: plain`.",
    ),
    "HPX002": (
        "the script is not where the spec says",
        "It is looked for in the folder of the spec or below, unless working_dir says that the image holds it, or "
        "a job of mode plain names it by a path outside: all nodes must then have it.",
        "Correct the path, or set working_dir.",
    ),
    "HPX003": (
        "the batch does not divide among the ranks",
        "Every rank takes the same number of samples of each step; a remainder would be lost, or make ranks differ.",
        "Choose a multiple of nodes x workers_per_node.",
    ),
    "HPX004": (
        "a tier of each kind comes once",
        "Two tiers of one kind would hold the same snapshots in the same place.",
        "Keep one of the two.",
    ),
    "HPX005": (
        "more copies than other nodes",
        "Each copy of a snapshot lies on a node besides its own and besides those of the other copies.",
        "Ask for fewer copies, or use more nodes.",
    ),
    "HPX006": (
        "a fault for a rank that is not there",
        "Ranks are counted from 0 to nodes x workers_per_node - 1.",
        "Name a rank of the job.",
    ),
    "HPX007": (
        "a variable that is the launcher's",
        "Variables that start with HPX_ carry what the runtime is told; a value of the spec would be lost or break it. "
        "Only some are for users to set: HPX_PORT_BASE, HPX_SOCKET_DIR, HPX_HYPERPODRUN_MODE and HPX_TERMINATION_LOG.",
        "Choose another name, or correct the value.",
    ),
    "HPX008": (
        "two groups of one name",
        "Groups of machines are told apart by their names.",
        "Give each group a name of its own.",
    ),
    "HPX009": (
        "more spares than machines",
        "Spares are among the machines of their group.",
        "Ask for fewer spares, or for more machines.",
    ),
    "HPX011": (
        "a command beside what does not go with it",
        "A command runs instead of the script, and its processes have nothing of this project's runtime or of AWS's.",
        "Keep script or command; with a command, write mode: plain and no args.",
    ),
    "HPX010": (
        "the batch is not made of whole micro-batches",
        "elastic.batch cuts the global batch into micro-batches of one size, which any number of ranks share.",
        "Choose a micro_batch_size that divides the batch of each number of nodes.",
    ),
    "HPX012": (
        "parity that this job cannot keep",
        "Each group of nodes needs as many as `parity` says, and what they keep fits one number of ranks only.",
        "Write smaller groups, use more nodes, or keep copies (`replicas`).",
    ),
    "HPX013": (
        "copies that could be read on their way, where nothing is to be",
        "With network.tls all that goes between memory servers is encrypted. NIXL has no encryption.",
        "Remove `transport: nixl`, or network.tls where the network itself encrypts.",
    ),
    "HPX014": (
        "healthy ranks cannot continue",
        "Without a lost rank the others go on only where our agent runs them, the number of nodes is fixed, and each "
        "of them holds the whole state.",
        "Write restart.policy: wait, or remove what does not go with `continue`.",
    ),
    "HPX015": (
        "replaced packages in a job that has none of this project's workers",
        "The packages of `compat` are put in place by the process that our agent starts. In modes plain, "
        "aws-checkpointless and aws-managed-tier another program starts the script.",
        "Write `mode: ours` or `mode: run`, or remove compat.",
    ),
}
