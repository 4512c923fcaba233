"""Sections with Kubernetes' own fields. The models of these sections are built on first use, because most specs have no
such section."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

if TYPE_CHECKING:
    from hyperpod_ext.config.job.pods.models import PodPart


class PodFields:
    """Marks a mapping whose fields are checked by a type of `values.all_types`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(partial(checked, self.kind), handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        from hyperpod_ext.config.job.pods.models import outline

        return handler(schema) | outline(self.kind)

    def model(self) -> type[PodPart]:
        """Return the model of its fields."""
        from hyperpod_ext.config.job.pods.models import model_of

        return model_of(self.kind)


def checked(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rendered fields: in the order of their type, without empty fields.

    Raises:
        ValidationError: a field is invalid.
        TypeError: a value cannot be written as JSON.
    """
    if not value:  # building the models takes a quarter of a second
        return {}
    found = PodFields(kind).model().model_validate_json(json.dumps(value))
    return found.model_dump(mode="json", exclude_defaults=True)


def fits(kind: str, value: Mapping[str, Any]) -> bool:
    """Return whether these fields are valid."""
    try:
        checked(kind, value)
    except (ValidationError, TypeError):
        return False
    return True


def pod_fields(info: FieldInfo) -> PodFields | None:
    """Return the PodFields mark of a field, if it has one."""
    return next((one for one in info.metadata if isinstance(one, PodFields)), None)
