"""Injected faults, to test a job's recovery."""

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
"""Phases of a step: before the forward pass, at its beginning, at the first gradients, before the optimizer's update,
after it, and before the step's commit."""
ORDERS = "chaos/orders"
"""Folder in a job's run folder for requested faults."""


class KillFault(Config):
    """`kill -9` of one worker, or of all processes of a node, during a step."""

    kind: Literal["kill"] = "kill"
    rank: Annotated[NonNegativeInt, Field(examples=[0])] | None = None
    """Rank whose process is killed."""
    node: Annotated[NonNegativeInt, Field(examples=[1])] | None = None
    """Node whose agent, memory server and workers are killed, instead of a rank."""
    step: Annotated[PositiveInt, Field(examples=[10])]
    """Step of the kill, counted from 1."""

    @model_validator(mode="after")
    def _one_victim(self) -> Self:
        if (self.rank is None) == (self.node is None):
            raise ContradictionError("a kill needs exactly one of rank and node", None if self.node is None else "node")
        return self

    @classmethod
    def parse(cls, text: str) -> KillFault:
        """Read the command line's short form, `rank=2@step=13` or `node=1@step=13`.

        Raises:
            ValueError: the text has another form.
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
    """`exception`: the training function raises. `sigkill`, `sigsegv`: the process dies. `hang`: it hangs, see `how`.
    `slow`: its phases take longer. `oom`: it allocates more memory than it may have. `cut-network`: its connections to
    other ranks close. `corrupt-memory`: a bit flips in its snapshots in memory. `corrupt-weights`: a bit flips in its
    first parameter."""
    rank: Annotated[NonNegativeInt, Field(examples=[1])]
    """Rank that gets the fault."""
    step: PositiveInt | None = None
    """Step, counted from 1. Default: the current step."""
    phase: InjectedPhase | None = None
    """Phase of the step. Default: its beginning; without a step, the next phase."""
    how: Literal["stop", "deadlock", "loop", "gil"] = "stop"
    """Kind of `hang`: stopped by SIGSTOP, a deadlock, an endless loop, or a call that never returns and keeps Python's
    lock."""
    seconds: PositiveFloat = 0.2
    """For `slow`: additional seconds of each phase."""
    steps: PositiveInt = 1
    """For `slow`: number of slow steps."""

    @classmethod
    def parse(cls, text: str) -> InjectedFault:
        """Parse `KIND:rank=R,step=S,phase=P`, the form of HPX_CHAOS.

        Raises:
            ValueError: the text has another form.
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
        """Return the form that `parse` reads."""
        given = self.model_dump(exclude_defaults=True, exclude={"kind"})
        return f"{self.kind}:" + ",".join(f"{name}={value}" for name, value in given.items())


def parse_injected(text: str) -> tuple[InjectedFault, ...]:
    """Parse the faults of HPX_CHAOS, separated by semicolons; none in an empty text or in `off`.

    Raises:
        ValueError: a fault has another form.
    """
    if text.strip() in ("", "off"):
        return ()
    return tuple(InjectedFault.parse(part) for part in text.split(";") if part.strip())


class NodeFault(Config):
    """A fault of a whole node: its agent, its memory server and its workers."""

    kind: Annotated[Literal["sigkill", "hang", "cut-network"], Field(examples=["sigkill"])]
    """`sigkill`: all its processes die. `hang`: they are stopped by SIGSTOP. `cut-network`: its agent loses its
    connection to the job's coordinator."""
    node: Annotated[NonNegativeInt, Field(examples=[1])]
    """Number of the node."""


class ChaosOrder(Config):
    """A fault that `hp-ext chaos` requests, as a file in a job's run folder."""

    fault: InjectedFault | NodeFault


class Chaos(Config):
    """Faults to inject, and a comparison with a run without them."""

    faults: tuple[KillFault, ...] = ()
    """Kills. Each happens once, when the first process of the rank or node reaches the step."""
    inject: tuple[InjectedFault, ...] = ()
    """Faults that workers inject into themselves. Each happens once in a job."""
    compare: bool = True
    """Run the job again without the faults, and compare every loss and the final weights. Only on target local."""
    on_clusters: bool = False
    """Also inject faults on clusters, where machines cost money. Otherwise only target local accepts faults."""
