"""Base class of all spec models. Models are strict and immutable. The docstring under a field documents the field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ContradictionError(ValueError):
    """Raised by a model's validator if fields that are valid alone contradict one another.

    `field` is the name of a field whose removal makes the model valid; None if there is no such field. `load` removes
    the field `field`, so that validation continues and finds further mistakes.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Config(BaseModel):
    """Base class of spec models: refuses unknown fields, and does not coerce values. Instances are immutable.

    The docstring under a field documents the field: `field_docs` copies the docstring to the JSON schema for editors,
    to the output of `hp-ext explain` and to error messages.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
    )
