"""What `make test-torch` runs with the torch of this Python's environment, in parts; at the end one line for each.

`python tests/support/torch_parts.py imports ddp fsdp2 tests`; without arguments, all of them. Parts run on when one has
failed; the exit code is 1 then.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FAST = (
    "not slow and not thorough and not soak and not sdks and not integrations and not measures and not torch_versions "
    "and not nixl"
)
NEED_TORCH = (
    "tests/faults",
    *(
        f"tests/runtime/{folder}"
        for folder in (
            "agent",
            "checkpoint",
            "control_plane",
            "dcp",
            "process_group",
            "reproducible",
            "snapshot",
        )
    ),
    *(
        "tests/integrations/parts",
        "tests/runtime/state",
        "tests/runtime/storage",
        "tests/runtime/torch_requirements",
        "tests/runtime/scripts",
        "tests/runtime/training",
    ),
    *(
        "tests/runtime/data/test_loader.py",
        "tests/runtime/data/test_sampler.py",
        "tests/runtime/data/store/test_store.py",
    ),
    *("tests/runtime/detection/test_cuda_errors.py", "tests/planner/test_sizes.py", "tests/cli/test_checkpoints.py"),
)
"""Folders and files of fast tests that import torch, or start processes that do."""
EXAMPLES = ("-s", "-m", "torch_versions", "tests/torch_versions", "-k")
PARTS = {
    "imports": ("imports of the runtime", (*EXAMPLES, "imports")),
    "ddp": ("example 01-local (DDP), kill -9", (*EXAMPLES, "01-local")),
    "fsdp2": ("example 03-sharded (FSDP2, HSDP), kill -9", (*EXAMPLES, "03-sharded")),
    "tests": ("fast tests that need torch", ("-n", "2", "--dist", "loadfile", "-m", FAST, *NEED_TORCH)),
}


@dataclass(frozen=True)
class Counts:
    """Of one part."""

    passed: int
    failed: int
    skipped: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped in {self.seconds:.0f} s"


def run(arguments: tuple[str, ...]) -> Counts:
    """pytest with these arguments; one that ends without a report has failed."""
    with tempfile.TemporaryDirectory() as folder:
        report, began = Path(folder) / "report.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return counts_of(report.read_text() if report.exists() else "", code, time.monotonic() - began)


def counts_of(report: str, code: int, seconds: float) -> Counts:
    suites = list(ElementTree.fromstring(report).iter("testsuite")) if report else []
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return Counts(tests - failed - skipped, failed or int(code != 0), skipped, seconds)


def main(wanted: list[str]) -> int:
    unknown = sorted(set(wanted) - set(PARTS))
    if unknown:
        sys.stderr.write(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}\n")
        return 2
    found = {name: run(PARTS[name][1]) for name in wanted or PARTS}
    print(f"\ntorch {importlib.metadata.version('torch')}, Python {platform.python_version()}")
    for name, counts in found.items():
        print(f"    {PARTS[name][0]:<44} {counts}")
    return int(any(counts.failed for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
