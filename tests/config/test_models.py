"""Promises that every model of the config keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.field_docs import description
from hyperpod_ext.config.files.schema import json_schema
from hyperpod_ext.config.files.schema_path import models_in
from hyperpod_ext.config.job.job import JobConfig


def fields_of(model: type[BaseModel]) -> Iterator[tuple[str, tuple[type[BaseModel], str, FieldInfo]]]:
    """All fields of `model` and of every model inside it."""
    for name, info in model.model_fields.items():
        yield f"{model.__name__}.{name}", (model, name, info)
        pending = [info.annotation]
        while pending:
            annotation = pending.pop()
            inner = models_in(annotation)
            pending += [] if inner else list(getattr(annotation, "__args__", ()))
            for found in inner:
                yield from fields_of(found)


ALL = {name: found for model in (JobConfig, ClusterConfig) for name, found in fields_of(model)}


def test_the_walk_reaches_the_innermost_models() -> None:
    assert {"S3Tier.uri", "KillFault.step", "InstanceGroup.count"} <= ALL.keys()


@pytest.mark.parametrize("name", sorted(name for name in ALL if not name.endswith(".kind")))
def test_every_field_is_documented(name: str) -> None:
    model, field, _info = ALL[name]
    assert description(model, field)


@pytest.mark.parametrize("name", sorted(name for name, (_, _, info) in ALL.items() if info.is_required()))
def test_every_required_field_has_an_example_that_is_valid(name: str) -> None:
    _model, _field, info = ALL[name]
    assert info.examples
    adapter = TypeAdapter[object](info.rebuild_annotation())
    for example in info.examples:
        adapter.validate_json(json.dumps(example))


def test_the_schema_describes_fields_and_refuses_unknown_ones() -> None:
    schema = json_schema(JobConfig)
    assert list(schema)[:2] == ["$schema", "title"]
    assert schema["title"] == "JobConfig"
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert isinstance(properties, dict)
    assert "relative to the folder of the spec file" in properties["script"]["description"]


def test_the_schema_that_editors_use_is_current(golden: Callable[[Path, str], None], root: Path) -> None:
    golden(root / "examples" / "job.schema.json", json.dumps(json_schema(JobConfig), indent=2) + "\n")


def policy(*tiers: dict[str, object]) -> CheckpointPolicy:
    return CheckpointPolicy.model_validate_json(json.dumps({"tiers": tiers}))


def test_a_tier_that_goes_by_time_reaches_the_container_as_it_was_written() -> None:
    """What is rendered says every field, also every_steps, which this tier does not go by."""
    written = policy({"kind": "memory"}, {"kind": "file", "path": "/x", "every_seconds": 60})
    assert CheckpointPolicy.model_validate_json(written.model_dump_json()) == written


def test_two_clocks_of_one_tier_are_refused() -> None:
    with pytest.raises(ValidationError, match="keep one of them"):
        policy({"kind": "file", "path": "/x", "every_seconds": 60, "every_steps": 10})


def test_a_snapshot_is_due_when_any_tier_wants_one() -> None:
    both = policy({"kind": "memory", "every_steps": 4}, {"kind": "peer", "every_steps": 6})
    assert [step for step in range(1, 14) if both.due(step)] == [4, 6, 8, 12]
    assert [both.next_due(step) for step in (1, 4, 5, 9)] == [4, 4, 6, 12]
    assert [both.next_due(step) for step in (0, 10**15 + 1)] == [0, 10**15 + 2], "no step is tried"


def test_a_tier_that_goes_by_time_takes_what_the_others_leave() -> None:
    timed = {"kind": "file", "path": "/x", "every_seconds": 60}
    assert [step for step in range(1, 7) if policy({"kind": "memory", "every_steps": 3}, timed).due(step)] == [3, 6]
    assert all(policy(timed).due(step) for step in range(1, 7))
