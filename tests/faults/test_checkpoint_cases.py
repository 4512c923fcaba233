"""docs/checkpoint-cases.md names tests that are there."""

from __future__ import annotations

import re


def test_every_test_that_the_page_names_is_there(root):
    named = re.findall(r"`([\w/]+\.py)` `(test_\w+)`", (root / "docs" / "checkpoint-cases.md").read_text())
    missing = [(file, test) for file, test in named if f"def {test}(" not in (root / "tests" / file).read_text()]
    assert not missing
    assert len(named) > 50
