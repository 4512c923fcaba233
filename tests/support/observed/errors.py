"""Texts of errors that are provoked one by one: exit code, and what the user reads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from observed import wrong_commands, wrong_specs
from observed.case import Case, numbered
from observed.cli import Place

_FAST = 12
_DIGEST = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
"""A checksum, or the digest of a path of this machine."""


def errors(fast: bool) -> Iterator[tuple[str, Any]]:
    """Each mistake with its exit code and its lines. The quick part leaves out cases that need torch."""
    cases = chain(wrong_specs.job_cases(), wrong_specs.cluster_cases(), wrong_commands.all_commands())
    with Place() as place:
        kept = {*place.folder.iterdir()}
        for number, (key, case) in enumerate(numbered(cases)):
            if fast and (number % _FAST or case.prepare):
                continue
            if shown := _provoked(place, case):
                yield key, shown
            for left in {*place.folder.iterdir()} - kept:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _provoked(place: Place, case: Case) -> dict[str, Any] | None:
    """None if the command succeeds without a warning."""
    for name, text in case.files.items():
        (place.folder / Path(name).parent).mkdir(parents=True, exist_ok=True)
        place.write(name, text)
    if case.prepare:
        case.prepare(place.folder)
    done = place.run(*case.words)
    if not done.code and "warning: " not in done.stderr:
        return None
    lines = [*(done.stdout if done.code else "").splitlines(), *done.stderr.splitlines()]
    lines = [_DIGEST.sub("0123456789abcdef", line) for line in lines if not line.startswith("Usage: ")]
    return {"code": done.code, "says": lines}
