"""JobHandle: a submitted job as a URL, `target://place/name`, that can be stored and parsed again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hyperpod_ext.errors import ConfigError, NotFoundError, Problem

_URL = re.compile(r"(?P<target>[a-z0-9-]+)://(?P<place>[^/\s]+)/(?P<name>[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)")
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
ANYWHERE = "-"
"""Place in a handle that was made from the bare name of a job. The target decides where to look for the job."""


@dataclass(frozen=True, slots=True)
class JobHandle:
    """Target, place (such as a namespace or a cluster) and name of a job."""

    target: str
    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.target}://{self.place}/{self.name}"

    @property
    def in_commands(self) -> str:
        """The job as an argument in a shell: the name of a job of target local, or else the URL in quotes."""
        return self.name if self.target == "local" else f"'{self}'"

    def check_rank(self, rank: int | None, ranks: int) -> None:
        """Check that the job has a rank numbered `rank`.

        Args:
            rank: number of the rank; None stands for all ranks and is always valid.
            ranks: number of ranks of the job.

        Raises:
            NotFoundError: the job has no such rank.
        """
        if rank is not None and rank >= ranks:
            raise NotFoundError(f"{self.name} has no rank {rank}", hint=f"the job's ranks are 0 to {ranks - 1}")

    def no_result(self) -> NotFoundError:
        """Return the error for a job that has not ended."""
        return NotFoundError(f"{self.name} has no result yet", hint=f"`hp-ext status {self}` shows its progress")

    @classmethod
    def parse(cls, text: str, target: str = "local") -> JobHandle:
        """Parse a URL, or the bare name of a job of `target`. A bare name gets the place `ANYWHERE`.

        Raises:
            ConfigError: the text is neither a URL nor a name.
        """
        if _NAME.fullmatch(text):
            return cls(target, "localhost" if target == "local" else ANYWHERE, text)
        match = _URL.fullmatch(text)
        if match is None:
            hint = "write the job's name, or its URL, such as local://localhost/tiny-gpt"
            raise ConfigError([Problem(f"`{text}` does not name a job", hint=hint)])
        return cls(match["target"], match["place"], match["name"])
