"""Cases of one or two processes of a local job that are killed: which, where the job is then, and in which order.

All cases of one kill, and pairs drawn by a seed. Pure.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from endings_table import Ending

PLACES = ("at start-up", "in a step", "in a save", "in a recovery", "in a resize", "at the end")
COUNT = 300
OF_NODE = ("agent", "memory server", "fork server")
"""Whose end is that of its node."""
Order = Literal["", "at once", "then"]


class Victim(NamedTuple):
    """One process."""

    what: str
    number: int = 0
    """Its rank or node."""
    how: str = "`kill -9`"

    def __str__(self) -> str:
        numbered = f" {self.number}" if self.what in ("rank", "agent", "memory server", "fork server") else ""
        return f"{self.what}{numbered}" + ("" if self.how == "`kill -9`" else f" {self.how}")


class Case(NamedTuple):
    """One job, and what is killed of it."""

    where: str
    victims: tuple[Victim, ...]
    order: Order = ""
    """Of two: at once, or the second when the job has noticed the first."""

    def __str__(self) -> str:
        return f"{self.where}: {f' {self.order} '.join(map(str, self.victims))}"


class Expected(NamedTuple):
    """One way in which a case may end."""

    state: str
    code: int
    words: str = ""
    """What the last word has, where the job does not succeed."""

    def is_told_by(self, word: str) -> bool:
        """A number at their end is a whole one: `node 1` is not in `node 12`."""
        return re.search(re.escape(self.words) + (r"\b" if self.words[-1:].isdigit() else ""), word) is not None


def victims(where: str) -> list[Victim]:
    """Who can be killed there. In a resize the second node is about to end, and there is no spare; at the end the
    second rank has ended."""
    nodes = (0,) if where == "in a resize" else (0, 1, 2)
    ranks = (0,) if where in ("in a resize", "at the end") else (0, 1)
    found = [Victim("rank", rank) for rank in ranks]
    found += [Victim("agent", node) for node in (nodes if len(nodes) > 1 else (0, 1))]
    found += [Victim(what, node) for what in ("memory server", "fork server") for node in nodes]
    found += [Victim("engine"), Victim("keeper")]
    return found + [Victim("terminal", how=how) for how in ("`kill -9`", "Ctrl-C", "SIGTERM", "closed")]


def singles() -> list[Case]:
    return [Case(where, (victim,)) for where in PLACES for victim in victims(where)]


def pairs() -> list[Case]:
    return [
        Case(where, pair, order)
        for where in PLACES
        for pair in itertools.permutations(victims(where), 2)
        for order in ("at once", "then")
        if pair[0].what != "terminal" or pair[1].what != "terminal"
    ]


def drawn(seed: int = 0) -> list[Case]:
    """`COUNT` of them, in an order of their own."""
    draw = random.Random(seed)
    cases = singles()
    cases += draw.sample(pairs(), COUNT - len(cases))
    draw.shuffle(cases)
    return cases


def lost_nodes(case: Case) -> list[int]:
    """Nodes that end with what is killed, the first one first."""
    return list(dict.fromkeys(victim.number for victim in case.victims if victim.what in OF_NODE))


def quickest_first(cases: Sequence[Case], count: int) -> list[Case]:
    """With `count` of those in front that wait for no lease, and share one undisturbed job.

    Where two nodes are lost, the third looks for a majority as long as its lease goes: nobody can tell it that there
    is none.
    """
    first = [case for case in cases if len(lost_nodes(case)) < 2 and case.where != "in a resize"][:count]
    return [*first, *(case for case in cases if case not in first)]


def alone(where: str, victim: Victim, table: Sequence[Ending]) -> Expected:
    """What the table says of one kill. Of ranks the other table says that training goes on until it is done."""
    if victim.what == "rank":
        after = Expected("failed", 7, "killed by SIGKILL (9) after its training was done")
        return after if where == "at the end" else Expected("succeeded", 0)
    if victim == Victim("agent", 2):  # of the spare
        return Expected("succeeded", 0)
    what = "coordinator" if victim == Victim("agent", 0) else victim.what
    found = [row for row in table if (row.what, row.how) == (what, victim.how)]
    row = next((row for row in found if row.where == where), found[0])  # of a terminal it is the same everywhere
    return Expected(row.state, row.exit_code, row.last_word)


def steps_lost_at_most(case: Case) -> int:
    """In a recovery from the death of a rank, copies of the newest step that had not arrived elsewhere are refused, as
    they are of the generation before. A node that is lost then, too, takes that step with it, and it is made again.
    """
    return int(case.where == "in a recovery" and any(victim.what in OF_NODE for victim in case.victims))


def expected(case: Case, table: Sequence[Ending]) -> list[Expected]:
    """How it may end.

    Of two, each ending of the job that one of them would bring alone may be the first. Where the job goes on after
    each, it goes on after both; but where two of its three nodes are lost, those that are left may be no majority, or
    hold no step of all ranks. Then the node that was lost first is the cause.
    """
    ends = [one for one in (alone(case.where, each, table) for each in case.victims) if one.state != "succeeded"]
    if {victim.what for victim in case.victims} == {"engine", "keeper"}:  # the next command finds that nobody is left
        ends.append(Expected("failed", 7, "the job's engine was killed before the job ended"))
    if any(one.state == "cancelled" for one in ends):  # and the command is on its way out
        ends += [one._replace(code=130) for one in ends if one.state == "failed"]
    if ends:
        return ends
    lost = lost_nodes(case)
    if len(lost) < 2:
        return [Expected("succeeded", 0)]
    nodes = lost[:1] if case.order == "then" else lost
    return [Expected("succeeded", 0), *(Expected("failed", 7, f"node {node}") for node in nodes)]
