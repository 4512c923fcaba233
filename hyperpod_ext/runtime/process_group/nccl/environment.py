"""Environment variables of torch and NCCL that recovery needs. Without these variables, a fault ends surviving
processes.

Pure functions. `nccl_environment` returns the variables to set before the first NCCL group, because torch reads them
when a group is made. If the user has set variables to values that `VARIABLES` does not allow, one error names all of
them.

Sources: the headers `c10d/ProcessGroupNCCL.hpp`, `c10d/FlightRecorder.hpp` and `c10d/Utils.hpp` of torch 2.13 and 2.15
    (names, former names, parsing), `ProcessGroupNCCL.cpp` of both implementations (effects), and NVIDIA's guide for
    in-process restart with its resiliency extension (`NCCL_NVLS_ENABLE`). Results of runs on a GPU are in docs/gpu.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hyperpod_ext.errors import ConfigError, Problem

Engine = Literal["nccl", "nccl2"]
"""Torch's two implementations of backend `nccl`. Implementation `nccl` is the default from torch 2.6 to 2.14, and
`nccl2` is the default from 2.15 on."""

_LEGACY: tuple[Engine, ...] = ("nccl",)
_SECOND: tuple[Engine, ...] = ("nccl2",)
_BOTH: tuple[Engine, ...] = ("nccl", "nccl2")

_FLAGS = {"y": 1, "yes": 1, "1": 1, "t": 1, "true": 1, "n": 0, "no": 0, "0": 0, "f": 0, "false": 0}
"""Values that torch's `getCvarBool` accepts, in upper or lower case. Torch raises an error for any other value."""
_DEBUG_LEVELS = {"OFF": 0, "INFO": 1, "DETAIL": 2}


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable, and the values with which recovery works."""

    name: str
    value: str
    """The value that recovery needs. If `is_set`, this value is set unless the user has set the variable."""
    why: str
    engines: tuple[Engine, ...]
    """Implementations of backend `nccl` that read the variable."""
    kind: Literal["flag", "integer", "debug level"] = "flag"
    """How torch parses the variable's text."""
    former: tuple[str, ...] = ()
    """Former names under which torch also reads the variable. The first name that is set counts."""
    least: int = 0
    most: int = 0
    """Largest accepted value of the user (`least` is the smallest). A flag counts as 0 or 1."""
    is_set: bool = True
    """Whether to set the variable. The value is False if torch's default is right, so that only the user's value is
    checked."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.former)

    def accepts(self, text: str) -> bool:
        number = _read(self.kind, text)
        return number is not None and self.least <= number <= self.most


VARIABLES = (
    # nccl2 reads this variable only for groups without reconfiguration, such as other groups of a script; it revokes
    # groups with reconfiguration in any case (nccl2/ProcessGroupNCCL.hpp of 2.15.0 on handleWatchdogFailure)
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "otherwise torch's watchdog ends the process when a peer has died",
        _BOTH,
        kind="integer",
        former=("NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Variable(
        "TORCH_NCCL_DESYNC_DEBUG",
        "0",
        "a value of 1 makes torch raise TORCH_NCCL_ASYNC_ERROR_HANDLING from 0 to 3",
        _LEGACY,
        former=("NCCL_DESYNC_DEBUG",),
        is_set=False,
    ),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG",
        "INFO",
        "DETAIL turns TORCH_NCCL_DESYNC_DEBUG on, which raises TORCH_NCCL_ASYNC_ERROR_HANDLING from 0 to 3",
        _LEGACY,
        kind="debug level",
        most=_DEBUG_LEVELS["INFO"],
        is_set=False,
    ),
    Variable(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "otherwise the watchdog rethrows errors that follow an abort, and the process ends",
        _LEGACY,
    ),
    Variable(
        "TORCH_NCCL_TEARDOWN_ON_TIMEOUT",
        "0",
        "a value of 1 ends the process at a timeout, even if TORCH_NCCL_RETHROW_CUDA_ERRORS is 0",
        _LEGACY,
        is_set=False,
    ),
    Variable(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "otherwise the heartbeat monitor ends a process whose watchdog is busy, and queries the store each second",
        _LEGACY,
    ),
    Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "otherwise the watchdog signals a dump to all ranks and sleeps",
        _LEGACY,
    ),
    Variable(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "1",
        "if the watchdog dumps nevertheless, it sleeps four times this long after a fault",
        _LEGACY,
        kind="integer",
        most=100,
    ),
    Variable(
        "TORCH_FR_DUMP_ON_TIMEOUT",
        "0",
        "otherwise a flight record is written while a fault waits to be handled",
        _SECOND,
        former=("TORCH_NCCL_DUMP_ON_TIMEOUT",),
    ),
    Variable(
        "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC",
        "1",
        "if a flight record is written nevertheless, it may take this long",
        _SECOND,
        kind="integer",
        former=("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",),
        most=100,
    ),
    Variable(
        "TORCH_NCCL_PROPAGATE_ERROR",
        "0",
        "otherwise an error spreads through the store before the ranks have agreed on the fault",
        _LEGACY,
    ),
    Variable(
        "TORCH_NCCL_NONBLOCKING_TIMEOUT",
        "30",
        "an abort waits this many seconds for a communicator that is being made; torch's default is 1800",
        _LEGACY,
        kind="integer",
        least=1,
        most=60,
    ),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT",
        "0",
        "with a value of 1 there is no watchdog, and ranks wait in a collective until its timeout",
        _BOTH,
        former=("NCCL_BLOCKING_WAIT",),
        is_set=False,
    ),
    Variable(
        "NCCL_NVLS_ENABLE",
        "0",
        "NVIDIA's resiliency extension requires it for restarts in the same process",
        _BOTH,
        kind="integer",
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        "0",
        "with a value of 1 the main thread waits for each kernel, also for one of a broken collective",
        _BOTH,
        kind="integer",
        is_set=False,
    ),
    Variable(
        "OFI_NCCL_ABORT_ON_ERROR",
        "0",
        "with a value of 1 aws-ofi-nccl ends the process at the first network error",
        _BOTH,
        is_set=False,
    ),
)
"""All variables to check or set, for both implementations of backend `nccl`."""


def engine_of(torch: str, given: Mapping[str, str]) -> Engine:
    """Return the implementation of backend `nccl` that torch version `torch` uses in the environment `given`."""
    chosen = given.get("TORCH_DIST_USE_NCCL2")
    if _version(torch) >= (2, 15):
        return "nccl" if chosen == "0" else "nccl2"
    return "nccl2" if _version(torch) == (2, 14) and chosen == "1" else "nccl"


def without_reconfigure(torch: str, given: Mapping[str, str]) -> str:
    """Return torch's backend name for groups without reconfiguration. The name is never `nccl2`, with which several
    groups without reconfiguration cannot be aborted.

    On a GPU, aborts of several groups without reconfiguration did not end within 40 s with `nccl2`, and ended in 0.6 s
    with the first implementation, `nccl` (docs/gpu.md, E5).
    """
    has_name = _version(torch) >= (2, 15)
    return "nccl-legacy" if has_name and engine_of(torch, given) == "nccl2" else "nccl"


def engines_used(torch: str, given: Mapping[str, str]) -> tuple[Engine, ...]:
    """Return the implementations that a job may use as it grows: groups of large jobs are not reconfigured."""
    engine = engine_of(torch, given)
    return (engine,) if without_reconfigure(torch, given) == "nccl" else (engine, "nccl")


def _version(torch: str) -> tuple[int, ...]:
    return tuple(int(part) for part in torch.split("+")[0].split(".")[:2])


def variables_of(*engines: Engine) -> Iterator[Variable]:
    return (variable for variable in VARIABLES if not set(engines).isdisjoint(variable.engines))


def nccl_environment(engines: Sequence[Engine], given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set before the first NCCL group. Leaves out variables that are in the environment
    `given`.

    Raises:
        ConfigError: variables in `given` have values with which recovery does not work.
    """
    problems = {
        name: _problem(variable, name, given[name])
        for variable in variables_of(*engines)
        if (name := _name_in(given, variable)) is not None and not variable.accepts(given[name])
    }
    if problems:
        raise ConfigError(list(problems.values()))
    return {
        variable.name: variable.value
        for variable in variables_of(*engines)
        if variable.is_set and _name_in(given, variable) is None
    }


def _name_in(given: Mapping[str, str], variable: Variable) -> str | None:
    """Return the name (current or former) under which a variable is set; None if it is unset or empty."""
    return next((name for name in variable.names if given.get(name)), None)


def _problem(variable: Variable, name: str, found: str) -> Problem:
    return Problem(
        f"is {found!r}, but recovery with NCCL needs {variable.value}: {variable.why}",
        path=name,
        source="the environment",
        hint=f"Remove {name} from the environment." if not variable.is_set else f"Set {name}={variable.value}.",
    )


def _read(kind: str, text: str) -> int | None:
    """Parse a variable's text as torch or NCCL would; None if the text cannot be parsed."""
    if kind == "flag":
        return _FLAGS.get(text.lower())
    if kind == "debug level":
        return _DEBUG_LEVELS.get(text.upper())
    number = re.match(r"\s*([+-]?\d+)", text)  # std::stoi and strtoll ignore text after the digits
    return int(number[1]) if number else None
