"""What a spec has no field for, in the target's own words: applied last, to the rendered files."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from hyperpod_ext.config.base import Config

Patch = Annotated[dict[str, JsonValue], Field(examples=[{"shareProcessNamespace": True}])]


class KubernetesOverlay(Config):
    """Strategic merge patches, as `kubectl patch` takes them: mappings are merged, null removes a field, lists of
    containers, volumes, variables and ports are merged by their names or numbers, other lists are replaced."""

    container: Patch = {}
    """Patch of the container that trains, a Container: `lifecycle`, `livenessProbe`, `envFrom`."""
    pod: Patch = {}
    """Patch of every pod, a PodSpec: `initContainers`, `hostAliases`, `runtimeClassName`."""
    job: Patch = {}
    """Patch of the job's object: `spec.runPolicy`, and whatever its operator knows."""


class Overlay(Config):
    """What a spec has no field for, a section for each kind of target. It is applied last, checked against what the
    target takes, and refused where it would break what the job relies on."""

    kubernetes: KubernetesOverlay = KubernetesOverlay()
    """For targets hyperpod-eks and kubeflow."""
