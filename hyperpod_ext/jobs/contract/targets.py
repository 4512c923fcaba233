"""Targets: places that run jobs, such as Slurm. Each target is a module with the functions of `Target`.

The module is imported when the target is used. A target may also have optional parts, such as a module that resizes
jobs. The constant PARTS of a target names the module of each part that the target has. An operation is refused if the
target lacks the part that the operation needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from hyperpod_ext.counts import count
from hyperpod_ext.errors import ConfigError, NotFoundError, Problem, UnsupportedError

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.fault_injection import InjectedFault, NodeFault
    from hyperpod_ext.config.job.job import JobConfig
    from hyperpod_ext.jobs.contract.capabilities import Capabilities
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
    from hyperpod_ext.jobs.contract.plan_type import Plan

TARGETS: dict[str, str] = {
    "local": "hyperpod_ext.jobs.local.target",
    "hyperpod-eks": "hyperpod_ext.jobs.kubernetes.hyperpod_eks",
    "kubeflow": "hyperpod_ext.jobs.kubernetes.kubeflow",
    "hyperpod-slurm": "hyperpod_ext.jobs.slurm.target",
    "sagemaker": "hyperpod_ext.jobs.sagemaker.target",
}
"""Name of the Python module of each target. To add a target, add its module here; no other list needs a change."""


class Target(Protocol):
    """Functions of a target's module. Targets are modules, not classes, because targets have no state."""

    @property
    def PARTS(self) -> Mapping[str, str]:  # noqa: N802, a module's constant
        """Module of each optional part, by the name of its `TargetPart`."""

    @property
    def INSTEAD(self) -> Mapping[str, str]:  # noqa: N802
        """Hint for users who need a part that the target lacks, by the name of its `TargetPart`."""

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the target."""

    def problems(self, job: JobConfig) -> Iterator[Problem]:
        """Yield the reasons why this target cannot run `job`, except missing capabilities, which `unsupported`
        reports."""

    def warnings(self, job: JobConfig) -> Iterator[str]:
        """Yield a warning for each behaviour of the job on this target that may surprise the user."""

    def render(self, job: JobConfig, cluster: ClusterConfig | None) -> dict[str, str]:
        """Return the files that `submit` would send, by name. Pure; the result does not depend on this machine."""

    def submit(self, plan: Plan) -> JobHandle:
        """Send the files of `plan` unchanged to start the job; return its handle."""

    def list_jobs(self) -> list[JobStatus]:
        """Return the status of every job that the target knows, sorted by name."""

    def status(self, handle: JobHandle) -> JobStatus:
        """Return the status of one job."""

    def watch(self, handle: JobHandle, with_lines: bool = False) -> Iterator[StatusUpdate]:
        """Yield updates until the job has ended.

        Args:
            with_lines: also yield the output of the workers.
        """

    def logs(self, handle: JobHandle, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        """Yield the output of the workers, line by line.

        Args:
            rank: yield only the output of this rank; None yields the output of all ranks.
            follow: wait for new lines until the job has ended.
        """

    def cancel(self, handle: JobHandle) -> JobStatus:
        """Stop the job, and return when all its processes have ended."""

    def result(self, handle: JobHandle) -> Mapping[str, Any]:
        """Return the report of an ended job."""


def get_target(name: str) -> Target:
    """Load the module of a target.

    Raises:
        ConfigError: there is no such target.
    """
    from hyperpod_ext.config.files.nearest import suggest

    if name in TARGETS:
        return cast(Target, importlib.import_module(TARGETS[name]))
    raise ConfigError([Problem(f"there is no target `{name}`", hint=suggest(name, TARGETS))])


P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class TargetPart(Generic[P]):
    """An optional part of a target: a module with the functions of the protocol `P`."""

    name: str
    missing: str
    """Error message for a target that lacks the part. `{}` in the message is replaced with `jobs of target NAME`."""
    hint: str = "use another --target"
    """Hint for a target that lacks the part, used if the target's INSTEAD has no hint for the part."""

    def offered(self, target: str) -> bool:
        """Return whether the target has the part."""
        return self.name in get_target(target).PARTS

    def of(self, target: str) -> P:
        """Load the part's module of `target`.

        Raises:
            ConfigError: there is no such target.
            UnsupportedError: the target lacks the part.
        """
        module = get_target(target)
        if self.name in module.PARTS:
            return cast(P, importlib.import_module(module.PARTS[self.name]))
        hint = module.INSTEAD.get(self.name, self.hint)
        raise UnsupportedError([Problem(self.missing.format(f"jobs of target {target}"), hint=hint)])


