"""Volumes of every kind that a training job can use, and where containers see them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from hyperpod_ext.config.base import ContradictionError
from hyperpod_ext.config.job.pods.later import PodPart
from hyperpod_ext.config.job.pods.selectors import LabelSelector
from hyperpod_ext.config.job.pods.variables import FieldRef, ResourceRef, in_files
from hyperpod_ext.config.job.pods.words import Amount, FileMode, exactly_one
from hyperpod_ext.config.names import AbsolutePath, DnsLabel, LabelKey, LabelValue, ObjectName


def stays_below(text: str) -> str:
    """A path without `..`."""
    if ".." in text.split("/"):
        raise ValueError(f"`{text}` leads out of the volume by `..`; write a path below it")
    return text


RelativePath = Annotated[str, Field(pattern=r"^[^/\x00:][^\x00:]*$"), AfterValidator(stays_below)]
"""A path below, without `..`."""
_OneName = Annotated[DnsLabel, Field(examples=["work"])]


class NameOnly(PodPart):
    """An object by its name."""

    name: Annotated[ObjectName, Field(examples=["driver-secret"])]
    """Name of the object."""


class KeyToPath(PodPart):
    """A key that becomes a file."""

    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]{1,253}$", examples=["config.yaml"])]
    """The key."""
    path: Annotated[RelativePath, Field(examples=["config.yaml"])]
    """Name of the file."""
    mode: FileMode | None = None
    """Mode of the file."""


class EmptyDir(PodPart):
    """Space that is empty at first, and goes with the pod."""

    medium: Literal["", "Memory"] | None = None
    """`Memory`: in memory, of which it counts."""
    sizeLimit: Amount | None = None
    """Most it may hold."""


class HostPath(PodPart):
    """A folder or file of the node."""

    path: Annotated[AbsolutePath, Field(examples=["/opt"])]
    """Where it is on the node."""
    type: (
        Literal["", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"]
        | None
    ) = None
    """What must be there, or is made. Default: nothing is looked at."""


class Claim(PodPart):
    """A PersistentVolumeClaim that exists."""

    claimName: Annotated[ObjectName, Field(examples=["fsx-claim"])]
    """Its name."""
    readOnly: bool | None = None
    """Nothing may be written."""


class ConfigMapFiles(PodPart):
    """Keys of a ConfigMap as files."""

    name: Annotated[ObjectName, Field(examples=["settings"])]
    """Its name."""
    items: tuple[KeyToPath, ...] = ()
    """Which keys. Default: all."""
    defaultMode: FileMode | None = None
    """Mode of files that have none of their own."""
    optional: bool | None = None
    """Whether pods start without it, too."""


class SecretFiles(PodPart):
    """Keys of a Secret as files."""

    secretName: Annotated[ObjectName, Field(examples=["hub-token"])]
    """Its name."""
    items: tuple[KeyToPath, ...] = ()
    """Which keys. Default: all."""
    defaultMode: FileMode | None = None
    """Mode of files that have none of their own."""
    optional: bool | None = None
    """Whether pods start without it, too."""


class KeyProjection(PodPart):
    """Keys of a ConfigMap or Secret, beside others in one folder."""

    name: Annotated[ObjectName, Field(examples=["settings"])]
    """Its name."""
    items: tuple[KeyToPath, ...] = ()
    """Which keys. Default: all."""
    optional: bool | None = None
    """Whether pods start without it, too."""


class FieldFile(PodPart):
    """A field of the pod as a file."""

    path: Annotated[RelativePath, Field(examples=["labels"])]
    """Name of the file."""
    fieldRef: FieldRef | None = None
    """Which field of the pod."""
    resourceFieldRef: ResourceRef | None = None
    """How much of a resource a container has; it is named by containerName."""
    mode: FileMode | None = None
    """Mode of the file."""

    @model_validator(mode="after")
    def _one(self) -> FieldFile:
        exactly_one(self, "a file of the downward API", "fieldRef", "resourceFieldRef")
        if self.fieldRef is not None and not in_files(self.fieldRef.fieldPath):
            raise ContradictionError(
                f"`{self.fieldRef.fieldPath}` is no field that a file can have; give a variable it"
            )
        if self.resourceFieldRef is not None and self.resourceFieldRef.containerName is None:
            raise ContradictionError("in a file, resourceFieldRef needs the containerName that it is about")
        return self


class DownwardFiles(PodPart):
    """Fields of the pod as files."""

    items: tuple[FieldFile, ...] = ()
    """Which."""
    defaultMode: FileMode | None = None
    """Mode of files that have none of their own."""


class FieldProjection(PodPart):
    """Fields of the pod, beside others in one folder."""

    items: tuple[FieldFile, ...] = ()
    """Which."""


class TokenProjection(PodPart):
    """A token of the pod's service account, which Kubernetes keeps fresh."""

    path: Annotated[RelativePath, Field(examples=["token"])]
    """Name of the file."""
    audience: str | None = None
    """Who shall take it. Default: the API server."""
    expirationSeconds: Annotated[int, Field(ge=600, le=2**32)] | None = None
    """How long it is valid, at least 600. Default: an hour."""


class Projection(PodPart):
    """What comes into a folder: one of these."""

    configMap: KeyProjection | None = None
    """Keys of a ConfigMap."""
    secret: KeyProjection | None = None
    """Keys of a Secret."""
    downwardAPI: FieldProjection | None = None
    """Fields of the pod."""
    serviceAccountToken: TokenProjection | None = None
    """A token."""

    @model_validator(mode="after")
    def _one(self) -> Projection:
        exactly_one(self, "a source")
        return self


