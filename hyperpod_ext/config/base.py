"""The base of every model a user writes: strict, frozen, and documented by its own docstrings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Unknown fields are errors, values are never coerced, instances never change.

    The docstring under a field is its documentation: it reaches the JSON schema, and from there
    editors and `--help`.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )
