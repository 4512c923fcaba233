"""As whom containers run, and what they may do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hyperpod_ext.config.base import ContradictionError
from hyperpod_ext.config.job.pods.later import PodPart
from hyperpod_ext.config.job.pods.words import UserId

Capability = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$", examples=["IPC_LOCK"])]


class Profile(PodPart):
    """A profile of seccomp or AppArmor."""

    type: Annotated[Literal["RuntimeDefault", "Unconfined", "Localhost"], Field(examples=["RuntimeDefault"])]
    """Which: that of the container runtime, none, or a file of the node."""
    localhostProfile: Annotated[str, Field(min_length=1)] | None = None
    """Name of the file, for `Localhost`."""

    @model_validator(mode="after")
    def _named(self) -> Profile:
        if (self.type == "Localhost") != (self.localhostProfile is not None):
            raise ContradictionError(
                "localhostProfile goes with type: Localhost, and with it alone", "localhostProfile"
            )
        return self


class SELinux(PodPart):
    """A label of SELinux; what is not said, the container runtime chooses."""

    level: str | None = None
    """Level."""
    role: str | None = None
    """Role."""
    type: str | None = None
    """Type."""
    user: str | None = None
    """User of SELinux."""


class Sysctl(PodPart):
    """A setting of the kernel, for this pod alone."""

    name: Annotated[
        str,
        Field(pattern=r"^[a-z0-9]([-_a-z0-9]*[a-z0-9])?([./][a-z0-9]([-_a-z0-9]*[a-z0-9])?)*$", max_length=253),
        Field(examples=["net.ipv4.tcp_keepalive_time"]),
    ]
    """Its name. Nodes allow safe ones; others must be allowed in the kubelet's configuration."""
    value: Annotated[str, Field(examples=["60"])]
    """Its value, in quotes."""


class Capabilities(PodPart):
    """Capabilities of Linux, without `CAP_`."""

    add: tuple[Capability, ...] = ()
    """Those that are given besides."""
    drop: tuple[Capability, ...] = ()
    """Those that are taken away; `ALL` is every one."""


class Identity(PodPart):
    """As whom processes run."""

    runAsUser: UserId | None = None
    """Number of the user. Default: that of the image."""
    runAsGroup: UserId | None = None
    """Number of the group. Default: that of the image."""
    runAsNonRoot: bool | None = None
    """Whether a container that would run as root is not started."""
    seccompProfile: Profile | None = None
    """Which calls of the kernel they may make."""
    appArmorProfile: Profile | None = None
    """AppArmor's profile."""
    seLinuxOptions: SELinux | None = None
    """SELinux's label."""

    @model_validator(mode="after")
    def _starts(self) -> Identity:
        if self.runAsNonRoot and self.runAsUser == 0:
            raise ContradictionError("runAsUser 0 is root, and runAsNonRoot starts no root; change one", "runAsNonRoot")
        return self


class ContainerSecurity(Identity):
    """As whom a container runs, and what it may do; `kubernetes.privileged` gives it all."""

    allowPrivilegeEscalation: bool | None = None
    """Whether a process may get more rights than its parent, by setuid for example. Default here: no."""
    capabilities: Capabilities | None = None
    """Capabilities of Linux."""
    readOnlyRootFilesystem: bool | None = None
    """Whether only volumes can be written to."""
    procMount: Literal["Default", "Unmasked"] | None = None
    """How /proc looks; `Unmasked` needs hostUsers: false."""

    @model_validator(mode="after")
    def _escalates(self) -> ContainerSecurity:
        added = self.capabilities.add if self.capabilities else ()
        if self.allowPrivilegeEscalation is False and {"SYS_ADMIN", "CAP_SYS_ADMIN"} & set(added):
            message = "capability SYS_ADMIN does not go with allowPrivilegeEscalation: false; change one of the two"
            raise ContradictionError(message, "allowPrivilegeEscalation")
        return self


class SideContainerSecurity(ContainerSecurity):
    """As whom a container beside the one that trains runs, and what it may do."""

    privileged: bool | None = None
    """Whether it may do anything to the node."""

    @model_validator(mode="after")
    def _privileged_escalates(self) -> SideContainerSecurity:
        if self.privileged and self.allowPrivilegeEscalation is False:
            message = "privileged does not go with allowPrivilegeEscalation: false; change one of the two"
            raise ContradictionError(message, "allowPrivilegeEscalation")
        return self


class PodSecurity(Identity):
    """As whom all containers of a pod run, and whose its volumes are."""

    fsGroup: UserId | None = None
    """Number of the group that owns the volumes; every process belongs to it."""
    fsGroupChangePolicy: Literal["Always", "OnRootMismatch"] | None = None
    """When a volume's files are given to that group; `OnRootMismatch` spares large volumes the walk."""
    supplementalGroups: tuple[UserId, ...] = ()
    """Further groups of every process."""
    supplementalGroupsPolicy: Literal["Merge", "Strict"] | None = None
    """Whether groups of the image's /etc/group count, too."""
    sysctls: tuple[Sysctl, ...] = ()
    """Settings of the kernel."""
    seLinuxChangePolicy: Literal["MountOption", "Recursive"] | None = None
    """How volumes get SELinux's label."""
