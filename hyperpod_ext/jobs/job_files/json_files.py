"""JSON files of jobs, which are checked because a full disk may have truncated a file, or a user may have edited it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.files import read_regular

if TYPE_CHECKING:
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")

_MOST_NAMED = 10
"""Maximum number of wrong fields that one error names."""
_HINT = "the file was truncated or edited: restore or remove it"


def read_object(file: Path, hint: str = _HINT) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the content is not a JSON object.
    """
    return _load(file, hint)[1]


def read_model(file: Path, model: type[M]) -> M:
    """Return the file's content as `model`.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: a field is missing, unknown or has a wrong value. The error names each wrong field.
    """
    from pydantic import ValidationError

    from hyperpod_ext.config.files.error_messages import problems_of

    text, found = _load(file, _HINT)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(_first(problems_of(error, model, str(file), found)), hint=_HINT) from None


def read_checked(file: Path, model: type[BaseModel], hint: str = _HINT) -> dict[str, Any]:
    """Return the JSON object in a file, after a check that its fields have the types of `model`.

    Unknown fields are accepted, because later versions may have added fields.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: a field is missing or has a wrong value. The error names each wrong field.
    """
    from pydantic import ValidationError

    from hyperpod_ext.config.files.error_messages import NO_FIELD, problems_of

    text, found = _load(file, hint)
    try:
        model.model_validate_json(text, strict=True)
    except ValidationError as error:
        wrong = (one for one in problems_of(error, model, str(file), found) if one.message != NO_FIELD)
        if problems := _first(wrong):
            raise ConfigError(problems, hint=hint) from None
    return found


def _load(file: Path, hint: str) -> tuple[str, dict[str, Any]]:
    text = read_regular(file).decode(errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError([Problem("is not JSON", source=str(file), hint=hint)]) from None
    if not isinstance(found, dict):
        raise ConfigError([Problem("is not a JSON object", source=str(file), hint=hint)])
    return text, found


def _first(problems: Iterator[Problem]) -> list[Problem]:
    found = list(islice(problems, _MOST_NAMED + 1))
    return found if len(found) <= _MOST_NAMED else [*found[:-1], Problem("more fields are wrong")]
