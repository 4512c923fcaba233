"""A membership whose ranks do what they are asked to."""

from __future__ import annotations

from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.snapshot.select import Offer

LIVE_STEP = 7


def begin(membership: Membership, *, live: bool = True) -> list[m.Action]:
    """Everybody joins, restores, and goes on."""
    commands = []
    for rank, node in membership.nodes.items():
        offer = Offer("live", LIVE_STEP, rank, node, f"g{membership.generation - 1}-s{LIVE_STEP}") if live else None
        commands += membership.join(rank, offer, [])
    for rank in membership.nodes:
        commands += membership.restore_reported(rank, membership.generation, membership.attempt, "")
    assert membership.phase is m.JobPhase.RUNNING
    membership.step_committed(LIVE_STEP)
    return commands


def kinds(commands: list[m.Action]) -> list[type]:
    return [type(command) for command in commands if not isinstance(command, m.Log)]


def logged(commands: list[m.Action], event: str) -> dict:
    (found,) = [command.fields for command in commands if isinstance(command, m.Log) and command.event == event]
    return dict(found)


def stop(membership: Membership, commands: list[m.Action]) -> list[m.Action]:
    """All can stop where they are asked to, and do."""
    (asked,) = [command for command in commands if isinstance(command, m.AskStop)]
    ranks = list(membership.nodes)
    answers = [membership.stop_answered(rank, asked.number, True, asked.step - 1, False) for rank in ranks]
    assert answers[:-1] == [[]] * (len(ranks) - 1)
    assert answers[-1] == [m.StopAt(asked.number)]
    return [command for rank in ranks for command in membership.stopped(rank, asked.number)]
