"""The base of every model a user writes: strict, frozen, and documented by its own docstrings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ContradictionError(ValueError):
    """What validators of whole models raise: fields that are right one by one and not beside each other.

    `field` is one without which the others stand, if there is one: `load` then goes on without it, and finds what else
    is wrong.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Config(BaseModel):
    """Unknown fields are errors, values are never coerced, instances never change.

    The docstring under a field is its documentation: `field_docs` brings it to the JSON schema, and from there to
    editors, to `hp-ext explain` and to errors.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
    )
