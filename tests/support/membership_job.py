"""A membership whose ranks and nodes do as they are asked: by calls, or by the lines of a scenario.

`new` makes a job whose ranks have yet to join, `job` one that trains. The lines after it are messages (`node-lost 1
gone`), words of `Job` (`join 0-3 live=5`, `begin`, `stop`), or `show NAME`. The actions that follow come after `->`.
Fields of a message stand in their order or by name; generation and attempt by name, else they are the current ones.
`0-3` stands for several, `9@1` for step 9 of generation 1.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import fields
from enum import Enum
from inspect import signature
from operator import attrgetter
from typing import Any

from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.node_states import NodeState
from hyperpod_ext.runtime.membership.rank_assignment import Scale
from hyperpod_ext.runtime.snapshot.select import Decision, Offer

LIVE_STEP = 7
_WIDTH = 118
_EMPTY: tuple[Any, ...] = ("", [])


class Job:
    """`nodes` with `each` ranks. `sizes`: numbers of nodes that it may have. `budgets`: see `Budgets`."""

    def __init__(
        self,
        nodes: int = 2,
        each: int = 1,
        sizes: Any = (),
        spares: int = 0,
        durable: bool = False,
        continues: bool = False,
        **budgets: int,
    ) -> None:
        scale = Scale(several(sizes), each) if sizes else None
        self._setting: dict[str, Any] = {
            "budgets": Budgets(**{"max_restarts": 10, **budgets}),
            "durable": durable,
            "scale": scale,
            "reserve": spares,
            "continues": continues,
        }
        self.membership = Membership({rank: rank // each for rank in range(nodes * each)}, **self._setting)
        for spare in range(nodes, nodes + spares):
            self.say("node-came", spare)

    def say(self, word: str, *given: Any, **named: Any) -> list[m.Action]:
        """One message, by its word; one for each of several ranks or nodes."""
        names = list(signature(_MESSAGES[word]).parameters)[1:]
        current = {name: getattr(self.membership, name) for name in ("generation", "attempt")}
        known = {name: value for name, value in {**_DEFAULTS, **current}.items() if name in names}
        plain = [name for name in names if name not in current or word == "node-reconnected"]
        actions = list[m.Action]()
        for first in several(given[0]) if given else (None,):
            values = dict(zip(plain, (first, *given[1:]), strict=False)) if given else {}
            actions += self._call(_MESSAGES[word], **{**known, **values, **named})
        return actions

    def _call(self, change: Callable[..., list[m.Action] | None], *given: Any, **named: Any) -> list[m.Action]:
        """Change the membership, and check what holds after each change."""
        membership = self.membership
        releases = change is not Membership.release_retained or "late" in named or membership.releases_at(**named)
        actions = change(membership, *given, **named) or []
        assert releases or not actions
        assert sorted(membership.nodes) == list(range(len(membership.nodes)))
        assert not membership.states.spares & set(membership.nodes.values())
        assert not (membership.unassigned and membership.states.spares) or membership.phase is m.JobPhase.ENDED
        if (change := membership.rescaling.change) is not None:
            assert not set(change.joining.items()) & set(membership.nodes.items())
            assert change.joining.keys() <= change.to.after.keys()
        return actions

    # --- words of a scenario ------------------------------------------------------------------------

    def join(self, ranks: Any = None, *, live: Any = None, held: Any = (), **more: Any) -> list[m.Action]:
        """Ranks wait for the generation. `live`: step of their state. `held`: steps in the memory of their node."""
        actions, nodes = [], self.membership.nodes
        for rank in several(ranks, nodes):
            offer = None if live is None else Offer("live", _step(live), rank, nodes[rank], self._save_id(live))
            actions += self._call(Membership.join, rank, offer, self._held(nodes[rank], held, **more))
        return actions

    def begin(self, live: Any = LIVE_STEP, *, committed: int = LIVE_STEP, sharing: str | None = None) -> list[m.Action]:
        """All ranks join, restore and go on, until they have committed this step."""
        actions = self.join(live=live)
        if actions and isinstance(actions[-1], m.AskDurable):
            actions += self.durable()
        actions += self.say("restored", list(self.membership.nodes))
        assert self.membership.phase is m.JobPhase.RUNNING
        self.committed(committed, sharing=sharing)
        return actions

    def stop(self) -> list[m.Action]:
        """Workers that are to join are ready, and all ranks stop after the step that they are asked for."""
        change, actions = self.membership.rescaling.change, list[m.Action]()
        assert change is not None
        for rank in sorted(change.joining.keys() - change.ready):
            actions += self.prepared(rank)
        ranks, number = list(self.membership.nodes), change.stop.number
        actions += self.say("stop-answered", ranks, number, True, LIVE_STEP + 1)
        return actions + self.say("stopped", ranks, number)

    def prepared(self, rank: int, cause: str = "") -> list[m.Action]:
        """A joining worker waits, or (`cause`) does not start."""
        return self._call(Membership.not_prepared, rank, cause) if cause else self._call(Membership.prepared, rank)

    def committed(self, step: int, *, sharing: str | None = None) -> list[m.Action]:
        """A rank has committed a step; `sharing`: it has begun its loop."""
        self.membership.sharing = self.membership.sharing if sharing is None else sharing
        return self._call(Membership.step_committed, step)

    def died(self, rank: int, step: int | None = None, *, generation: int | None = None, **more: Any) -> list[m.Action]:
        return self._fault(rank, step, generation, **{"cause": "SIGKILL", "kind": "signal", "died": True, **more})

    def raised(
        self, rank: int, step: int | None = None, cause: str = "ValueError: x", *, generation: int | None = None
    ) -> list[m.Action]:
        return self._fault(rank, step, generation, cause=cause, kind="exception", died=False)

    def _fault(self, rank: int, step: int | None, generation: int | None, **more: Any) -> list[m.Action]:
        at = self.membership.committed + 1 if step is None else step
        fault = m.Fault(rank, step=at, **more)
        return self._call(Membership.fault, fault, generation or self.membership.generation)

    def durable(
        self, steps: Any = (), *, generation: int = 0, problem: str = "", unreachable: str = ""
    ) -> list[m.Action]:
        """The durable tiers have checkpoints of these steps."""
        places = {"world_size": len(self.membership.nodes), "url": "s3://b/j", "folder": "f", "name": "s3"}
        stored = [Offer("durable", _step(one), -1, -1, self._save_id(one), **places) for one in several(steps)]
        problems, unknown = ((text,) if text else () for text in (problem or unreachable, unreachable))
        return self._call(Membership.durable_answered, stored, generation, problems, unknown)

    def decommissioned(self, nodes: Any, *, held: Any = (), **more: Any) -> list[m.Action]:
        """The workers of nodes have ended."""
        return [
            action
            for node in several(nodes)
            for action in self._call(Membership.decommissioned, node, self._held(node, held, **more))
        ]

    def revive(self, *, generation: int = 1, committed: int = 0) -> list[m.Action]:
        """Another coordinator goes on from the job state; nodes have heard of this generation and step."""
        data = json.loads(json.dumps(self.membership.to_json()))
        self.membership, actions = Membership.revived(data, generation=generation, committed=committed, **self._setting)
        return actions

    def show(self, *names: str) -> str:
        return "; ".join(f"{name} {_shown(_SHOWN.get(name, attrgetter(name))(self.membership))}" for name in names)

    def _save_id(self, step: Any) -> str:
        number, _, generation = str(step).partition("@")
        return f"g{generation or max(1, self.membership.generation - 1)}-s{number}"

    def _held(
        self, node: int, steps: Any, *, sharing: str = "shard", was: Any = None, world_size: int = 0
    ) -> list[Offer]:
        """A snapshot of each rank of the node, for each of these steps. `was`: earlier numbers of its ranks."""
        own = several(was, (rank for rank, its in self.membership.nodes.items() if its == node))
        more = {"sharing": sharing, "world_size": world_size}
        return [
            Offer("memory", _step(step), rank, node, self._save_id(step), f"own{rank}" * (sharing == "shard"), **more)
            for rank in own
            for step in several(steps)
        ]


def several(given: Any, default: Iterable[int] = ()) -> tuple[Any, ...]:
    """One value, or several of them."""
    if given is None:
        return tuple(default)
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _step(text: Any) -> int:
    return int(str(text).partition("@")[0])


_MESSAGES: dict[str, Callable[..., list[m.Action] | None]] = {
    "committed-by-all": Membership.release_retained,
    "finished": Membership.finished,
    "hold": Membership.hold,
    "leave": Membership.leave,
    "move": Membership.move,
    "no-node-came": Membership.no_node_came,
    "node-came": Membership.node_came,
    "node-lost": Membership.node_lost,
    "node-reconnected": Membership.meet_again,
    "nodes-released": Membership.reconcile,
    "resize": Membership.resize,
    "restored": Membership.restore_reported,
    "resume": Membership.resume,
    "stop-answered": Membership.stop_answered,
    "stopped": Membership.stopped,
    "waited-for-nodes": Membership.gave_up_waiting,
}
_DEFAULTS = {"digest": "", "error": "", "over": False}
_SHOWN = {
    "faults": lambda its: [f"{f.kind}/{f.level.value}{'/follows' * f.follows}" for f in its.faults],
    "states": lambda its: [f"{node} {its.states[node].value}" for node in sorted(its.states.those(*NodeState))],
    "missing": lambda its: its.missing(),
    "moves": lambda its: its.renumbering.moves,
}


# --- text -------------------------------------------------------------------------------------------


def play(scenario: str) -> str:
    """The scenario with the actions that follow from its lines now."""
    job, lines = Job(), []
    for number, line in enumerate(scenario.splitlines(), 1):
        said = line.partition(" -> ")[0].rstrip()
        if not said or line.startswith(("#", "  ->")):
            lines += [] if line.startswith("  ->") else [line]
            continue
        word, *words = shlex.split(said)
        named = {key: _value(text) for key, eq, text in (each.partition("=") for each in words) if eq}
        plain = [_value(each) for each in words if "=" not in each]
        if word in ("job", "new"):
            reached = {key: named.pop(key) for key in ("committed", "sharing") if key in named}
            job, found = Job(**named), []
            if word == "job":
                job.begin(live=None, **reached)
        else:
            try:
                found = _follow(job, word, plain, named)
            except Exception as error:
                error.add_note(f"line {number}: {line}")
                raise
        lines += _lines(said, found)
    return "\n".join(lines) + "\n"


def _lines(said: str, found: list[str]) -> list[str]:
    """The line and what follows from it; on further lines if it is too long."""
    whole = f"{said} -> {'; '.join(found)}".rstrip() if found else said
    if len(whole) <= _WIDTH:
        return [whole]
    lines = [f"  -> {found[0]}"]
    for each in found[1:]:
        if len(lines[-1]) + len(each) + 2 <= _WIDTH:
            lines[-1] += f"; {each}"
        else:
            lines.append(f"  -> {each}")
    return [said, *lines]


def _follow(job: Job, word: str, plain: list[Any], named: dict[str, Any]) -> list[str]:
    if word == "show":
        return [job.show(*plain)]
    said = getattr(job, word)(*plain, **named) if hasattr(Job, word) else job.say(word, *plain, **named)
    return [_action(action) for action in said]


def _value(text: str) -> Any:
    if "," in text:
        return tuple(_value(each) for each in text.split(",") if each)
    if re.fullmatch(r"\d+-\d+", text):
        first, last = map(int, text.split("-"))
        return tuple(range(first, last + 1))
    return {"yes": True, "no": False, "none": None}.get(text, int(text) if re.fullmatch(r"-?\d+", text) else text)


def _action(action: m.Action) -> str:
    if isinstance(action, m.Log):
        return " ".join(
            [action.event, *(f"{key}={_shown(value)}" for key, value in action.fields.items() if value not in _EMPTY)]
        )
    if isinstance(action, m.Fail):
        return " | ".join([f"fail {action.code}", action.message, action.hint]).removesuffix(" | ")
    word = re.sub(r"(?<=.)(?=[A-Z])", "-", type(action).__name__).lower()
    values = [getattr(action, field.name) for field in fields(action)]
    return " ".join([word, *(_shown(value) for value in values if value is not False)])


def _shown(value: Any) -> str:
    if isinstance(value, Decision):
        sources = [value.source(rank).name for rank in sorted(value.sources)]
        return f"{value.step} {sources[0] if len(set(sources)) == 1 else _shown(sources)}"
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}:{_shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + " ".join(_shown(each) for each in (sorted(value) if isinstance(value, set) else value)) + "]"
    return str(value.value) if isinstance(value, Enum) else str(value)
