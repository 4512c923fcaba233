"""Faults that a job inflicts on itself, to rehearse what it would do in a real one."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config

_KILL = re.compile(r"rank=(\d+)@step=(\d+)")


class KillFault(Config):
    """`kill -9` of one worker while it is making one step."""

    kind: Literal["kill"] = "kill"
    rank: Annotated[NonNegativeInt, Field(examples=[0])]
    """Rank whose process is killed."""
    step: Annotated[PositiveInt, Field(examples=[10])]
    """Step (counted from 1) that the rank is making when it dies."""

    @classmethod
    def parse(cls, text: str) -> KillFault:
        """Read the command line's short form, `rank=2@step=13`.

        Raises:
            ValueError: the text has another form.
        """
        match = _KILL.fullmatch(text)
        if match is None or match[2] == "0":
            raise ValueError(f"{text!r} is not of the form rank=R@step=S, with S from 1, as in rank=2@step=13")
        return cls(rank=int(match[1]), step=int(match[2]))


class Chaos(Config):
    """A rehearsal: which faults, and whether to check the result against a run without them."""

    faults: tuple[KillFault, ...] = ()
    """Each happens once, in the first process of that rank to reach the step."""
    compare: bool = True
    """Run the job once more without the faults, and compare every loss and the final weights."""
