"""Every error class that a user can see, with its exit code. The module imports nothing that is slow to import.

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

Exit code 2 is click's exit code for wrong usage of the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hyperpod_ext.terminal import escape


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in the user's input, with the file, the line and the field of the mistake."""

    message: str
    """Description of the mistake, without file, line and field."""
    path: str = ""
    """Dotted path of the field with the mistake, such as `checkpoint.tiers.1.every_steps`."""
    source: str = ""
    """Name of the file, or the command-line option, that contains the mistake."""
    line: int | None = None
    """Line of the mistake in the file `source`, counted from 1. None if unknown."""
    hint: str = ""
    """How to fix the mistake, for example a similar valid name or a valid value."""
    rule: str = ""
    """Id of the rule that found the mistake, such as HPX101; `hp-ext explain HPX101` explains the rule."""

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.source, self.line) if part not in ("", None))
        text = ": ".join(part for part in (where, self.path, self.message) if part)
        text = f"{text} ({self.hint})" if self.hint else text
        return f"{text} [{self.rule}]" if self.rule else text


class HyperpodExtError(Exception):
    """Base class of all errors that a user can see.

    Args:
        message: what happened. Control characters are escaped, because the message may quote text from outside.
        hint: the user's next step. Control characters in the hint are escaped, too.
    """

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
    """Raised if the user's input is wrong. The error contains all problems that were found in the input."""

    exit_code = 3

    def __init__(self, problems: Sequence[Problem], *, hint: str = "") -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems), hint=hint)

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "problems": [asdict(problem) for problem in self.problems]}


class UnsupportedError(ConfigError):
    """Raised if fields of a spec are valid one by one, but cannot work together on the spec's target."""


class UnreachableError(HyperpodExtError):
    exit_code = 4


class UnknownOutcomeError(UnreachableError):
    """Raised if the answer to a request was lost, so that it is unknown whether the request was carried out."""


class ConflictError(HyperpodExtError):
    exit_code = 5


class NotFoundError(HyperpodExtError):
    exit_code = 6


class JobFailedError(HyperpodExtError):
    exit_code = 7


class MemoryTierFullError(JobFailedError):
    """Raised if the memory tier has no room for another snapshot. All existing snapshots stay intact."""


class NoCheckpointError(JobFailedError):
    """Raised if no saved step can be restored by every rank."""


class CorruptSnapshotError(JobFailedError):
    """Raised if bytes of a snapshot do not match the snapshot's manifest. The damaged bytes were not loaded."""


class NonFiniteError(JobFailedError):
    """Raised if the loss or a gradient is not finite. No rank has committed the step."""


class ReplicasDifferError(JobFailedError):
    """Raised if ranks that should hold the same state hold different state."""


class CorruptSegmentError(JobFailedError):
    """Raised if a file of a token store does not match its checksum. The content of the damaged file was not used."""


class DatasetChangedError(JobFailedError):
    """Raised if the training data has changed since the run or the token store was begun."""


class UnknownLengthError(JobFailedError):
    """Raised if code asks for the length of a data source that is endless or still grows."""


class DiskFullError(JobFailedError):
    """Raised if the disk has no room for new data. Data that was written before the error stays intact."""


class StaleGenerationError(JobFailedError):
    """Raised in a process of an older generation of the job (before a recovery) whose write was refused."""


class WaitTimeoutError(HyperpodExtError):
    exit_code = 8


class UserInterruptError(HyperpodExtError):
    """Raised if the user pressed Ctrl-C."""

    exit_code = 130
