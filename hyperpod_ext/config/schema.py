"""JSON schema of a spec, which editors use to complete and check it while it is written."""

from __future__ import annotations

from hyperpod_ext.config.base import Config


def json_schema(model: type[Config]) -> dict[str, object]:
    """The schema of `model`; every description comes from the docstring under the field."""
    generated = model.model_json_schema()
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": model.__name__}
    return head | {key: value for key, value in generated.items() if key not in head}
