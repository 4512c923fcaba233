"""Annotation for sections of a spec that have Kubernetes' own fields. The models of Kubernetes' fields are built on
first use, because most specs do not contain Kubernetes' fields."""

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
    """Annotation of a mapping whose fields are checked by the type `kind` of `values.all_types`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(partial(checked, self.kind), handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        from hyperpod_ext.config.job.pods.models import outline

        return handler(schema) | outline(self.kind)

    def model(self) -> type[PodPart]:
        """Return the pydantic model that checks the fields of the mapping."""
        from hyperpod_ext.config.job.pods.models import model_of

        return model_of(self.kind)


def checked(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in `value` as they are rendered: in the order of the type `kind`, without empty fields.

    Raises:
        ValidationError: a field is invalid.
        TypeError: a value cannot be written as JSON.
    """
    if not value:  # return early, because building the models takes a quarter of a second
        return {}
    found = PodFields(kind).model().model_validate_json(json.dumps(value))
    return found.model_dump(mode="json", exclude_defaults=True)


def fits(kind: str, value: Mapping[str, Any]) -> bool:
    """Return whether all fields in `value` are valid fields of the type `kind`."""
    try:
        checked(kind, value)
    except (ValidationError, TypeError):
        return False
    return True


def pod_fields(info: FieldInfo) -> PodFields | None:
    """Return the PodFields annotation of a field; None if the field has none."""
    return next((one for one in info.metadata if isinstance(one, PodFields)), None)