class Projected(PodPart):
    """Several sources in one folder."""

    sources: Annotated[tuple[Projection, ...], Field(min_length=1, examples=[[{"configMap": {"name": "settings"}}]])]
    """What comes into it."""
    defaultMode: FileMode | None = None
    """Mode of files that have none of their own."""


class Csi(PodPart):
    """A volume that a driver makes for this pod."""

    driver: Annotated[ObjectName, Field(max_length=63, examples=["s3.csi.aws.com"])]
    """The driver."""
    readOnly: bool | None = None
    """Nothing may be written."""
    fsType: str | None = None
    """File system."""
    volumeAttributes: dict[str, str] = {}
    """What the driver must know."""
    nodePublishSecretRef: NameOnly | None = None
    """Secret that it gets."""


class Nfs(PodPart):
    """A folder of an NFS server; EFS is one."""

    server: Annotated[str, Field(min_length=1, examples=["fs-0123456789abcdef0.efs.us-west-2.amazonaws.com"])]
    """The server."""
    path: Annotated[AbsolutePath, Field(examples=["/"])]
    """Folder on it."""
    readOnly: bool | None = None
    """Nothing may be written."""


class ImageFiles(PodPart):
    """Files of an image."""

    reference: Annotated[str, Field(min_length=1, examples=["repo/data:1"])]
    """The image."""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When it is fetched."""


class ClaimStorage(PodPart):
    """How much a claim asks for."""

    requests: Annotated[dict[Literal["storage"], Amount], Field(min_length=1, examples=[{"storage": "1Ti"}])]
    """`storage`: so much."""
    limits: dict[Literal["storage"], Amount] = {}
    """`storage`: at most so much."""


class ClaimSpec(PodPart):
    """What a new claim asks for."""

    accessModes: Annotated[
        tuple[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"], ...],
        Field(min_length=1, examples=[["ReadWriteOnce"]]),
    ]
    """How it may be mounted."""
    resources: Annotated[ClaimStorage, Field(examples=[{"requests": {"storage": "1Ti"}}])]
    """How much it asks for."""
    storageClassName: str | None = None
    """Storage class. Default: that of the cluster."""
    volumeMode: Literal["Filesystem", "Block"] | None = None
    """With a file system on it, or bare."""
    volumeName: ObjectName | None = None
    """A volume that exists."""
    selector: LabelSelector | None = None
    """Volumes that will do."""


class ClaimMetadata(PodPart):
    """Labels and annotations of a new claim."""

    labels: dict[LabelKey, LabelValue] = {}
    """Labels."""
    annotations: dict[LabelKey, str] = {}
    """Annotations."""


class ClaimTemplate(PodPart):
    """A claim that is made for each pod."""

    spec: Annotated[
        ClaimSpec,
        Field(examples=[{"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}]),
    ]
    """What it asks for."""
    metadata: ClaimMetadata | None = None
    """Its labels and annotations."""


class Ephemeral(PodPart):
    """A claim that comes and goes with the pod."""

    volumeClaimTemplate: Annotated[
        ClaimTemplate,
        Field(examples=[{"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}}]),
    ]
    """The claim."""


class NamedVolume(PodPart):
    """A volume of the pod: its name, and one kind."""

    name: _OneName
    """By which mounts refer to it."""
    emptyDir: EmptyDir | None = None
    """Space that is empty at first, and goes with the pod."""
    hostPath: HostPath | None = None
    """A folder or file of the node."""
    persistentVolumeClaim: Claim | None = None
    """A claim that exists."""
    configMap: ConfigMapFiles | None = None
    """Keys of a ConfigMap as files."""
    secret: SecretFiles | None = None
    """Keys of a Secret as files."""
    downwardAPI: DownwardFiles | None = None
    """Fields of the pod as files."""
    projected: Projected | None = None
    """Several sources in one folder."""
    csi: Csi | None = None
    """A volume that a driver makes for this pod."""
    ephemeral: Ephemeral | None = None
    """A claim that comes and goes with the pod."""
    nfs: Nfs | None = None
    """A folder of an NFS server."""
    image: ImageFiles | None = None
    """Files of an image."""

    @model_validator(mode="after")
    def _one(self) -> NamedVolume:
        exactly_one(self, "a volume", *(name for name in type(self).model_fields if name != "name"))
        return self


class Mount(PodPart):
    """Where a container sees a volume."""

    name: _OneName
    """Name of the volume."""
    mountPath: Annotated[AbsolutePath, Field(examples=["/work"])]
    """Where it is seen."""
    readOnly: bool | None = None
    """Nothing may be written."""
    subPath: RelativePath | None = None
    """Only this folder or file of it."""
    subPathExpr: RelativePath | None = None
    """The same, with variables: `$(NODE_NAME)`."""
    mountPropagation: Literal["None", "HostToContainer", "Bidirectional"] | None = None
    """Whether mounts made later are seen on the other side."""
    recursiveReadOnly: Literal["Disabled", "Enabled", "IfPossible"] | None = None
    """Whether mounts below are read-only, too."""

    @model_validator(mode="after")
    def _fits(self) -> Mount:
        if self.subPath is not None and self.subPathExpr is not None:
            raise ContradictionError("subPath and subPathExpr are two ways to say the same; keep one", "subPathExpr")
        if self.recursiveReadOnly in ("Enabled", "IfPossible") and not self.readOnly:
            raise ContradictionError("recursiveReadOnly needs readOnly: true beside it", "recursiveReadOnly")
        return self


class Device(PodPart):
    """A claim without a file system, as a device."""

    name: _OneName
    """Name of the volume."""
    devicePath: Annotated[AbsolutePath, Field(examples=["/dev/xvda"])]
    """Where the container sees it."""
