"""Every control message: what is damaged is refused by name, and costs no process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import declared_examples
import pytest

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.coordinator.members import Agent
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import declared
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import Declared, Kinds

FUZZED = 4_000
SETS = (c.WORKER_REPORTS, c.AGENT_REPORTS, c.AGENT_ORDERS, c.WORKER_ORDERS)

every_kind = pytest.mark.parametrize(
    ("kinds", "kind"),
    [(kinds, kind) for kinds in (c.AGENT_REPORTS, c.AGENT_ORDERS) for kind in kinds],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)


def message_of(kind: type[Declared], random: Random) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(json.dumps(declared.encode(declared_examples.example(kind, random))))
    return message


@every_kind
def test_a_field_too_many_one_too_few_and_a_wrong_one_are_refused_by_name(kinds: Kinds[Any], kind: type[Any]) -> None:
    message, name_of_kind = message_of(kind, Random(7)), declared.name_of(kind, "type")
    assert type(kinds.decode(message)) is kind
    with pytest.raises(wire.WireError, match=f"^{name_of_kind}: field `extra` is unknown$"):
        kinds.decode({**message, "extra": 1})
    for name, field in kind.model_fields.items():
        if name == "type":
            continue
        with pytest.raises(wire.WireError, match=f"^{name_of_kind}: field `{name}"):
            kinds.decode({**message, name: object()})
        if field.is_required():
            with pytest.raises(wire.WireError, match=f"^{name_of_kind}: field `{name}` is missing$"):
                kinds.decode({key: value for key, value in message.items() if key != name})


def test_what_is_passed_on_is_known_at_every_stop_of_its_way() -> None:
    assert set(c.WORKER_REPORTS) < set(c.AGENT_REPORTS)
    assert set(c.WORKER_ORDERS) < set(c.AGENT_ORDERS)


def test_thousands_of_random_and_damaged_messages_are_read_or_refused() -> None:
    random, refused = Random(20261123), 0
    for number in range(FUZZED):
        kinds: Kinds[Any] = SETS[number % len(SETS)]
        message = message_of(random.choice(list(kinds)), random)
        if number % 2:
            message = declared_examples.spoiled(message, "type", random)
        try:
            again = declared.encode(kinds.decode(json.loads(json.dumps(message))))
        except wire.WireError:
            refused += 1
        else:
            assert again["type"] == message["type"]
    assert FUZZED / 4 < refused < FUZZED / 2


class Nowhere:
    """A connection that takes everything."""

    def __init__(self) -> None:
        self.transport = self

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, frame: bytes) -> None:
        wire.decode(frame[4:])

    def is_closing(self) -> bool:
        return False


def test_no_report_of_an_agent_breaks_a_coordinator(tmp_path: Path) -> None:
    """Declared fields may have any value; the job may end of it, the coordinator may not."""
    ends = ("cancel", "broken", "failed", "died", "leave")

    async def run() -> int:
        config = RuntimeConfig(name="a", nodes=2, workers_per_node=2, spares=1)
        coordinator, random = Coordinator.first(config, 0, tmp_path, 1), Random(20261124)
        agents: list[Any] = [Agent(Nowhere(), 0.0) for _ in range(3)]  # type: ignore[arg-type]
        coordinator.members.agents.update(enumerate(agents))
        known = {"peer": ["127.0.0.1", 1], "address": ["127.0.0.1", 2], "domain": ""}
        coordinator.members.members.update(dict.fromkeys(range(3), known))
        taken = 0
        for _ in range(3_000):
            message = message_of(random.choice(list(c.AGENT_REPORTS)), random)
            if message["type"] in ends:
                continue
            if "rank" in message:
                message["rank"] = random.choice([-1, 0, 1, 2, 3, message["rank"]])
            node = random.randrange(3)
            try:
                coordinator.take(node, agents[node], c.AGENT_REPORTS.decode(message))
            except wire.WireError:
                continue
            taken += 1
            if coordinator.ended.done():
                break
        coordinator.stop()
        coordinator.events.close()
        return taken

    assert asyncio.run(run()) > 0
