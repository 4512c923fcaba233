"""Declared kinds: what is read is what was sent, all else is refused by name, and the docs say what is declared."""

from __future__ import annotations

import functools
import json
import math
from random import Random
from typing import Annotated, Any, Literal

import declared_examples
import pytest
from pydantic import Field, ValidationError

from hyperpod_ext.runtime.ipc import declared
from hyperpod_ext.runtime.ipc.declared import Address, ByNumber, Bytes, Count, Declared, Kinds, Listed, Seconds
from hyperpod_ext.runtime.ipc.declared_table import table
from hyperpod_ext.runtime.ipc.messages import WireError


class Ping(Declared):
    """Now and then."""

    type: Literal["ping"] = "ping"


class Snapshot(Declared):
    rank: Count
    nbytes: Bytes


class Join(Declared):
    """A worker of the agent
    has joined | so far.
    """

    sender, reader = "agent", "coordinator"

    type: Literal["join"] = "join"
    rank: Annotated[Count, Field(description="Global rank.")]
    took_s: Seconds
    when_busy: Literal["wait", "skip"] = "wait"
    step: Count | None = None
    ranks: Listed[Count] = ()
    peers: ByNumber[Address] = {}
    held: Listed[Snapshot] = ()
    record: dict[str, Any] = {}


KINDS: Kinds[Ping | Join] = Kinds("message to the coordinator", "type", (Ping, Join))
JOIN = {
    "type": "join",
    "rank": 3,
    "took_s": 0.5,
    "when_busy": "skip",
    "step": None,
    "ranks": [1, 2],
    "peers": {"1": ["host", 80]},
    "held": [{"rank": 3, "nbytes": 1}],
    "record": {"extras": [1, None]},
}


def over_the_wire(message: Declared) -> dict[str, Any]:
    return json.loads(json.dumps(declared.encode(message)))


def test_what_is_read_is_what_was_sent() -> None:
    sent = Join(rank=3, took_s=1, peers={1: ("host", 80)}, ranks=(1, 2), held=(Snapshot(rank=0, nbytes=1),))
    assert KINDS.decode(over_the_wire(sent)) == sent
    assert over_the_wire(KINDS.decode(JOIN)) == JOIN


def test_free_form_fields_come_as_they_were() -> None:
    record = {"loss": math.inf, "text": "…", "none": None, "nested": [{"a": [1]}]}
    read = KINDS.decode(over_the_wire(Join(rank=0, took_s=0, record=record)))
    assert isinstance(read, Join)
    assert read.record == record


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rank": "3"}, "join: field `rank` should be a valid integer, not '3'"),
        ({"rank": True}, "join: field `rank` should be a valid integer, not True"),
        ({"rank": -1}, "join: field `rank` should be greater than or equal to 0, not -1"),
        ({"rank": 1 << 63}, "join: field `rank` should be less than 9223372036854775808, not 9223372036854775808"),
        ({"took_s": float("nan")}, "join: field `took_s` should be a finite number, not nan"),
        ({"took_s": 1e300}, "join: field `took_s` should be less than or equal to 1000000000, not 1e+300"),
        ({"when_busy": "x" * 99}, f"join: field `when_busy` should be 'wait' or 'skip', not '{'x' * 27}...{'x' * 28}'"),
        ({"ranks": "12"}, "join: field `ranks` should be a valid list, not '12'"),
        ({"ranks": [1, "2"]}, "join: field `ranks.1` should be a valid integer, not '2'"),
        ({"peers": {"one": ["host", 80]}}, "join: field `peers.one` should be a valid integer"),
        ({"peers": {"1": ["host"]}}, "join: field `peers.1.1` is missing"),
        ({"held": [{"rank": 1}]}, "join: field `held.0.nbytes` is missing"),
        ({"record": []}, "join: field `record` should be a valid object, not []"),
        (
            {"rank": functools.reduce(lambda inner, _: [inner], range(900), 0)},
            "join: field `rank` should be a valid integer",
        ),
        ({"world": 1}, "join: field `world` is unknown"),
        ({"type": "Join"}, "'Join' is no message to the coordinator"),
        ({"type": ["join"]}, "['join'] is no message to the coordinator"),
    ],
)
def test_a_wrong_field_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    with pytest.raises(WireError) as refused:
        KINDS.decode({**JOIN, **change})
    assert str(refused.value).startswith(told)


def test_a_missing_field_is_refused_by_name() -> None:
    with pytest.raises(WireError, match=r"^join: field `rank` is missing$"):
        KINDS.decode({name: value for name, value in JOIN.items() if name != "rank"})
    with pytest.raises(WireError, match=r"^None is no message to the coordinator$"):
        KINDS.decode({})


def test_a_sender_cannot_make_a_wrong_one_nor_change_a_right_one() -> None:
    with pytest.raises(ValidationError, match="rank"):
        Join(rank="3", took_s=0)
    with pytest.raises(ValidationError, match="frozen"):
        Snapshot(rank=1, nbytes=2).rank = 3


def test_each_side_s_first_message_tells_its_version() -> None:
    first = declared.with_version({"type": "ping"})
    assert declared.checked_version(first, "this agent", "node 4's agent") == {"type": "ping"}


@pytest.mark.parametrize(("theirs", "called"), [({"protocol": 99}, "99"), ({}, "none"), ({"protocol": "1"}, "'1'")])
def test_another_version_is_refused(theirs: dict[str, Any], called: str) -> None:
    with pytest.raises(WireError) as refused:
        declared.checked_version({"type": "ping", **theirs}, "this agent", "node 4's agent")
    assert str(refused.value) == (
        f"this agent speaks version {declared.PROTOCOL} of the job's protocol, node 4's agent version {called}: "
        "start all nodes from one image"
    )


def test_the_table_has_every_kind_and_field() -> None:
    ping, join = table(KINDS).splitlines()[2:]
    assert ping == "| `ping` | Now and then. | none |  |  |"
    assert join.startswith(
        "| `join` | A worker of the agent has joined \\| so far. | `rank` (integer): Global rank.<br>"
    )
    assert join.endswith(" | agent | coordinator |")
    for field in [
        "`took_s` (number, in s)",
        "`when_busy` (`wait` or `skip`, may be left out)",
        "`step` (integer or null, may be left out)",
        "`ranks` (list of integer, may be left out)",
        "`peers` (object of list: text, integer by integer, may be left out)",
        "`held` (list of object: `rank` (integer); `nbytes` (integer, in bytes), may be left out)",
        "`record` (object, may be left out)",
    ]:
        assert field in join


def test_the_table_of_requests_has_their_answers() -> None:
    head, _, ping, _ = table(KINDS, answer_of=lambda kind: Snapshot if kind is Ping else Ping).splitlines()
    assert head == "| name | meaning | fields | answer | from | to |"
    assert ping == "| `ping` | Now and then. | none | `rank` (integer)<br>`nbytes` (integer, in bytes) |  |  |"


@pytest.mark.parametrize("seed", range(20))
def test_random_examples_are_right_and_spoiled_ones_are_right_or_refused(seed: int) -> None:
    random, refused = Random(seed), 0
    for kind in (Ping, Join) * 20:
        message = over_the_wire(declared_examples.example(kind, random))
        assert over_the_wire(KINDS.decode(message)) == message
        try:
            KINDS.decode(declared_examples.spoiled(message, "type", random))
        except WireError:
            refused += 1
    assert refused > 10
