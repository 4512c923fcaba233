"""What a rank does with faults that are ordered for it, by the step that it has come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.config.fault_injection import ChaosOrder, InjectedFault
from hyperpod_ext.runtime.detection.heartbeat import Phase
from hyperpod_ext.runtime.fault_injection.from_worker import InjectedError, Injector
from hyperpod_ext.runtime.fault_injection.orders import orders_folder

RANK = 2


class Target:
    """A run that takes notes."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def snapshots(self) -> None:
        return None

    def first_parameter(self) -> None:
        return None


def injector(run_dir: Path, target: Target, *armed: InjectedFault) -> Injector:
    made = Injector(armed, RANK, run_dir, target)
    made.obey(lambda: False)
    return made


def order(run_dir: Path, step: int | None, rank: int = RANK) -> InjectedFault:
    fault = InjectedFault(kind="exception", rank=rank, step=step)
    orders_folder(run_dir).mkdir(parents=True, exist_ok=True)
    (orders_folder(run_dir) / f"{rank}-{step}.json").write_text(ChaosOrder(fault=fault).model_dump_json())
    return fault


def test_what_is_due_strikes_once(tmp_path: Path) -> None:
    target = Target()
    order(tmp_path, 5)
    made = injector(tmp_path, target)
    made.at(Phase.CHECKPOINT, 4)
    with pytest.raises(InjectedError, match="in data of step 5"):
        made.at(Phase.DATA, 5)
    injector(tmp_path, target).at(Phase.DATA, 5)
    assert [event["event"] for event in target.events] == ["injected"]


def test_what_is_for_a_step_that_was_made_is_told_once(tmp_path: Path) -> None:
    target = Target()
    order(tmp_path, 5)
    for _ in range(2):
        made = injector(tmp_path, target)
        for step in (7, 8):
            made.at(Phase.DATA, step)
    assert target.events == [{"event": "fault_missed", "rank": RANK, "kind": "exception", "step": 5, "at": 7}]


def test_another_place_of_the_step_that_is_being_made_may_still_come(tmp_path: Path) -> None:
    target = Target()
    backward = InjectedFault(kind="exception", rank=RANK, step=5, phase="backward")
    made = injector(tmp_path, target, backward)
    made.at(Phase.FORWARD, 5)
    assert target.events == []
    made.at(Phase.DATA, 6)
    assert [event["event"] for event in target.events] == ["fault_missed"]


def test_that_of_another_rank_and_one_without_a_step_are_not_too_late(tmp_path: Path) -> None:
    target = Target()
    order(tmp_path, 5, rank=RANK + 1)
    order(tmp_path, None)
    with pytest.raises(InjectedError):
        injector(tmp_path, target).at(Phase.DATA, 9)
    assert [event["event"] for event in target.events] == ["injected"]
