"""Word that a node will be taken away: what EC2 says, what a file says, and what cannot be heard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from instance_metadata import NOTICE, InstanceMetadata, instance_metadata

from hyperpod_ext.config.elastic import Elastic, Notices
from hyperpod_ext.runtime.detection import preemption as n


@pytest.fixture
def imds() -> Iterator[InstanceMetadata]:
    with instance_metadata() as known:
        yield known


def heard(
    notices: Notices, metadata: n.Metadata | None, seconds: float = 10
) -> tuple[n.PreemptionNotice | None, list[str]]:
    """The notice that is taken, the second time that it comes, and what was said to be out of reach."""
    offered: list[n.PreemptionNotice] = []
    unheard: list[str] = []

    def take(notice: n.PreemptionNotice) -> bool:
        offered.append(notice)
        return len(offered) == 2

    async def run() -> None:
        async with asyncio.timeout(seconds):
            await n.watch(notices, metadata, take, unheard.append)

    try:
        asyncio.run(run())
    except TimeoutError:
        return None, unheard
    return offered[-1], unheard


FAST = Notices(ec2=True, every_s=0.01)


def test_a_spot_notice_is_asked_for_with_a_token_and_offered_until_it_is_taken(imds: InstanceMetadata) -> None:
    metadata = n.Metadata(imds.of("n1"))
    assert metadata.spot_action() is None
    imds.notices["n1"] = NOTICE
    notice, unheard = heard(FAST, metadata)
    assert notice is not None
    assert (notice.cause, unheard) == ("EC2 will terminate this Spot instance", [])
    assert notice.seconds_left is not None
    assert notice.seconds_left > 1e6
    assert n.Metadata(imds.of("n2")).spot_action() is None


def test_a_token_that_has_expired_is_replaced(imds: InstanceMetadata) -> None:
    metadata = n.Metadata(imds.of("n1"))
    assert metadata.spot_action() is None
    imds.tokens.clear()
    imds.notices["n1"] = NOTICE
    notice, unheard = heard(FAST, metadata)
    assert notice is not None
    assert unheard == []


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "nonsense", "http://127.0.0.1:1/a b"])
def test_metadata_that_cannot_be_asked_is_said_once_and_left_alone(endpoint: str) -> None:
    notice, unheard = heard(FAST, n.Metadata(endpoint), 3.0)
    assert notice is None
    assert len(unheard) == 1


def test_a_file_says_so_by_being_there(tmp_path: Path) -> None:
    file = tmp_path / "leave"
    notices = Notices(ec2=False, file=str(file), every_s=0.01)
    assert heard(notices, None, 0.1) == (None, [])
    file.touch()
    assert heard(notices, None) == (n.PreemptionNotice(f"{file} says so"), [])


def test_a_file_that_cannot_be_looked_at_is_not_there() -> None:
    assert heard(Notices(ec2=False, file="/" + "x" * 300, every_s=0.01), None, 0.1) == (None, [])


NOW = datetime(2026, 11, 21, 8, 20, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ('{"action": "stop", "time": "2026-11-21T08:22:00Z"}', 120.0),
        ('{"action": "stop", "time": "2026-11-21T08:22:00"}', None),
        ('{"action": "hibernate"}', None),
        ("[]", None),
        ("<html>", None),
        ("", None),
    ],
)
def test_whatever_ec2_says_there_is_a_notice(text: str, seconds: float | None) -> None:
    assert n.read_action(text, NOW).seconds_left == seconds


def test_only_machines_of_ec2_are_asked_unless_the_job_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    monkeypatch.setattr(n, "_VENDOR", tmp_path / "sys_vendor")
    assert n.metadata_of(Notices()) is None
    assert n.metadata_of(Notices(ec2=True)) is not None
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert n.metadata_of(Notices()) is not None
    assert n.metadata_of(Notices(ec2=False)) is None
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert n.metadata_of(Notices()) is None


def test_what_is_understood_is_not_told_to_containers_that_may_not_know_it() -> None:
    elastic = Elastic(min_nodes=1, max_nodes=2)
    assert "notices" not in elastic.model_dump_json()
    told = elastic.model_copy(update={"notices": Notices(ec2=True)}).model_dump_json()
    assert json.loads(told)["notices"]["ec2"] is True
    assert Elastic.model_validate_json(told).notices.ec2 is True
