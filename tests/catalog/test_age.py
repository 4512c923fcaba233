"""Facts about AWS have a day, and are told when it is long ago; packages' facts are written as they carry them."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import pytest
import refresh_catalog

from hyperpod_ext.catalog.age import MOST_DAYS, ages, stale
from hyperpod_ext.submit.doctor import look_at_catalog

DAY = date(2026, 11, 24)


def test_every_file_of_facts_has_a_day(root: Path) -> None:
    files = sorted(file.name for file in (root / "hyperpod_ext" / "catalog").glob("*.json"))
    assert [one.file for one in ages(DAY)] == files


def test_facts_are_old_from_the_day_after_180_days() -> None:
    youngest = min(ages(DAY), key=lambda one: one.days)
    last = date.fromisoformat(youngest.dated) + timedelta(days=MOST_DAYS)
    assert youngest.file not in [one.file for one in stale(last)]
    assert youngest.file in [one.file for one in stale(last + timedelta(days=1))]


def test_doctor_names_old_facts_and_what_refreshes_them() -> None:
    assert [one.state for one in look_at_catalog(date(2026, 11, 25))] == ["ok"]
    told = {one.what: one for one in look_at_catalog(date(2027, 12, 1))}
    assert {one.state for one in told.values()} == {"old"}
    assert "make catalog" in told["catalog/zones.json"].hint


@pytest.mark.parametrize("name", refresh_catalog.FILES)
def test_what_packages_carry_is_written_with_source_and_day(name: str) -> None:
    for package in ("moto", "cfnlint"):
        pytest.importorskip(package)
    facts = refresh_catalog.FILES[name](DAY)
    assert json.loads(refresh_catalog.text_of(facts)) == facts
    source = facts["sources"]["instance_types"] if "sources" in facts else facts
    assert source["dated"] == str(DAY)
    assert any(package in str(source) for package in ("botocore", "moto", "cfn-lint"))
    assert len(list(facts.values())[-1]) > 5
