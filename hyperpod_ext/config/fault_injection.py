"""Faults that a job inflicts on itself, to rehearse what it would do in a real one."""

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
"""Places in a step: before the forward pass, at its beginning, when gradients begin to come, before the optimizer
changes anything, after it has, and when the step is about to be committed."""
ORDERS = "chaos/orders"
"""Folder below a job's run folder where faults are ordered while it runs."""


class KillFault(Config):
    """`kill -9` of one worker, or of everything on one node, while a step is being made."""

    kind: Literal["kill"] = "kill"
    rank: Annotated[NonNegativeInt, Field(examples=[0])] | None = None
    """Rank whose process is killed."""
    node: Annotated[NonNegativeInt, Field(examples=[1])] | None = None
    """Or: node that is lost, its agent, memory and workers."""
    step: Annotated[PositiveInt, Field(examples=[10])]
    """Step (counted from 1) that is being made when it happens."""

    @model_validator(mode="after")
    def _one_victim(self) -> Self:
        if (self.rank is None) == (self.node is None):
            raise ContradictionError("a kill needs either a rank or a node", None if self.node is None else "node")
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
    """A fault that a worker inflicts on itself at one place of one step."""

    kind: Annotated[InjectedKind, Field(examples=["exception"])]
    """`exception`: the training function raises. `sigkill`, `sigsegv`: the process dies. `hang`: it goes on no more,
    see `how`. `slow`: it takes its time. `oom`: it asks for more memory than it may have. `cut-network`: its
    connections to other ranks end. `corrupt-memory`: a bit flips in its snapshots in memory. `corrupt-weights`:
    a bit flips in the first parameter."""
    rank: Annotated[NonNegativeInt, Field(examples=[1])]
    """Rank that it strikes."""
    step: PositiveInt | None = None
    """Step, counted from 1. Default: whichever it is making."""
    phase: InjectedPhase | None = None
    """Place in the step. Default: its beginning, or, without a step, whatever comes next."""
    how: Literal["stop", "deadlock", "loop", "gil"] = "stop"
    """Of a `hang`: stopped by SIGSTOP; waiting for a lock that nobody frees; in an endless loop; in a call that never
    returns and keeps Python's lock."""
    seconds: PositiveFloat = 0.2
    """Of `slow`: what each phase takes longer."""
    steps: PositiveInt = 1
    """Of `slow`: for how many steps."""

    @classmethod
    def parse(cls, text: str) -> InjectedFault:
        """Read `KIND:rank=R,step=S,phase=P`, as HPX_CHAOS has it.

        Raises:
            ValueError: the text has another form; says what is wrong with it.
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
        """The form that `parse` reads."""
        given = self.model_dump(exclude_defaults=True, exclude={"kind"})
        return f"{self.kind}:" + ",".join(f"{name}={value}" for name, value in given.items())


def parse_injected(text: str) -> tuple[InjectedFault, ...]:
    """Faults of HPX_CHAOS, separated by semicolons; none in an empty text or in `off`.

    Raises:
        ValueError: one of them has another form.
    """
    if text.strip() in ("", "off"):
        return ()
    return tuple(InjectedFault.parse(part) for part in text.split(";") if part.strip())


class NodeFault(Config):
    """A fault of a whole node: its agent, its memory server and its workers."""

    kind: Annotated[Literal["sigkill", "hang", "cut-network"], Field(examples=["sigkill"])]
    """`sigkill`: all its processes die. `hang`: they are stopped by SIGSTOP. `cut-network`: its agent loses its line
    to the job's coordinator."""
    node: Annotated[NonNegativeInt, Field(examples=[1])]
    """Number of the node."""


class ChaosOrder(Config):
    """What `hp-ext chaos` leaves in the run folder of a job."""

    fault: InjectedFault | NodeFault


class Chaos(Config):
    """A rehearsal: which faults, and whether to check the result against a run without them."""

    faults: tuple[KillFault, ...] = ()
    """Each happens once, when the first process of that rank, or on that node, reaches the step."""
    inject: tuple[InjectedFault, ...] = ()
    """Faults that workers inflict on themselves. Each strikes once in a job."""
    compare: bool = True
    """Run the job once more without the faults, and compare every loss and the final weights. On target local."""
    on_clusters: bool = False
    """Inflict them on clusters, too, where machines cost money. Other targets than local refuse faults without."""