def running_node(handle: JobHandle, running: Sequence[str], node: int) -> str:
    """Return the pod or host at index `node` of `running`.

    Args:
        running: names of the pods or hosts that run, sorted.

    Raises:
        NotFoundError: `running` has no item with index `node`.
    """
    if node < len(running):
        return running[node]
    hint = f"the last is --node {len(running) - 1}" if running else f"`hp-ext describe {handle}` shows why"
    raise NotFoundError(f"{handle.name} runs on {count(len(running), 'node')}", hint=hint)


class PendingOrder(Protocol):
    """A request that a running job has not carried out yet."""

    @property
    def name(self) -> str:
        """Name of the request."""

    @property
    def note(self) -> str:
        """Sentence that explains the wait to the user; may be empty."""


class Resizer(Protocol):
    """Resizes running jobs."""

    def order(self, handle: JobHandle, nodes: int) -> PendingOrder:
        """Request a resize to `nodes` nodes."""

    def outcome(self, ordered: Any, timeout_s: float | None) -> dict[str, Any]:
        """Wait until the job has carried out the request `ordered`; return the job's event about it.

        Args:
            timeout_s: maximum seconds to wait; None waits without a limit.
        """


class Mover(Protocol):
    """Moves the ranks of a node to a spare."""

    def move(self, handle: JobHandle, node: str) -> PendingOrder:
        """Request a move of the ranks of `node` to a spare."""

    def moved(self, ordered: Any, timeout_s: float | None, *, drain: bool) -> dict[str, Any]:
        """Wait until the ranks have moved and the node's processes have ended; return the job's event about it.

        Args:
            timeout_s: maximum seconds to wait; None waits without a limit.
            drain: also drain the node in the scheduler, so that it gets no new jobs.
        """


class Leftovers(Protocol):
    """Deletes the remaining objects of an ended job."""

    def find(self, handle: JobHandle, with_secret: bool) -> list[tuple[str, str]]:
        """Return kind and name of each remaining object of the job, in the order of deletion.

        Args:
            with_secret: also return the job's Secret.
        """

    def delete(self, handle: JobHandle, found: list[tuple[str, str]]) -> None:
        """Delete the objects in `found`; ignore objects that no longer exist."""


class Details(Protocol):
    """Shows details of a job besides its status."""

    def details(self, handle: JobHandle) -> dict[str, Any]:
        """Return `conditions`, `pods` and `events` of the job."""


class Shell(Protocol):
    """Runs commands on the nodes of a job."""

    def exec_command(self, handle: JobHandle, node: int, words: Sequence[str], terminal: bool) -> list[str]:
        """Return the command line that runs `words` on a node.

        Args:
            node: index in the list of running pods or hosts, sorted by name.
            terminal: whether the command is interactive and needs a terminal.

        Raises:
            NotFoundError: there is no such job, or the job has no node with this index.
        """


class Ports(Protocol):
    """Forwards ports of a job's nodes to this machine."""

    def forward_command(self, handle: JobHandle, node: int, ports: Sequence[str]) -> list[str]:
        """Return the command that forwards ports of a node to this machine. Raises the errors of `Shell.exec_command`.

        Args:
            node: index in the list of running pods, sorted by name.
            ports: ports to forward, each as `PORT` or `HERE:THERE`.
        """


class Faults(Protocol):
    """Requests faults in running jobs."""

    def order(self, handle: JobHandle, fault: InjectedFault | NodeFault) -> str:
        """Request a fault; return the request's name.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: the job does not run.
            ConfigError: the job has no such rank or node.
            UnsupportedError: no process of the job carries out requests for faults.
        """


class Rehearsal(Protocol):
    """Checks a plan on the target's server without creating any object on the server."""

    def rehearse(self, plan: Plan) -> None:
        """Raise an error if the server would refuse the files of the plan."""


RESIZE: TargetPart[Resizer] = TargetPart("resize", "{} cannot be resized")
MOVE: TargetPart[Mover] = TargetPart("move", "ranks in {} cannot move")
LEFTOVERS: TargetPart[Leftovers] = TargetPart("leftovers", "{} leave no objects to delete")
DETAILS: TargetPart[Details] = TargetPart("details", "{} have no details to show")
SHELL: TargetPart[Shell] = TargetPart("shell", "commands cannot be run in {}")
PORTS: TargetPart[Ports] = TargetPart("ports", "{} have no pods")
FAULTS: TargetPart[Faults] = TargetPart(
    "faults",
    "faults cannot be requested in {}",
    "write `chaos.inject` with `on_clusters: true` in the spec, or use --target local",
)
REHEARSAL: TargetPart[Rehearsal] = TargetPart(
    "rehearsal", "no server can check {} without submitting them", "`--dry-run` shows the files that would be submitted"
)
