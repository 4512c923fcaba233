"""Sections with Kubernetes' own fields. Their models are built on first use: most specs have no such section."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

if TYPE_CHECKING:
    from hyperpod_ext.config.job.pods.models import PodPart


class PodFields:
    """Marks a mapping that is checked as a type of `values.all_types`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        from hyperpod_ext.config.job.pods.models import outline

        return handler(schema) | outline(self.kind)

    def model(self) -> type[PodPart]:
        """The model of its fields."""
        from hyperpod_ext.config.job.pods.models import model_of

        return model_of(self.kind)

    def _checked(self, value: dict[str, Any]) -> dict[str, Any]:
        return checked(self.kind, value) if value else {}


def checked(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as they are rendered: in the order of their type, without those that say nothing.

    Raises:
        ValidationError: each mistake, with its place.
        TypeError: there is a value that JSON has no words for.
    """
    found = PodFields(kind).model().model_validate_json(json.dumps(value))
    return found.model_dump(mode="json", exclude_defaults=True)


def fits(kind: str, value: Mapping[str, Any]) -> bool:
    """Whether `checked` takes these fields."""
    try:
        checked(kind, value)
    except (ValidationError, TypeError):
        return False
    return True


def pod_fields(info: FieldInfo) -> PodFields | None:
    """The mark of a field, if it has one."""
    return next((one for one in info.metadata if isinstance(one, PodFields)), None)
