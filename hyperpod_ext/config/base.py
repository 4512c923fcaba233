"""The base of every model a user writes: strict, frozen, and documented by its own docstrings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
