"""Base of all models of specs: strict, frozen, and documented by docstrings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ContradictionError(ValueError):
    """Raised by validators of whole models for valid fields that contradict one another.

    `field` is a field whose removal makes the model valid, if there is one: `load` removes it to find further mistakes.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Config(BaseModel):
    """Refuses unknown fields, and does not coerce values. Instances are immutable.

    The docstring under a field is its documentation: `field_docs` copies it to the JSON schema for editors, to
    `hp-ext explain` and to errors.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
    )
