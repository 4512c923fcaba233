"""Section of a job's spec with settings of Slurm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hyperpod_ext.config.base import Config

SlurmWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,252}$")]
"""A name in Slurm's options, without characters that are special in a shell or in sbatch."""
SlurmPhrase = Annotated[str, Field(pattern=r"^[A-Za-z0-9(\[][-A-Za-z0-9_.,:=&|*()\[\]]{0,252}$")]
"""A list or an expression of names in Slurm's options, without blanks and quotes."""
SbatchOption = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$",
        description="a long option of sbatch without its dashes, `mail-type`",
    ),
]
ShellLine = Annotated[str, Field(pattern=r"^[^\n\r\x00]+$", examples=["source /fsx/venv/bin/activate"])]


class Slurm(Config):
    """Settings of a job on Slurm. The partition is set by `scheduling.queue`, and the QOS by `scheduling.priority`."""

    account: SlurmWord | None = None
    """Slurm account that is charged for the job."""
    reservation: SlurmWord | None = None
    """Name of the Slurm reservation in which the job runs."""
    constraint: Annotated[SlurmPhrase, Field(examples=["p5"])] | None = None
    """Features that a node must have, in sbatch's format."""
    exclude: Annotated[SlurmPhrase, Field(examples=["ip-10-1-2-[3-5]"])] | None = None
    """Nodes to exclude."""
    gres: Annotated[SlurmPhrase, Field(examples=["gpu:8"])] | None = None
    """Generic resources (GRES) that the job needs on each node, such as `gpu:8`. If a job uses generic resources,
    HyperPod requeues the whole job after the fault of a node, instead of starting its Slurm step again."""
    exclusive: bool = True
    """Whether the job's nodes run no other jobs."""
    container: Literal["pyxis", "enroot"] = "pyxis"
    """How `image` is started. `pyxis`: srun starts the image with the plugin pyxis. `enroot`: the program enroot starts
    the image on every node. A job without `image` runs directly on the nodes."""
    auto_resume: bool = True
    """Whether to use the option `--auto-resume=1` of HyperPod's srun, with which HyperPod replaces a faulty node and
    starts the Slurm step again. Slurm clusters other than HyperPod do not have this option."""
    requeue: bool = True
    """Whether Slurm requeues the job after the loss of a node or a preemption. A requeued job resumes from its newest
    durable checkpoint."""
    requeue_at_limit: bool = False
    """Whether the job saves and is requeued before its time limit, again and again until training is done. With this
    option, `timeouts.run_s` limits each start of the job. A start without a completed training step ends the job."""
    python: Annotated[str, Field(pattern=r"^[^\n\r\x00]+$")] = "python3"
    """Name or path of the Python interpreter on the nodes or, with `image`, in the image."""
    setup: tuple[ShellLine, ...] = ()
    """Shell lines that every node runs before the job; with `image`, inside the container."""
    runs: Annotated[str, Field(pattern=r"^[^\n\r\x00:]+$")] = "hpx-runs"
    """Shared folder for logs, reports and the job's secret, relative to the folder in which the job is submitted."""
    sbatch: dict[SbatchOption, Annotated[str, Field(pattern=r"^[^\s'\"\\#]*$")]] = {}
    """Additional options of sbatch, such as `mail-type: END`. An empty value stands for an option without a value."""
