"""Settings of Slurm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hyperpod_ext.config.base import Config

SlurmWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,252}$")]
"""A name in Slurm's options, without characters that are special in a shell or in sbatch."""
SlurmPhrase = Annotated[str, Field(pattern=r"^[A-Za-z0-9(\[][-A-Za-z0-9_.,:=&|*()\[\]]{0,252}$")]
"""A list or an expression of such names, without blanks and quotes."""
SbatchOption = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$",
        description="a long option of sbatch without its dashes, `mail-type`",
    ),
]
ShellLine = Annotated[str, Field(pattern=r"^[^\n\r\x00]+$", examples=["source /fsx/venv/bin/activate"])]


class Slurm(Config):
    """Settings of Slurm. The partition is `scheduling.queue`, the QOS is `scheduling.priority`."""

    account: SlurmWord | None = None
    """Account of the job."""
    reservation: SlurmWord | None = None
    """Reservation of the job."""
    constraint: Annotated[SlurmPhrase, Field(examples=["p5"])] | None = None
    """Features that a node must have, in sbatch's format."""
    exclude: Annotated[SlurmPhrase, Field(examples=["ip-10-1-2-[3-5]"])] | None = None
    """Nodes to exclude."""
    gres: Annotated[SlurmPhrase, Field(examples=["gpu:8"])] | None = None
    """Generic resources of each node, `gpu:8`, on clusters that have them. With them, HyperPod requeues the whole job
    after a node's fault, instead of resuming its step."""
    exclusive: bool = True
    """Do not share the nodes with other jobs."""
    container: Literal["pyxis", "enroot"] = "pyxis"
    """Container runtime of `image`: the pyxis plugin of srun, or enroot itself on every node. Without an image the job
    runs directly on the nodes."""
    auto_resume: bool = True
    """Use HyperPod's `--auto-resume=1`: a faulty node is replaced, and the step is started again. Other clusters do not
    have this option."""
    requeue: bool = True
    """Requeue the job after the loss of a node, or preemption. The job resumes from its newest durable checkpoint."""
    requeue_at_limit: bool = False
    """Save and requeue the job before its time limit, until training is done. `timeouts.run_s` then limits each start.
    The job is not requeued after a start without a step."""
    python: Annotated[str, Field(pattern=r"^[^\n\r\x00]+$")] = "python3"
    """Interpreter on the nodes, or in the image: a name or a path."""
    setup: tuple[ShellLine, ...] = ()
    """Shell lines that every node runs before the job, in the image if there is one."""
    runs: Annotated[str, Field(pattern=r"^[^\n\r\x00:]+$")] = "hpx-runs"
    """Shared folder for logs, reports and the job's secret, relative to the folder of submission."""
    sbatch: dict[SbatchOption, Annotated[str, Field(pattern=r"^[^\s'\"\\#]*$")]] = {}
    """Additional options of sbatch, `mail-type: END`. An empty value stands for an option without a value."""
