"""Section of a job's spec for injected faults, which test the job's recovery."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from hyperpod_ext.config.base import Config, ContradictionError

_KILL = re.compile(r"(rank|node)=(\d+)@step=(\d+)")

InjectedKind = Literal[
    "exception", "sigkill", "sigsegv", "hang", "slow", "oom", "cut-network", "corrupt-memory", "corrupt-weights"
]
INJECTED_KINDS: tuple[str, ...] = get_args(InjectedKind)
InjectedPhase = Literal["data", "forward", "backward", "optimizer", "rest", "checkpoint"]
"""Moments of a step at which a fault is injected: `data` before the forward pass, `forward` when the forward pass
begins, `backward` at the first gradients, `optimizer` before the optimizer's update, `rest` after the optimizer's
update, and `checkpoint` before the step's commit."""
ORDERS = "chaos/orders"
"""Folder for the files that `hp-ext chaos` writes to request faults, relative to the job's run folder."""


class KillFault(Config):
    """`kill -9` of one worker, or of all processes of a node, during a step."""

    kind: Literal["kill"] = "kill"
    rank: Annotated[NonNegativeInt, Field(examples=[0])] | None = None
    """Rank whose process is killed."""
    node: Annotated[NonNegativeInt, Field(examples=[1])] | None = None
    """Node whose agent, memory server and workers are killed, instead of a rank."""
    step: Annotated[PositiveInt, Field(examples=[10])]
    """Number of the step during which the kill happens. Steps are counted from 1."""

    @model_validator(mode="after")
    def _one_victim(self) -> Self:
        if self.rank is not None and self.node is not None:
            raise ContradictionError("rank and node are both set, but a fault kills only one of them; keep one", "node")
        if self.rank is None and self.node is None:
            raise ContradictionError("has no rank and no node to kill; add `rank: 0`, for example")
        return self

    @classmethod
    def parse(cls, text: str) -> KillFault:
        """Parse the short form of the command line, `rank=2@step=13` or `node=1@step=13`.

        Raises:
            ValueError: the text has neither form, or the step is 0.
        """
        match = _KILL.fullmatch(text)
        if match is None or match[3] == "0":
            raise ValueError(
                f"{text!r} is not of the form rank=R@step=S or node=N@step=S, with S from 1, as in rank=2@step=13"
            )
        target, step = int(match[2]), int(match[3])
        return cls(rank=target, step=step) if match[1] == "rank" else cls(node=target, step=step)


class InjectedFault(Config):
    """A fault that a worker injects into itself at one phase of a step."""

    kind: Annotated[InjectedKind, Field(examples=["exception"])]
    """Kind of the fault. `exception`: the training function raises. `sigkill`, `sigsegv`: the signal kills the process.
    `hang`: the process hangs, in the way that `how` names. `slow`: the phases of the rank's steps take longer. `oom`:
    the process allocates more memory than it may use. `cut-network`: the process closes its connections to other ranks.
    `corrupt-memory`: a bit flips in the rank's snapshots in memory. `corrupt-weights`: a bit flips in the rank's first
    parameter."""
    rank: Annotated[NonNegativeInt, Field(examples=[1])]
    """Rank whose worker injects the fault."""
    step: PositiveInt | None = None
    """Number of the step in which the fault happens. Steps are counted from 1. Default: the current step."""
    phase: InjectedPhase | None = None
    """Phase of the step in which the fault happens. Default: the first phase of `step`; without `step`, the next
    phase."""
    how: Literal["stop", "deadlock", "loop", "gil"] = "stop"
    """How the process hangs, for the kind `hang`. `stop`: SIGSTOP stops the process. `deadlock`: a thread waits for a
    lock for ever. `loop`: an endless loop. `gil`: a call never returns and keeps Python's global interpreter lock."""
    seconds: PositiveFloat = 0.2
    """For faults of kind `slow`: seconds that are added to each phase of a slow step."""
    steps: PositiveInt = 1
    """For faults of kind `slow`: number of slow steps."""

    @classmethod
    def parse(cls, text: str) -> InjectedFault:
        """Parse `KIND:rank=R,step=S,phase=P`, the form of HPX_CHAOS.

        Raises:
            ValueError: the text is not a valid fault in this form.
        """
        kind, colon, rest = text.strip().partition(":")
        pairs = [pair.partition("=") for pair in rest.split(",")] if rest else []
        if not colon or any(not equals for _, equals, _ in pairs):
            example = "exception:rank=1,step=5,phase=backward"
            raise ValueError(f"{text!r} is not of the form KIND:rank=R,step=S,phase=P, as in {example}")
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        try:
            return cls.model_validate_strings({"kind": kind, **fields}, strict=False)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{text!r}: {where}: {first['msg']}") from None

    def __str__(self) -> str:
        """Return the fault as text in the form that `parse` reads."""
        given = self.model_dump(exclude_defaults=True, exclude={"kind"})
        return f"{self.kind}:" + ",".join(f"{name}={value}" for name, value in given.items())


def parse_injected(text: str) -> tuple[InjectedFault, ...]:
    """Parse the text of HPX_CHAOS: faults separated by semicolons. An empty text and `off` stand for no faults.

    Raises:
        ValueError: the text contains an invalid fault.
    """
    if text.strip() in ("", "off"):
        return ()
    return tuple(InjectedFault.parse(part) for part in text.split(";") if part.strip())


class NodeFault(Config):
    """A fault of a whole node: its agent, its memory server and its workers."""

    kind: Annotated[Literal["sigkill", "hang", "cut-network"], Field(examples=["sigkill"])]
    """Kind of the fault. `sigkill`: all processes of the node are killed. `hang`: SIGSTOP stops all processes of the
    node. `cut-network`: the node's agent loses its connection to the job's coordinator."""
    node: Annotated[NonNegativeInt, Field(examples=[1])]
    """Number of the node that gets the fault."""


class ChaosOrder(Config):
    """A fault that `hp-ext chaos` requests with a file in the job's run folder."""

    fault: InjectedFault | NodeFault


class Chaos(Config):
    """Faults to inject into a job, to test its recovery."""

    faults: tuple[KillFault, ...] = ()
    """Processes to kill. Each kill happens once, when the first process of the rank or node reaches the step."""
    inject: tuple[InjectedFault, ...] = ()
    """Faults that workers inject into themselves. Each fault happens once in a job."""
    compare: bool = True
    """Whether to run the job a second time without the faults, and to compare every loss and the final weights of the
    two runs. The comparison works only on target local."""
    on_clusters: bool = False
    """Whether faults are also injected on clusters, where machines cost money. False: only target local accepts
    faults."""
