"""Parts of several outputs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

_LARGEST = 1 << 63
_LONGEST_S = 1e12

Count = Annotated[int, Field(ge=0, lt=_LARGEST)]
Number = Annotated[int, Field(gt=-_LARGEST, lt=_LARGEST)] | FiniteFloat
Seconds = Annotated[float, Field(ge=-_LONGEST_S, le=_LONGEST_S)]
Share = Annotated[float, Field(ge=0, le=1)]
Request = dict[str, Any]
"""A request to an API of AWS, in its own words."""


class Output(BaseModel):
    """An object that a command prints."""

    model_config = ConfigDict(extra="forbid")


class ProblemOutput(Output):
    """One mistake in the user's input."""

    message: str
    path: str
    """Dotted path of the field, `checkpoint.tiers.1.every_steps`; empty: no single field."""
    source: str
    """File or option that the value comes from."""
    line: int | None
    """Line in `source`, from 1."""
    hint: str
    """How to fix it."""
    rule: str
    """`hp-ext explain RULE` explains it; empty: no rule."""


class ErrorDetails(Output):
    """Why a command or a job failed."""

    code: str
    """Name of the error's class, `ConfigError`."""
    message: str
    hint: str
    """The next thing to do."""
    exit_code: int | None = None
    """Exit code of the command."""
    problems: list[ProblemOutput] | None = None
    """Every mistake, for a ConfigError."""


class ErrorOutput(Output):
    """Printed by every command that fails under `-o json`."""

    error: ErrorDetails


class Defect(Output):
    """A damaged file."""

    file: str
    message: str
