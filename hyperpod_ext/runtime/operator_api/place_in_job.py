"""Finds the node number of a pod in a running job. The operator's ranks do not determine the node number.

After a fault, the operator may assign ranks to pods in another order, but the nodes of the job keep their numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import Address, encode, name_of, read, with_version

_DIAL_S = 5.0
_AGAIN_S = 0.05
_ASKED = 8
"""Number of pods to ask first. A few pods suffice, because each agent of the job knows the coordinator's address."""


class JobSucceededError(Exception):
    """The job has already succeeded when this pod wants to join it."""


async def find_place(
    settings: NodeSettings, others: Sequence[Address], limit_s: float, goes_on: Callable[[], bool], *, faults: int = 0
) -> tuple[int, Address] | None:
    """Return this node's number in the running job and the coordinator's address; None if no pod is in a running job.

    The pods may be about to elect another coordinator, so they are asked repeatedly: for at most `limit_s` seconds, and
    while `goes_on` returns true. Before the first fault (`faults` is 0), only a few of the pods at the addresses
    `others` are asked. After a fault, many pods may be new, so all pods are asked before None is returned.

    Raises:
        JobSucceededError: a pod has reported that the job has succeeded.
        JobFailedError: a pod has refused this one, for example because of another version of the protocol.
    """
    deadline = time.monotonic() + limit_s
    asked = dict.fromkeys(others[:_ASKED])
    while True:
        found = await _ask_all(settings, asked)
        for place, answer in found.items():
            if answer is None or answer.node is None:
                continue
            begins = not answer.knows_job and (answer.node, place) == (settings.node, (settings.host, settings.port))
            return None if begins else (answer.node, place)
        if any(answer is not None and answer.succeeded for answer in found.values()):
            raise JobSucceededError
        known = [answer for answer in found.values() if answer is not None and answer.knows_job]
        if not goes_on() or time.monotonic() > deadline:
            return None
        if not known:
            more = others[len(asked) : 2 * len(asked)] if faults else ()
            if not more:
                return None
            asked |= dict.fromkeys(more)
            continue
        named = {answer.coordinator: None for answer in known if answer.coordinator is not None}
        if not named.keys() - asked.keys():
            await asyncio.sleep(_AGAIN_S)
        asked |= named


async def _ask_all(settings: NodeSettings, asked: Collection[Address]) -> dict[Address, c.FreeNumber | None]:
    """Ask the agents at these addresses. Return the answers as soon as one answer has a node number or a new
    coordinator's address.

    Agents on lost machines may not answer for seconds, so there is no wait for all answers."""
    asking = {asyncio.create_task(_ask(settings, place)): place for place in asked}
    found: dict[Address, c.FreeNumber | None] = {}

    def is_enough() -> bool:
        answers = [answer for answer in found.values() if answer is not None]
        return any(one.node is not None or (one.coordinator and one.coordinator not in asked) for one in answers)

    try:
        while asking and not is_enough():
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            found |= {asking.pop(task): task.result() for task in done}
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return {place: found[place] for place in asked if place in found}


async def _ask(settings: NodeSettings, place: Address) -> c.FreeNumber | None:
    """Ask the agent at `place` for this node's number. Returns None if no agent of the job answers at `place`."""
    question = c.AskNumber(wanted=settings.node, listens=settings.listen)
    try:
        async with asyncio.timeout(_DIAL_S):
            reader, writer = await wire.dial(*place, settings.secret, encrypted=settings.config.encrypted)
            try:
                writer.write(wire.encode(with_version(encode(question))))
                answer = await wire.read(reader)
            finally:
                writer.close()
    except OSError:
        return None
    if answer is None:
        return None
    if answer.get("type") == name_of(c.StopNode, "type"):
        refusal = read(c.StopNode, answer, "answer")
        raise JobFailedError(f"the agent at {place[0]} refused this agent: {refusal.why}", hint=refusal.hint)
    return read(c.FreeNumber, answer, "answer")
