"""The job's spec as an annotation of the submitted object. `hp-ext import` and `hp-ext diff` read the annotation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.secret_variables import without_secrets

ANNOTATION = "hyperpod-ext/spec"


def note_of(job: JobConfig) -> dict[str, str]:
    """Return the annotation with the spec of `job`: its key and its text."""
    return {ANNOTATION: note_text(job)}


def note_text(job: JobConfig) -> str:
    """Return the spec as JSON. Fields with default values and variables that look like secrets are left out."""
    return json.dumps(without_defaults(without_secrets(job)))


def without_defaults(config: Config, *, keep_set: bool = False) -> dict[str, Any]:
    """Return the fields of `config` that differ from their defaults.

    The field `kind` is always included, because `kind` determines the model that reads the fields.

    Args:
        keep_set: also include fields that the user set to their default value, unless the value is empty.
    """
    found: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if name == "kind" or info.is_required() or value != info.default:
            found[name] = _plain(value, keep_set)
        elif keep_set and name in config.model_fields_set and (plain := _plain(value, keep_set)) not in ({}, []):
            found[name] = plain
    return found


def _plain(value: object, keep_set: bool) -> Any:
    if isinstance(value, Config):
        return without_defaults(value, keep_set=keep_set)
    if isinstance(value, tuple):
        return [_plain(item, keep_set) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, keep_set) for key, item in value.items()}
    return value


def read_note(metadata: Mapping[str, Any]) -> JobConfig | None:
    """Return the spec in an object's annotation; None if there is no annotation or this version cannot read it."""
    annotations = metadata.get("annotations")
    text = annotations.get(ANNOTATION) if isinstance(annotations, Mapping) else None
    return parse_note(text) if isinstance(text, str) else None


def parse_note(text: str) -> JobConfig | None:
    """Parse a spec; return None if this version cannot read it."""
    try:
        return JobConfig.model_validate_json(text)
    except ValidationError:
        return None  # another version or tool wrote the spec; callers then read the object's own fields
