"""What only Slurm has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hyperpod_ext.config.base import Config

SlurmWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,252}$")]
"""A name as Slurm's own options take it, without anything a shell or sbatch would read otherwise."""
SlurmPhrase = Annotated[str, Field(pattern=r"^[A-Za-z0-9(\[][-A-Za-z0-9_.,:=&|*()\[\]]{0,252}$")]
"""A list or an expression of such names: no blanks, no quotes."""
SbatchOption = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$",
        description="a long option of sbatch without its dashes, `mail-type`",
    ),
]
ShellLine = Annotated[str, Field(pattern=r"^[^\n\r\x00]+$", examples=["source /fsx/venv/bin/activate"])]


class Slurm(Config):
    """What only Slurm has. The partition is `scheduling.queue`, the QOS `scheduling.priority`."""

    account: SlurmWord | None = None
    """Account that the job is charged to."""
    reservation: SlurmWord | None = None
    """Reservation that the job runs in."""
    constraint: Annotated[SlurmPhrase, Field(examples=["p5"])] | None = None
    """Features that a node must have, as sbatch takes them."""
    exclude: Annotated[SlurmPhrase, Field(examples=["ip-10-1-2-[3-5]"])] | None = None
    """Nodes that the job does without."""
    gres: Annotated[SlurmPhrase, Field(examples=["gpu:8"])] | None = None
    """Generic resources of each node, `gpu:8`, on clusters that count them. HyperPod requeues a job with these
    from its start after a node's fault, instead of resuming its step."""
    exclusive: bool = True
    """Share the nodes with no other job."""
    container: Literal["pyxis", "enroot"] = "pyxis"
    """What runs `image`: the pyxis plugin of srun, or enroot itself on every node. Without an image the job runs
    on the nodes as they are."""
    auto_resume: bool = True
    """Give the step HyperPod's `--auto-resume=1`: a faulty node is replaced and the step started again. Other
    clusters do not know this option."""
    requeue: bool = True
    """Have the job queued again when a node of it is lost, or others need its nodes (preemption); it goes on from its
    newest durable checkpoint."""
    requeue_at_limit: bool = False
    """Save, and have the job queued again, when its time limit comes near, until its training is done:
    `timeouts.run_s` then limits each start. A start that makes no step is the last."""
    python: Annotated[str, Field(pattern=r"^[^\n\r\x00]+$")] = "python3"
    """Interpreter on the nodes, or in the image: a name or a path."""
    setup: tuple[ShellLine, ...] = ()
    """Lines of shell that every node runs before the job, in the image if there is one."""
    runs: Annotated[str, Field(pattern=r"^[^\n\r\x00:]+$")] = "hpx-runs"
    """Folder for logs, reports and the job's secret, which all nodes must see. Relative to the folder that the job
    is submitted from."""
    sbatch: dict[SbatchOption, Annotated[str, Field(pattern=r"^[^\s'\"\\#]*$")]] = {}
    """Further options of sbatch, `mail-type: END`. An empty value: the option alone."""
