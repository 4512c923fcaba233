"""Variables whose values lie elsewhere: in config maps, in secrets, in the pod itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from hyperpod_ext.config.base import ContradictionError
from hyperpod_ext.config.job.pods.later import PodPart
from hyperpod_ext.config.job.pods.words import Amount, exactly_one
from hyperpod_ext.config.names import EnvName, ObjectName

_FIELDS = {"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName"}
_FIELDS |= {"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"}
_OF_FILES = {"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels", "metadata.annotations"}
_OF_METADATA = ("metadata.labels['", "metadata.annotations['")
_RESOURCES = {"cpu", "memory", "ephemeral-storage"}


class KeyRef(PodPart):
    """A key of a ConfigMap or Secret."""

    name: Annotated[ObjectName, Field(examples=["settings"])]
    """Name of the object, in the job's namespace."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]{1,253}$", examples=["rate"])]
    """Key in it."""
    optional: bool | None = None
    """Whether pods start without it, too."""


class ObjectRef(PodPart):
    """A ConfigMap or Secret."""

    name: Annotated[ObjectName, Field(examples=["settings"])]
    """Name of the object, in the job's namespace."""
    optional: bool | None = None
    """Whether pods start without it, too."""


class FieldRef(PodPart):
    """A field of the pod itself."""

    fieldPath: Annotated[str, Field(min_length=1, examples=["metadata.name"])]
    """Which: `metadata.name`, `spec.nodeName`, `status.podIP`, `metadata.labels['team']`."""
    apiVersion: str | None = None
    """Version of the pod's schema. Default: v1."""


class ResourceRef(PodPart):
    """How much of a resource a container has."""

    resource: Annotated[str, Field(pattern=r"^(limits|requests)\.[-./a-zA-Z0-9]+$", examples=["limits.memory"])]
    """Which: `limits.cpu`, `requests.memory`."""
    containerName: str | None = None
    """Of which container. Default: this one."""
    divisor: Amount | None = None
    """What the amount is counted in. Default: 1."""

    @model_validator(mode="after")
    def _known(self) -> ResourceRef:
        name = self.resource.partition(".")[2]
        if name not in _RESOURCES and not name.startswith("hugepages-"):
            raise ContradictionError(f"`{self.resource}` is not told to containers; cpu, memory, ephemeral-storage are")
        return self


class ValueSource(PodPart):
    """Where a variable's value is: one of these."""

    configMapKeyRef: KeyRef | None = None
    """A key of a ConfigMap."""
    secretKeyRef: KeyRef | None = None
    """A key of a Secret."""
    fieldRef: FieldRef | None = None
    """A field of the pod."""
    resourceFieldRef: ResourceRef | None = None
    """How much of a resource the container has."""

    @model_validator(mode="after")
    def _one(self) -> ValueSource:
        exactly_one(self, "valueFrom")
        if self.fieldRef and self.fieldRef.fieldPath not in _FIELDS and not _of_metadata(self.fieldRef.fieldPath):
            known = ", ".join(sorted(_FIELDS))
            raise ContradictionError(f"`{self.fieldRef.fieldPath}` is no field that a variable can have; {known} are")
        return self


class ReferredVariable(PodPart):
    """A variable whose value lies elsewhere."""

    name: Annotated[EnvName, Field(examples=["NODE_NAME"])]
    """The variable."""
    valueFrom: Annotated[ValueSource, Field(examples=[{"fieldRef": {"fieldPath": "spec.nodeName"}}])]
    """Where its value is."""


class Variable(PodPart):
    """A variable of a container beside the one that trains."""

    name: Annotated[EnvName, Field(examples=["LEVEL"])]
    """The variable."""
    value: str | None = None
    """Its value, in which Kubernetes replaces `$(NAME)`."""
    valueFrom: ValueSource | None = None
    """Where its value is instead."""

    @model_validator(mode="after")
    def _one(self) -> Variable:
        if self.value is not None and self.valueFrom is not None:
            raise ContradictionError("a variable has value or valueFrom; keep one of the two", "value")
        return self


class VariableSource(PodPart):
    """A ConfigMap or Secret whose keys all become variables; `env` counts before them."""

    prefix: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")] | None = None
    """What is put before each key."""
    configMapRef: ObjectRef | None = None
    """The ConfigMap."""
    secretRef: ObjectRef | None = None
    """The Secret."""

    @model_validator(mode="after")
    def _one(self) -> VariableSource:
        exactly_one(self, "envFrom", "configMapRef", "secretRef")
        return self


def in_files(field_path: str) -> bool:
    """Whether a volume of the downward API has this field."""
    return field_path in _OF_FILES or _of_metadata(field_path)


def _of_metadata(path: str) -> bool:
    return path.startswith(_OF_METADATA) and path.endswith("']") and len(path) > len("metadata.labels['']")
