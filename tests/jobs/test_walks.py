"""The way of a spec to its files: the modules that run, and the calls from one module to another.

A reader follows each of these calls into another file. Lower a bound when the way gets shorter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hyperpod_ext
from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.rules import all_rules

OURS = str(Path(hyperpod_ext.__file__).parent)


class Walk:
    """Modules of ours that a function enters, and each call from one of them to another."""

    def __init__(self, walked: Callable[[], object]) -> None:
        self.modules: set[str] = set()
        self.hops: list[str] = []
        before = sys.getprofile()
        sys.setprofile(self._see)
        try:
            walked()
        finally:
            sys.setprofile(before)

    def _see(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not _is_ours(frame):
            return
        module, caller = frame.f_code.co_filename, frame.f_back
        self.modules.add(module)
        while caller is not None and not _is_ours(caller):
            caller = caller.f_back  # pydantic or Jinja, which ours has called
        if caller is not None and caller.f_code.co_filename != module:
            self.hops.append(f"{caller.f_code.co_filename} -> {module}: {frame.f_code.co_qualname}")


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS) and frame.f_code.co_name != "<module>"


@pytest.mark.parametrize(
    ("target", "example", "modules", "hops"),
    [("local", "01-local", 22, 85), ("hyperpod-eks", "04-hyperpod-eks", 36, 195)],
)
def test_a_spec_goes_through_few_modules(root: Path, target: str, example: str, modules: int, hops: int) -> None:
    def planned() -> object:
        return make_plan(load(JobConfig, root / "examples" / example / "job.yaml"), target=target)

    all_rules()  # as a process that has planned other jobs; rules that are not needed must not run
    planned()  # imports modules, and reads templates and the catalog
    walk = Walk(planned)
    print(f"{target}: {len(walk.modules)} modules, {len(walk.hops)} hops", *walk.hops, sep="\n")
    assert len(walk.modules) <= modules
    assert len(walk.hops) <= hops
