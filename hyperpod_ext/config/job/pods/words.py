"""Values as Kubernetes writes them: amounts, ports, and choices of which one must be made."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from hyperpod_ext.config.base import ContradictionError
from hyperpod_ext.config.job.pods.later import PodPart

_AMOUNT = re.compile(r"[0-9]+(\.[0-9]*)?([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?|\.[0-9]+([KMGTPE]i|[numkMGTPE])?")
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_UNITS |= {f"{unit}i": 2.0 ** (10 * power) for power, unit in enumerate("KMGTPE", start=1)}
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")


def _amount(value: Any) -> str:
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    if _AMOUNT.fullmatch(text):
        return text  # resources of a TrainJob take no numbers
    raise ValueError(f"`{value}` is no amount of Kubernetes; write it as `500m`, `2` or `32Gi`")


def _port(value: Any) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    if isinstance(value, str) and len(value) <= 15 and _PORT_NAME.fullmatch(value):
        return value
    raise ValueError(f"`{value}` is no port; write a number from 1 to 65535, or the name of one of the container")


def size_of(amount: str) -> float:
    """An amount as a number: of bytes, of CPUs, of things."""
    unit = next((one for one in sorted(_UNITS, key=len, reverse=True) if amount.endswith(one)), "")
    return float(amount.removesuffix(unit)) * _UNITS.get(unit, 1.0)


Amount = Annotated[str, PlainValidator(_amount, json_schema_input_type=str | int | float), Field(examples=["1Gi"])]
"""An amount of Kubernetes: `500m`, `2`, `32Gi`."""
PortOrName = Annotated[str | int, PlainValidator(_port, json_schema_input_type=str | int), Field(examples=[8000])]
"""Number of a port, or the name that the container gives it."""
Seconds = Annotated[int, Field(ge=1, le=2**31 - 1)]
UserId = Annotated[int, Field(ge=0, le=2**31 - 1)]
FileMode = Annotated[int, Field(ge=0, le=0o777)]
"""Bits of a file's mode. Kubernetes counts in tens: YAML's 0440 is 288."""
PortNumber = Annotated[int, Field(ge=1, le=65535)]


def given(config: PodPart, *names: str) -> list[str]:
    """Which of the fields `names` are said."""
    return [name for name in names or type(config).model_fields if getattr(config, name) is not None]


def exactly_one(config: PodPart, what: str, *names: str) -> None:
    """Refuses a choice that was not made, or made twice."""
    found = given(config, *names)
    if not found:
        raise ContradictionError(f"{what} needs one of {', '.join(names or type(config).model_fields)}")
    if len(found) > 1:
        raise ContradictionError(f"{what} takes one of {' and '.join(found)}; keep one of them", found[-1])
