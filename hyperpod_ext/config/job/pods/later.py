"""Models that are built when a spec first says something in them: most never do, and building these takes as long as
building all others of a spec together."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from hyperpod_ext.config.base import Config


class PodPart(Config):
    """A part of a pod, built on first use."""

    model_config = ConfigDict(defer_build=True)


class Later:
    """Marks a field whose model is built on first use. Its errors are those of the model, with their places."""

    def __init__(self, model: type[PodPart]) -> None:
        self.model = model

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True)
        return core_schema.no_info_plain_validator_function(self._validate, serialization=dump)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        self.model.model_rebuild()
        return handler(self.model.__pydantic_core_schema__)

    def _validate(self, value: Any) -> PodPart:
        if isinstance(value, self.model):
            return value
        return self.model.model_validate_json(json.dumps(value))


def _dump(value: PodPart, info: core_schema.SerializationInfo) -> dict[str, Any]:
    return value.model_dump(mode=info.mode, exclude_defaults=info.exclude_defaults)
