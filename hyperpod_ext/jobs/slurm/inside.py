"""Commands on a job's nodes, with srun."""

from __future__ import annotations

from collections.abc import Sequence

from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.targets import running_node
from hyperpod_ext.jobs.slurm import client, target


def exec_command(handle: JobHandle, node: int, words: Sequence[str], terminal: bool) -> list[str]:
    """See `targets.Shell`."""
    job = target.submission(handle).id
    running = client.nodes_of(job)[0] if target.status(handle).state == "running" else []
    host = running_node(handle, running, node)
    step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
    return [*step, *(["--pty"] if terminal else []), *words]
