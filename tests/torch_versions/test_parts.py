"""What `make test-torch` counts."""

from __future__ import annotations

import pytest
import torch_parts

REPORT = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>'


@pytest.mark.parametrize(
    ("report", "code", "counted"),
    [
        (REPORT, 1, (3, 3, 3)),
        ('<testsuites><testsuite tests="2" failures="0" errors="0" skipped="0"/></testsuites>', 0, (2, 0, 0)),
        ("", 0, (0, 0, 0)),
        ("", 137, (0, 1, 0)),
        ('<testsuites><testsuite tests="1" failures="0" errors="0" skipped="0"/></testsuites>', 2, (1, 1, 0)),
    ],
)
def test_what_a_part_showed_is_counted(report: str, code: int, counted: tuple[int, int, int]) -> None:
    counts = torch_parts.counts_of(report, code, 1.0)
    assert (counts.passed, counts.failed, counts.skipped) == counted


def test_a_part_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_parts.main(["import"]) == 2
    assert capsys.readouterr().err == "no part import; there are imports, ddp, fsdp2, tests\n"


def test_folders_of_tests_that_need_torch_are_there() -> None:
    assert [name for name in torch_parts.NEED_TORCH if not (torch_parts.ROOT / name).exists()] == []


def test_a_fast_test_that_imports_torch_is_among_them() -> None:
    """Of folders that mirror the runtime's; others name no torch, or are slow."""
    outside = [
        str(file.relative_to(torch_parts.ROOT))
        for file in sorted((torch_parts.ROOT / "tests" / "runtime").rglob("test_*.py"))
        if "\nimport torch" in (text := file.read_text()) or "\nfrom torch" in text
    ]
    assert [name for name in outside if not name.startswith(torch_parts.NEED_TORCH)] == []
