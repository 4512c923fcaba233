"""Imports a Kubernetes file that a user edited after hp-ext rendered it. Pure.

The result is the spec in the file, with the edits that a spec can express, and a sentence for each other edit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hyperpod_ext.config.files.document import Document, Path
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.secret_variables import with_secrets
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.contract.spec_annotation import ANNOTATION, read_note
from hyperpod_ext.jobs.kubernetes.imports.compare import additions, differences, groups_of


def recorded_in(found: Mapping[str, Any]) -> JobConfig | None:
    """Return the spec in an object's annotation; None if this version can read no such spec.

    Variables that look like secrets are not in the annotation, and are read from the object's containers.
    """
    job = read_note(found["metadata"])
    spec = found.get("spec")
    if job is None or not isinstance(spec, dict):
        return job
    trainer = spec.get("trainer")
    containers = [trainer] if trainer else [one for _, _, group in groups_of(found) for one in _containers(group)[:1]]
    entries = [one for container in containers if isinstance(container, dict) for one in container.get("env") or []]
    named = [one for one in entries if isinstance(one, dict) and "name" in one]
    return with_secrets(job, {one["name"]: one["value"] for one in named if isinstance(one.get("value"), str)})


def read_changed(
    recorded: JobConfig, found: dict[str, Any], render: Callable[[JobConfig], dict[str, Any]], document: Document
) -> tuple[JobConfig, list[str]]:
    """Return the spec with the edited number of nodes and the edited image, and a sentence for each other edit.

    An edit is reported if the file differs both from the rendering of `recorded` and from the rendering of the returned
    spec.

    Args:
        recorded: spec in the file's annotation.
        found: the object in the file.
        render: renders a spec to an object.
        document: the file, for line numbers.
    """
    job = recorded.model_copy(update=_read(recorded, found))
    theirs = _without_spec(found)
    before, now = (_changes(theirs, _without_spec(render(one)), document) for one in (recorded, job))
    paths = {one.path for one in before}
    first = document.problem(
        ("metadata", "annotations"), "the file was edited after hp-ext wrote it, or another version wrote it"
    )
    return job, list(dict.fromkeys(str(one) for one in (first, *(one for one in now if one.path in paths))))


def _changes(theirs: dict[str, Any], ours: dict[str, Any], document: Document) -> list[Problem]:
    changes = [*differences(theirs, ours, document), *additions(theirs, ours, document)]
    return [*(one for one in changes if ".args" not in one.path), *_commands(theirs, ours, document)]


def _read(recorded: JobConfig, found: Mapping[str, Any]) -> dict[str, Any]:
    spec = found.get("spec") or {}
    groups = [group for _name, _path, group in groups_of(found)]
    trainer = spec.get("trainer") or {}
    changed: dict[str, Any] = {}
    nodes = trainer.get("numNodes") if trainer else sum(int(group.get("replicas", 1)) for group in groups)
    if isinstance(nodes, int) and nodes > 0 and not recorded.node_groups:
        changed["nodes"] = nodes
    containers = [trainer] if trainer else [one for group in groups for one in _containers(group)]
    images = [one.get("image") for one in containers]
    image = images[0] if images and all(one == images[0] for one in images) else None
    if isinstance(image, str) and image and recorded.image is not None:
        changed["image"] = image
    return changed


def _commands(theirs: Mapping[str, Any], ours: Mapping[str, Any], document: Document) -> Iterator[Problem]:
    here = {name: group for name, _path, group in groups_of(ours)}
    for name, path, group in groups_of(theirs):
        counts = [one.get("replicas", 1) for one in (group, here.get(name, group))]
        if counts[0] != counts[1]:
            message = f"is {counts[0]} in this file, {counts[1]} in the rendered spec"
            yield document.problem((*path, "replicas"), message)
        if name not in here:
            yield document.problem(path, f"the spec has no group {name}")
        elif _words(group) != _words(here[name]):
            at: Path = (*path, "template", "spec", "containers", 0, "args")
            yield document.problem(
                at, "differs from the rendered spec: change `script`, `args` and similar fields of the spec"
            )
    there, mine = ((one.get("spec") or {}).get("trainer") or {} for one in (theirs, ours))
    if [there.get("command"), there.get("args")] != [mine.get("command"), mine.get("args")]:
        yield document.problem(("spec", "trainer", "args"), "differs from the rendered spec")


def _words(group: Mapping[str, Any]) -> list[Any]:
    return [[one.get("command"), one.get("args")] for one in _containers(group)[:1]]


def _containers(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(((group.get("template") or {}).get("spec") or {}).get("containers") or [])


def _without_spec(found: Mapping[str, Any]) -> dict[str, Any]:
    kept = copy.deepcopy(dict(found))
    annotations = (kept.get("metadata") or {}).get("annotations") or {}
    annotations.pop(ANNOTATION, None)
    return kept
