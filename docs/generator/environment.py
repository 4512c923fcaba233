"""The reference of the environment variables that begin with HPX_."""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    """An environment variable of this project."""

    name: str
    meaning: str


USERS = (
    Variable(
        "HPX_HOME",
        "Folder for the runs of local jobs and for the outputs of deployed clusters. Default: the "
        "user's state folder, `$XDG_STATE_HOME/hyperpod_ext` or `~/.local/state/hyperpod_ext`.",
    ),
    Variable(
        "HPX_DATA_DIR", "Folder for token stores on a node, best on local NVMe. Default: the user's cache folder."
    ),
    Variable(
        "HPX_SECRET_FILE",
        "File of mode 600 with the secret that signs checkpoints and that members of a job "
        "prove to each other. Launchers set the variable; under plain torchrun on several nodes, set it yourself. "
        "`hp-ext checkpoints` reads it too.",
    ),
    Variable(
        "HPX_CHAOS",
        "Faults to inject, separated by semicolons, or `off` for no faults. "
        "[Faults](../faults.md#rehearse) has the syntax.",
    ),
    Variable(
        "HPX_PORT_BASE",
        "First port of the ranks under `hyperpodrun` and torchrun: a rank listens on this port "
        "plus its local rank. The value is the same on all nodes, a number from 1024 to 65000.",
    ),
    Variable(
        "HPX_SOCKET_DIR",
        "Private folder for the sockets of a node's processes. Set it if the path of the "
        "temporary folder is too long for a socket.",
    ),
    Variable(
        "HPX_HYPERPODRUN_MODE",
        "Mode of `hyperpodrun`: `in-process` or `process`. Set it if workers cannot read hyperpodrun's command line.",
    ),
    Variable(
        "HPX_TERMINATION_LOG",
        "Path of the container's termination log, if the pod does not use "
        "`/dev/termination-log`. The agent writes its last message there.",
    ),
    Variable(
        "HPX_FAILURE_DOMAIN",
        "Name of the rack or zone of a node. If possible, copies of snapshots go to nodes "
        "with another name. Default: the racks are unknown.",
    ),
    Variable(
        "HPX_PYTHON",
        "Python interpreter that the script of a `local` node starts. Default: `python3`; "
        "`hp-ext create-job` sets its own interpreter.",
    ),
)
"""Variables that a user may set."""

LAUNCHERS = (
    Variable(
        "HPX_RUNTIME",
        "The part of the job spec that a container reads, as JSON. Long values are split into several variables.",
    ),
    Variable(
        "HPX_SPEC", "The whole job spec in a request to SageMaker. `hp-ext import` reads it; the container does not."
    ),
    Variable("HPX_NODE_RANK", "Number of the node, counted from 0."),
    Variable("HPX_NNODES", "Number of nodes with which an elastic job on Slurm starts."),
    Variable("HPX_RDZV_ENDPOINT", "`host:port` of the first node, to which all nodes connect."),
    Variable("HPX_REJOIN", "Set if a node starts while the job already runs. The node then joins the running job."),
    Variable("HPX_RUN_DIR", "Folder for the events, report and logs of one run."),
    Variable("HPX_RUNS_DIR", "Folder on Slurm with all runs of a job name, and with the secret of these runs."),
    Variable(
        "HPX_JOB_DIR", "Folder of one Slurm job below `HPX_RUNS_DIR`. Each start of the job has a run folder in it."
    ),
    Variable("HPX_SOURCE_DIR", "Folder of the script. The workers start in it."),
    Variable(
        "HPX_SCRIPT", "Name of the training script in a SageMaker training job, if the script is in the channel `code`."
    ),
    Variable(
        "HPX_SECRET_ID",
        "Name of the secret in AWS Secrets Manager from which a SageMaker container reads the job's secret.",
    ),
    Variable("HPX_CLUSTER", "File with the cluster spec that the CDK app reads. `hp-ext cluster` sets it."),
)
"""Variables that `hp-ext` and rendered files set. Job specs cannot set them."""

INTERNAL = (
    Variable("HPX_AGENT_SOCKET", "Socket of the node's agent, for the workers."),
    Variable("HPX_MEMORY_SOCKET", "Socket of the node's memory server, for the workers."),
    Variable("HPX_HEARTBEAT", "Shared memory in which a worker writes its phase and step, for the agent."),
    Variable("HPX_PREFORK_LAUNCHER", "Process ID of the launcher, in workers that the fork server has forked."),
    Variable(
        "HPX_NOT_PRELOADED",
        "Reasons why modules are not imported in the fork server, from an earlier start of the fork server.",
    ),
    Variable("HPX_ML_ROOT", "Root of SageMaker's folders in a container, `/opt/ml`. Tests set another folder."),
)
"""Variables between processes of one node. Do not set them."""


def page() -> str:
    """Return the reference page of all variables."""
    parts = [
        "# Environment variables",
        "A job spec sets environment variables of the script with `env`. Names that begin with `HPX_` belong to this "
        "project. A test finds every such name in the code, and compares it with this page.",
        "## Variables for users",
        "A spec's `env` may set `HPX_PORT_BASE`, `HPX_SOCKET_DIR`, `HPX_HYPERPODRUN_MODE` and `HPX_TERMINATION_LOG`. "
        "Set the others in your shell, or in the environment of the agents.",
        _table(USERS),
        "## Variables of launchers",
        "`hp-ext` and rendered files set these variables. If you start agents yourself, set them as the rendered "
        "files do.",
        _table(LAUNCHERS),
        "## Variables between processes",
        "Processes of one node set these variables for each other.",
        _table(INTERNAL),
    ]
    return "\n\n".join(parts) + "\n"


def _table(variables: tuple[Variable, ...]) -> str:
    rows = [f'| <a id="{one.name}"></a>`{one.name}` | {one.meaning} |' for one in variables]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows])
