"""The base of every checkpoint tier, and the registry of durable tiers.

A durable tier is one file next to this one: a class with its fields, its `kind`, its URL schemes and the store that
keeps its checkpoints. All other code reads these properties from the class.
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
"""One worker; one machine; every process of the job."""
DURABLE: dict[str, type[DurableTier]] = {}
"""Durable tiers by kind, in the order of their files' import."""
AUTO = "auto"


def tier_of(url: str) -> type[DurableTier] | None:
    """Return the kind of durable tier of a URL or path."""
    return next((tier for tier in DURABLE.values() if urlsplit(url).scheme in tier.schemes), None)


def _or_auto(schema: dict[str, Any]) -> None:
    """Allow `auto` next to a number in the JSON schema."""
    number = {key: schema.pop(key) for key in ("type", "exclusiveMinimum") if key in schema}
    schema["anyOf"] = [number, {"const": AUTO, "type": "string"}]


EverySteps = Annotated[PositiveInt, Field(json_schema_extra=_or_auto)]


class Auto(int):
    """A number of steps that the planner may choose; written as `auto`."""

    def __repr__(self) -> str:
        return AUTO


class Tuned(Config):
    """A tier whose frequency may be left to the planner, with `every_steps: auto`."""

    survives: ClassVar[frozenset[Loss]]
    """Losses after which snapshots in this tier can still be read."""
    level: ClassVar[str]
    """Level of the planner's cost model that the tier counts as."""

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
    """A place that outlives every process of the job."""

    survives = frozenset({"process", "node", "job"})
    level = "durable"
    schemes: ClassVar[tuple[str, ...]]
    """Schemes of the URLs of the tier's checkpoints. Empty if the tier has a path."""
    store: ClassVar[str]
    """`module:class` of the object store behind it. The class has `at(place, job, **options)`."""
    distance: ClassVar[int]
    """If several tiers have a step, ranks restore it from the tier with the lowest value."""
    on_node: ClassVar[bool] = False
    """Whether each node has its own checkpoints, which are lost with the node. Otherwise all nodes see the same
    checkpoints."""
    if TYPE_CHECKING:
        kind: str

    every_steps: EverySteps = 100
    """Steps between writes of the newest snapshot. `auto`: the running job sets the best interval, from the cost of
    saves and the number of faults."""
    every_seconds: PositiveFloat | None = None
    """Seconds between writes, instead of every_steps. With `every_steps: auto`: the first interval."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep. Older checkpoints are deleted, unless the two fields below keep them."""
    keep_every_steps: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    keep_steps: tuple[NonNegativeInt, ...] = ()
    """Milestones: steps whose checkpoints are never deleted."""

    @model_validator(mode="after")
    def _one_clock(self) -> Self:
        default = type(self).model_fields["every_steps"].default  # a dumped spec contains both fields
        if self.every_seconds is not None and self.every_steps != default:
            message = "every_steps and every_seconds both set the interval; keep one of them"
            raise ContradictionError(message, "every_seconds")
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "kind" in cls.model_fields:
            DURABLE[cls.model_fields["kind"].default] = cls

    @property
    @abstractmethod
    def place(self) -> str:
        """URL or path below which each job has its folder."""

    @property
    def folder(self) -> str | None:
        """Directory that nodes see as a path; None if nodes reach the tier over the network."""
        return None

    @property
    def mounted(self) -> str | None:
        """Directory that every node needs: `folder`, or its parent above a part that differs between nodes."""
        return self.folder

    @property
    def options(self) -> Mapping[str, Any]:
        """Arguments of the store's `at`, besides place and job."""
        return {}

    def on_one_machine(self) -> Self:
        """Return the tier for several nodes on one machine."""
        return self

    def on(self, node: int) -> Self:
        """Return the tier of one node."""
        return self

    def url(self, job: str) -> str:
        """Return the place of one job's checkpoints."""
        return f"{self.place.rstrip('/')}/{job}"


class DirectoryTier(DurableTier):
    """Checkpoints in a directory, by its field `path`."""

    store = "hyperpod_ext.runtime.storage.file:FileStore"
    if TYPE_CHECKING:
        path: str

    @property
    def place(self) -> str:
        return self.path

    @property
    def folder(self) -> str:
        return self.path
