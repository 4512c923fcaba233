"""Facts about AWS have a day, and are told when it is long ago; packages' facts are written as they carry them."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import pytest
import refresh_catalog

from hyperpod_ext.catalog.age import MOST_DAYS, ages, stale
from hyperpod_ext.catalog.images import training_image
from hyperpod_ext.jobs.doctor import look_at_catalog

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


def test_images_are_the_newest_that_the_sdk_names_with_the_account_of_each_region() -> None:
    versions = {f"2.{minor}.0": {"py_versions": ["py311", "py312"]} for minor in (10, 9, 1, 8, 7)}
    last = {"repository": "pytorch-training", "registries": {"b": "2", "a": "1"}}
    read = {"training": {"versions": {"0.4.0": {}} | {name: one | last for name, one in versions.items()}}}
    facts = refresh_catalog.images_of(read, "the SDK", DAY)
    assert list(facts["tags"]) == ["2.7.0", "2.8.0", "2.9.0", "2.10.0"]
    assert facts["tags"]["2.10.0"] == "2.10.0-gpu-py312"
    assert (facts["accounts"], facts["dated"]) == ({"a": "1", "b": "2"}, str(DAY))
    assert (
        training_image("us-west-2") == "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.8.0-gpu-py312"
    )
    assert training_image("nowhere") is None
