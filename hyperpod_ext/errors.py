"""Every error that a user can see, with its exit code. Imports nothing heavy.

    HyperpodExtError            1
    ├── ConfigError             3   a file or option is wrong; carries every problem found
    │   └── UnsupportedError    3   fields that are right one by one but cannot work together
    ├── UnreachableError        4   an endpoint cannot be reached, or refuses us
    │   └── UnknownOutcomeError 4   a request was sent, its answer was lost
    ├── ConflictError           5   the name or the port is in use
    ├── NotFoundError           6   no such job, run or file
    ├── JobFailedError          7   the job ran and failed
    │   ├── MemoryTierFullError     the memory tier has no room
    │   ├── NoCheckpointError       no step that every rank can restore
    │   ├── CorruptSnapshotError    bytes that do not match their manifest
    │   ├── NonFiniteError          a loss or gradients that are not finite
    │   ├── ReplicasDifferError     ranks that should hold the same state do not
    │   ├── CorruptSegmentError     a file of a token store does not match its checksum
    │   ├── DatasetChangedError     the data changed since the run, or the store, began
    │   ├── UnknownLengthError      a growing source has no length yet
    │   ├── DiskFullError           no room for data; earlier data is intact
    │   └── StaleGenerationError    a writer of an older generation was refused
    ├── WaitTimeoutError        8   the job is still running, the wait is over
    └── UserInterruptError    130   the user pressed Ctrl-C

Exit code 2 is click's own, for wrong usage of the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hyperpod_ext.terminal import escape


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in the user's input, and its place."""

    message: str
    """The mistake, as a sentence without the place."""
    path: str = ""
    """Dotted path of the field, `checkpoint.tiers.1.every_steps`."""
    source: str = ""
    """The file, or the option, that the value came from."""
    line: int | None = None
    """1-based line in `source`."""
    hint: str = ""
    """How to fix it: the nearest valid name, or a valid value."""
    rule: str = ""
    """Id of the rule that found it; `hp-ext explain HPX101` explains it."""

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.source, self.line) if part not in ("", None))
        text = ": ".join(part for part in (where, self.path, self.message) if part)
        text = f"{text} ({self.hint})" if self.hint else text
        return f"{text} [{self.rule}]" if self.rule else text


class HyperpodExtError(Exception):
    """Root of all errors. `hint` says what to do next. Both texts are escaped, because they may quote foreign input."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message, self.hint = escape(message), escape(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def to_json(self) -> dict[str, object]:
        """Return the error as JSON, for `-o json`."""
        return {
            "code": type(self).__name__,
            "exit_code": self.exit_code,
            "message": self.message,
            "hint": self.hint,
        }


class ConfigError(HyperpodExtError):
    """The user's input is wrong; has all its problems."""

    exit_code = 3

    def __init__(self, problems: Sequence[Problem], *, hint: str = "") -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems), hint=hint)

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "problems": [asdict(problem) for problem in self.problems]}


class UnsupportedError(ConfigError):
    """Fields that are right one by one but cannot work together on this target."""


class UnreachableError(HyperpodExtError):
    exit_code = 4


class UnknownOutcomeError(UnreachableError):
    """The answer to a request was lost, so it is unknown whether it was carried out."""


class ConflictError(HyperpodExtError):
    exit_code = 5


class NotFoundError(HyperpodExtError):
    exit_code = 6


class JobFailedError(HyperpodExtError):
    exit_code = 7


class MemoryTierFullError(JobFailedError):
    """The memory tier has no room for a snapshot; existing snapshots are intact."""


class NoCheckpointError(JobFailedError):
    """No step that every rank can restore."""


class CorruptSnapshotError(JobFailedError):
    """Bytes that do not match their manifest; they were not loaded."""


class NonFiniteError(JobFailedError):
    """A loss or gradients that are not finite; the step was not committed on any rank."""


class ReplicasDifferError(JobFailedError):
    """Ranks that should hold the same state do not."""


class CorruptSegmentError(JobFailedError):
    """A file of a token store that does not match its checksum; it was not read."""


class DatasetChangedError(JobFailedError):
    """The data changed since the run, or the store, began."""


class UnknownLengthError(JobFailedError):
    """A growing or endless source has no length."""


class DiskFullError(JobFailedError):
    """There is no room for data; earlier data is intact."""


class StaleGenerationError(JobFailedError):
    """A writer of an older generation was refused."""


class WaitTimeoutError(HyperpodExtError):
    exit_code = 8


class UserInterruptError(HyperpodExtError):
    """The user pressed Ctrl-C."""

    exit_code = 130
