"""The base class of checkpoint tiers, and the registry of durable tiers.

Each durable tier is a class in a file of this folder. The class defines the tier's fields, its `kind`, its URL schemes
and the object store that keeps its checkpoints. All other code reads the properties of a durable tier from its class.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from hyperpod_ext.config.base import Config, ContradictionError

Loss = Literal["process", "node", "job"]
"""Extent of a loss: `process` is one worker, `node` is one machine, `job` is every process of the job."""
DURABLE: dict[str, type[DurableTier]] = {}
"""Classes of durable tiers by `kind`, in the order in which their files are imported."""
AUTO = "auto"


def tier_of(url: str) -> type[DurableTier] | None:
    """Return the class of the durable tier that a URL or path belongs to, by its scheme; None if there is none."""
    return next((tier for tier in DURABLE.values() if urlsplit(url).scheme in tier.schemes), None)


def _or_auto(schema: dict[str, Any]) -> None:
    """Change a field's JSON schema so that it allows the text `auto` as an alternative to a number."""
    number = {key: schema.pop(key) for key in ("type", "exclusiveMinimum") if key in schema}
    schema["anyOf"] = [number, {"const": AUTO, "type": "string"}]


EverySteps = Annotated[PositiveInt, Field(json_schema_extra=_or_auto)]


class Auto(int):
    """A number of steps that the running job may change. In a spec, the word `auto` stands for the number."""

    def __repr__(self) -> str:
        return AUTO


class Tuned(Config):
    """A tier with `every_steps`. With `every_steps: auto`, the running job chooses the interval."""

    survives: ClassVar[frozenset[Loss]]
    """Kinds of losses after which snapshots in this tier can still be read."""
    level: ClassVar[str]
    """Name of the tier's level in the planner's cost model."""

    @field_validator("every_steps", mode="wrap", check_fields=False)
    @classmethod
    def _read_auto(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> int:
        if value == AUTO or isinstance(value, Auto):
            return Auto(cls.model_fields["every_steps"].default)
        return int(handler(value))

    @field_serializer("every_steps", check_fields=False)
    def _say_auto(self, value: int) -> int | str:
        return AUTO if isinstance(value, Auto) else value

    @property
    def auto(self) -> bool:
        """Whether the running job may change `every_steps`."""
        return isinstance(getattr(self, "every_steps", None), Auto)


class DurableTier(Tuned):
    """A tier whose checkpoints outlive every process of the job."""

    survives = frozenset({"process", "node", "job"})
    level = "durable"
    schemes: ClassVar[tuple[str, ...]]
    """URL schemes of the tier's checkpoints, such as `s3`. Empty if no URL leads to the tier."""
    store: ClassVar[str]
    """Object store that keeps the tier's checkpoints, as `module:class`. The class has a method
    `at(place, job, **options)`."""
    distance: ClassVar[int]
    """Preference of the tier for restores: if several tiers have a step, ranks read it from the tier with the lowest
    distance."""
    on_node: ClassVar[bool] = False
    """Whether the tier is on each node's own disk, and its checkpoints are lost with the node. False: all nodes see the
    same checkpoints."""
    if TYPE_CHECKING:
        kind: str

    every_steps: EverySteps = 100
    """Steps between writes of the newest snapshot to this tier. With `auto`, the running job computes the best
    interval, from the cost of saves and the number of faults."""
    every_seconds: PositiveFloat | None = None
    """Seconds between writes to this tier, instead of `every_steps`. With `every_steps: auto`, this is the first
    interval, which the running job then adjusts."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep. Older checkpoints are deleted, unless `keep_every_steps` or `keep_steps`
    keeps them."""
    keep_every_steps: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this number."""
    keep_steps: tuple[NonNegativeInt, ...] = ()
    """Numbers of steps whose checkpoints are never deleted."""

    @model_validator(mode="after")
    def _one_clock(self) -> Self:
        # compare with the default, because a spec that was dumped always sets `every_steps`
        default = type(self).model_fields["every_steps"].default
        if self.every_seconds is not None and self.every_steps != default:
            message = "every_steps and every_seconds both set the interval between saves; keep one of them"
            raise ContradictionError(message, "every_seconds")
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "kind" in cls.model_fields:
            DURABLE[cls.model_fields["kind"].default] = cls

    @property
    @abstractmethod
    def place(self) -> str:
        """URL or path of the tier, below which each job has its own folder."""

    @property
    def folder(self) -> str | None:
        """Directory of the tier in the nodes' file system; None if nodes reach the tier over the network."""
        return None

    @property
    def mounted(self) -> str | None:
        """Directory that must exist on every node: `folder`, or if a part of `folder` contains `{node}`, the parent of
        this part; None if `folder` is None."""
        return self.folder

    @property
    def options(self) -> Mapping[str, Any]:
        """Keyword arguments of the store's method `at`, in addition to `place` and `job`."""
        return {}

    def on_one_machine(self) -> Self:
        """Return the tier for a job whose nodes all run on one machine."""
        return self

    def on(self, node: int) -> Self:
        """Return the tier with the path of the node with number `node`."""
        return self

    def url(self, job: str) -> str:
        """Return the URL or path of the checkpoints of the job with name `job`."""
        return f"{self.place.rstrip('/')}/{job}"


class DirectoryTier(DurableTier):
    """Base class of tiers that keep checkpoints in the directory `path`."""

    store = "hyperpod_ext.runtime.storage.file:FileStore"
    if TYPE_CHECKING:
        path: str

    @property
    def place(self) -> str:
        return self.path

    @property
    def folder(self) -> str:
        return self.path
