"""An agent's line to whoever coordinates: beats on it, and another coordinator when this one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.election import ElectionListener
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode, with_version
from hyperpod_ext.runtime.membership.job_state_changes import chained, changed
from hyperpod_ext.runtime.membership.quorum import candidates, may_take_over

_SEARCH = 0.9
"""Share of the lease after which a node gives up looking for a majority."""
_HOLD = 0.97
"""Share of the lease after which it gives up waiting for the one that it wants to coordinate, which may have begun to
look a little later; the rest is for ending its processes."""
_DIAL = 1 / 6
"""Share of the lease that another node has to answer a connection."""
_NEXT_DIAL = 1 / 60
"""Share of the lease after which the next candidate is dialled beside one that has not answered yet."""
_DIAL_FORMER = 1 / 24
"""Share of the lease that the coordinator that was lost has to answer, where it is asked whether it is back."""
_COME_AGAIN_S = 0.05
"""How soon a coordinator is tried again that has gone without a word."""
_TRIES = 3
"""Handshakes that must fail in the same way before a node gives up: one may have been damaged on its way."""
_SAME_JOB = "All nodes of a job need the same secret (HPX_SECRET_FILE), the same network.tls and the same endpoint."
_UNACKNOWLEDGED = 10_000
"""Events that are kept to be told once more."""


class ExcludedError(JobFailedError):
    """This node must stop: others may go on without it, and it cannot know."""


class CoordinatorClient:
    """Messages to and from the coordinator, wherever it is.

    Args:
        election: where other agents reach this one.
        handshake: what a coordinator must be told first; takes the id of this agent, the term that it knows, and the
            job state, if it has that.
        take_over: makes this node's agent the coordinator, from the newest job state, what others said, and which nodes
            are gone for good.
    """

    def __init__(
        self,
        settings: NodeSettings,
        election: ElectionListener,
        handshake: Callable[[str, int, wire.Message | None], c.AgentHandshake],
        take_over: Callable[[c.AgentHandshake, list[c.AgentHandshake], frozenset[int]], None],
    ) -> None:
        self._settings, self._election, self._handshake, self._take_over = settings, election, handshake, take_over
        self._lease_s = settings.config.restart.lease_s
        self._id = secrets.token_hex(8)
        self.job_state: wire.Message | None = None
        """What the coordinator knows, as it told last: enough to take its place. Only a few agents have it."""
        self._digest = ""
        """Of the job state."""
        self.news: c.JobNews | None = None
        """What every agent knows of the job; None: it has not begun."""
        self._leader = -1
        """Who coordinates, or did until it was lost. The next one is known before it has sent its news."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard_at = time.monotonic()
        self._unheard: deque[c.Event] = deque(maxlen=_UNACKNOWLEDGED)
        self._heard = 0
        self._beating: asyncio.Task[None] | None = None
        self._over = False
        self._where: tuple[Callable[[], tuple[str, int]], Callable[[], str]] | None = None
        """Where the coordinator is, and why not to wait for it."""
        self._unanswered_since: float | None = None
        """When a coordinator went for the first time that had not said a word."""
        self._confirmed = False
        """Whether the other end is known to coordinate; until then it is told nothing but who we are."""
        self.waits_for = ""
        """What keeps this node from going on, in words: its coordinator is lost, and there is no other yet."""
        self._lost: frozenset[int] = frozenset()
        """Nodes whose agents are gone for good, the coordinator's among them: somebody outside of the job has told."""
        self._may_return = True
        """Whether this node may go back to its former coordinator: no other node still counts its vote. Else two
        coordinators might act with it."""
        self._given_up = False
        """Whether this node has cut the connection itself: its coordinator was silent, or is known to be gone."""
        self._looking: asyncio.Future[None] | None = None
        self._unsaid: list[c.FromAgent] = []
        """What has happened since the handshake, which does not say it; sent once the other end coordinates."""

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def has_coordinator(self) -> bool:
        """Whether one is there that is known to coordinate."""
        return self._writer is not None and self._confirmed

    async def connect(
        self, endpoint: Callable[[], tuple[str, int]], give_up: Callable[[], str], limit_s: float | None = None
    ) -> None:
        """Reach the first coordinator, which may start later than this node.

        Args:
            limit_s: how long it may take; None: as long as a node may take to join.

        Raises:
            JobFailedError: it does not come in time, or `give_up` says why not to wait for it.
        """
        self._where = endpoint, give_up
        deadline = time.monotonic() + (self._settings.join_timeout_s if limit_s is None else limit_s)
        refusals = 0
        while True:
            host, port = endpoint()
            try:
                self._take_line(await self._dial(host, port, self._settings.join_timeout_s))
                return
            except OSError as error:
                if why := give_up():
                    raise JobFailedError(f"node {self._settings.node}: {why}") from error
                refusals = refusals + 1 if isinstance(error, wire.WireError) else 0
                if refusals == _TRIES:
                    why = f"node {self._settings.node} is not of the job whose coordinator is at {host}:{port}: {error}"
                    raise JobFailedError(why, hint=_SAME_JOB) from error
                if time.monotonic() > deadline:
                    raise JobFailedError(f"no coordinator at {host}:{port}: {error}") from error
                await asyncio.sleep(0.1)

    @property
    def own_address(self) -> str:
        """Address of this node, as the coordinator sees it."""
        assert self._writer is not None
        return str(self._writer.get_extra_info("sockname")[0])

    def send_handshake(self) -> None:
        """Say who this node is, and what it has to say once more; from here on heartbeats are sent."""
        assert self._writer is not None
        self._introduce(self._writer)
        self._confirm()
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())

    def _confirm(self) -> None:
        assert self._writer is not None
        self._lost, self.waits_for, self._given_up = frozenset(), "", False
        self._confirmed, self._heard_at, self._heard = True, time.monotonic(), 0
        unsaid: list[c.FromAgent] = [*self._unheard, *self._unsaid]
        for report in unsaid:
            self._writer.write(wire.encode(encode(report)))
        self._unsaid.clear()

    def send(self, report: c.FromAgent) -> None:
        """Send to the coordinator. While disconnected, events are buffered and other messages dropped; the next
        handshake carries the full state instead. What comes between a handshake and its answer is sent after that: a
        vote may wait for seconds, and a worker may die meanwhile."""
        if isinstance(report, c.Event):
            self._unheard.append(report)
        elif self._writer is not None and not self._confirmed:
            self._unsaid.append(report)
        if self._writer is not None and self._confirmed and not self._writer.is_closing():
            self._writer.write(wire.encode(encode(report)))

    async def next(self) -> c.ToAgent | None:
        """Next order; None when the coordinator is gone before the job began.

        Raises:
            ExcludedError: this node has to stop.
        """
        while True:
            message = await self._read()
            if message is None:
                if self._over:
                    return None
                self._hang_up()
                if self.news is None:
                    if not await self._come_again():
                        return None
                    continue
                message = await self._look_for_another(self.news)
            match message:
                case c.Heard(heard=heard):
                    while self._heard < heard and self._unheard:
                        self._unheard.popleft()
                        self._heard += 1
                    continue
                case c.EndJob():
                    self._over = True
                case c.StopNode(why=why, hint=hint):
                    raise ExcludedError(f"node {self._settings.node} stops: {why}", hint=hint)
                case c.JobState(job_state=job_state, digest=digest):
                    self._has(job_state, digest)
                    continue
                case c.JobStateChange():
                    self._change(message)
                    continue
                case c.JobNews():
                    self.news, self._leader = message, message.coordinator
                    self._election.let_go()
                    if self._settings.node not in message.candidates:
                        self.job_state = None
            return message

    async def _come_again(self) -> bool:
        """The coordinator has gone without a word: reach it, or the next one, within a lease; whether that worked."""
        now = time.monotonic()
        if self._unanswered_since is None:
            self._unanswered_since = now
        left = self._unanswered_since + self._lease_s - now
        if self._where is None or left <= 0:
            return False
        await asyncio.sleep(_COME_AGAIN_S)
        try:
            await self.connect(*self._where, limit_s=left)
        except JobFailedError:
            return False
        self.send_handshake()
        return True

    def _has(self, job_state: wire.Message, digest: str) -> None:
        self.job_state, self._digest = job_state, digest
        self.send(c.Acknowledged(number=int(job_state["number"])))

    def _change(self, change: c.JobStateChange) -> None:
        """Change the job state; ask for it whole where it is not the one that the change was made to."""
        if self.job_state is None or (self._digest, chained(change.before, change.changes)) != (
            change.before,
            change.digest,
        ):
            self.send(c.AskJobState())
            return
        try:
            job_state = changed(self.job_state, change.changes)
        except (LookupError, TypeError) as error:
            sys.stderr.write(f"node {self._settings.node} cannot change the job state, and asks for it: {error!r}\n")
            self.send(c.AskJobState())
            return
        self._has(job_state | {"number": change.number}, change.digest)

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
        self._hang_up()

    def _introduce(self, writer: asyncio.StreamWriter) -> None:
        self._unsaid.clear()
        writer.write(wire.encode(with_version(encode(self._introduction()))))

    def _introduction(self) -> c.AgentHandshake:
        return self._handshake(self._id, self.news.term if self.news is not None else 0, self.job_state)

    async def _read(self) -> c.ToAgent | None:
        """Next message; one that is damaged is refused, and the next is read."""
        while self._reader is not None:
            try:
                if (message := await wire.read(self._reader)) is None:
                    return None
            except ConnectionError:
                return None
            try:
                return c.AGENT_ORDERS.decode(message)
            except wire.WireError as error:
                sys.stderr.write(f"node {self._settings.node} refused a message of the coordinator: {error}\n")
        return None

    def know_gone(self, hosts: Collection[str], *, replaced: bool) -> None:
        """Somebody outside of the job, whom it trusts, says that nodes at these addresses are none of its any more. So
        they need not be counted when it is asked who may coordinate, if the coordinator was one of them. It may be said
        again and again.

        Args:
            replaced: others are in their place, so they are lost; else they may be about to leave.
        """
        if self.news is None:
            return
        members = self.job_state["members"] if self.job_state is not None else {}
        leads = members.get(str(self._leader), {"address": self.news.candidates.get(self._leader, ("", 0))})
        if leads["address"][0] not in hosts and not self.waits_for:
            return  # before all members are gone through: each pod that looks for its place says where it is
        known = {**self.news.candidates, **{int(node): its["address"] for node, its in members.items()}}
        gone = frozenset(node for node, (host, _) in known.items() if host in hosts)
        # else the connection to whom this node votes for would be lost with each word
        is_news = self._confirmed or self._leader not in self._lost
        if self._leader in gone or (gone and replaced and self.waits_for):
            self._lost |= gone
            self._looking = asyncio.ensure_future(self._election.look_again())
        if self._leader in gone and replaced and is_news:
            self._given_up = True
            self.disconnect()

    def disconnect(self) -> None:
        """Lose the connection, as a network may."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _take_line(self, dialled: wire.Connection) -> None:
        """Speak on this one from now on. What comes counts when it comes: an order may take longer to be carried out
        than a coordinator may be silent."""
        reader, self._writer = dialled
        take = reader.feed_data

        def heard(data: Any) -> None:
            self._heard_at = time.monotonic()
            take(data)

        # of this connection's reader alone: asyncio has no other word for it that bytes came
        reader.feed_data = heard  # type: ignore[method-assign]
        self._reader = reader

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
        self._confirmed = False

    async def _beat(self) -> None:
        """Say that this node is there; a coordinator that was silent for half a lease is not."""
        every = self._lease_s / 6
        while True:
            before = time.monotonic()
            await asyncio.sleep(every)
            now = time.monotonic()
            if now - before > 2 * every:  # this process stood still: what came meanwhile has not been read yet
                self._heard_at = max(self._heard_at, now - self._lease_s / 4)
            if self._writer is None or not self._confirmed:
                continue
            if now - self._heard_at > self._lease_s / 2:
                self._given_up = True
                self._writer.transport.abort()  # whoever reads learns of it
                continue
            with contextlib.suppress(ConnectionError):
                self._writer.write(wire.encode(encode(c.Beat(clock=now))))

    async def _dial(self, host: str, port: int, timeout_s: float) -> wire.Connection:
        settings = self._settings
        async with asyncio.timeout(timeout_s):
            return await wire.dial(host, port, settings.secret, encrypted=settings.config.encrypted)

    # --- the coordinator is lost ----------------------------------------------------------------

    async def _look_for_another(self, news: c.JobNews) -> c.ToAgent:
        """First word of the next coordinator, which may be this node.

        Everybody goes to the lowest candidate that it can reach. Whoever so many come to coordinates; a node that
        finds no majority within its lease stops.
        """
        me, job_state = self._settings.node, self.job_state
        members = {int(node) for node in job_state["members"]} if job_state is not None else set[int]()
        silent = time.monotonic() - self._heard_at
        search_s = max(_SEARCH * self._lease_s - silent, self._lease_s / 4)
        if self._settings.listen is not None:  # no two sides can go on: it is told from outside who is lost
            search_s = max(search_s, self._settings.config.restart.node_wait_s)
        deadline = time.monotonic() + search_s
        reached: set[int] = {me}
        self.waits_for = f"the coordinator, node {news.coordinator}, is lost; this node looks for another"
        asks_first = self._settings.listen is not None
        self._may_return = True
        before, offers = self._before_me(news, job_state is not None)
        if not self._given_up and (word := await self._reconnect(news, deadline, reached)) is not None:
            return word
        while time.monotonic() < deadline:
            if asks_first and (word := await self._ask_former(news, deadline, reached)) is not None:
                return word
            asks_first = asks_first or offers
            if (word := await self._vote_for_lowest(news, before, deadline, reached)) is not None:
                return word
            if offers and (word := await self._offer_myself(members, deadline)) is not None:
                return word
            await asyncio.sleep(0.02)
        reached |= set(self._election.votes)
        self._hang_up()
        listed = f" ({_listed(members)})" if members else ""
        raise ExcludedError(
            f"node {me} stops: the coordinator, node {news.coordinator}, is lost, and of the {news.members} nodes"
            f"{listed} it reaches {_listed(reached)} only: no majority, so others may go on without it",
            hint="Three nodes or more, spares among them, survive the loss of any one of them."
            if members and not may_take_over(members, members - {news.coordinator})
            else "Look at the network between the nodes.",
        )

    async def _reconnect(self, news: c.JobNews, deadline: float, reached: set[int]) -> c.ToAgent | None:
        """First word of the coordinator over another connection: the former may have broken, and nothing else. None: it
        is gone, or takes this node no more."""
        address, me = news.candidates.get(news.coordinator), self._settings.node
        if address is None:
            return None
        for tries in itertools.count(1):
            if time.monotonic() > deadline or (tries > _TRIES and news.coordinator != me):
                break
            try:
                dialled = await self._dial(*address, self._lease_s * _DIAL_FORMER)
            except (ConnectionRefusedError, TimeoutError):
                break
            except OSError:
                await asyncio.sleep(0.02)
                continue
            ends = min(deadline, time.monotonic() + self._lease_s * _DIAL)
            word = await self._hear_from(news.coordinator, dialled, ends, reached)
            if word is not None:
                word = await self._followed(news, news.coordinator, word, deadline, reached)
                return word if self._settings.listen is not None else self._unless_refused(word)
        return None

    def _before_me(self, news: c.JobNews, has_state: bool) -> tuple[list[int], bool]:
        """Candidates that this node votes for rather than for itself, and whether it is one: who comes after it does
        not coordinate while this one lives."""
        others = candidates(news.candidates, news.coordinator)
        me = self._settings.node
        if me not in others:
            return others, False
        return (others[: others.index(me)], True) if has_state else ([node for node in others if node != me], False)

    async def _ask_former(self, news: c.JobNews, deadline: float, reached: set[int]) -> c.ToAgent | None:
        """First word of the coordinator that this node has lost, if it is there after all.

        It may have stood still, or have been cut off, too shortly for the others to agree on another. The node that
        others vote for asks it, and tells its voters. Where somebody outside says who is lost, every node asks, and
        first: nothing else ends its search, and a coordinator that has given the node up says so.
        """
        address = news.candidates.get(news.coordinator)
        waits_for_orders = self._settings.listen is not None
        if address is None or not (self._may_return or waits_for_orders):
            return None
        limit_s = self._lease_s * (_DIAL if waits_for_orders else _DIAL_FORMER)
        word = await self._ask(address, news.coordinator, limit_s, deadline, reached)
        word = await self._followed(news, news.coordinator, word, deadline, reached)
        return word if waits_for_orders else self._unless_refused(word)

    def _unless_refused(self, word: c.ToAgent | None) -> c.ToAgent | None:
        """What a coordinator has said that this node has lost, unless it takes this node no more: others may."""
        if not isinstance(word, c.StopNode):
            return word
        self._hang_up()
        return None

    async def _ask(
        self, address: tuple[str, int], node: int, limit_s: float, deadline: float, reached: set[int]
    ) -> c.ToAgent | None:
        """First word of `node`, which may coordinate already."""
        ends = min(deadline, time.monotonic() + self._lease_s * _DIAL)
        try:
            dialled = await self._dial(*address, min(limit_s, max(0.05, ends - time.monotonic())))
        except OSError:
            return None
        return await self._hear_from(node, dialled, ends, reached)

    def _vote_ends(self, deadline: float) -> float:
        """Until when a vote is held. Who looks for long looks again at who is there."""
        if self._settings.listen is None:
            return deadline + (_HOLD - _SEARCH) * self._lease_s
        return min(deadline, time.monotonic() + self._lease_s)

    async def _offer_myself(self, members: set[int], deadline: float) -> c.ToAgent | None:
        me, wait_s = self._settings.node, min(deadline - time.monotonic(), self._lease_s / 6)
        if me not in members or not await self._election.wait_for_majority(members, me, wait_s, lambda: self._lost):
            return None
        self._take_over(self._introduction(), list(self._election.votes.values()), self._lost)
        while time.monotonic() < deadline:
            try:
                self._take_line(await self._dial(*self._election.address, self._lease_s))
            except OSError:  # this connection broke; this node coordinates all the same
                await asyncio.sleep(0.02)
                continue
            self._leader = me
            self.send_handshake()
            if (word := await self._read()) is not None:
                return word
            self._hang_up()
        return None

    async def _vote_for_lowest(
        self, news: c.JobNews, nodes: list[int], deadline: float, reached: set[int]
    ) -> c.ToAgent | None:
        """First word, as coordinator, of the first of `nodes` that can be reached; None: none can, or it does not
        become it. Who can be reached is found out side by side: a whole rack of them may be gone.
        """
        limit_s = min(self._lease_s * _DIAL, max(0.05, deadline - time.monotonic()))
        dials: list[asyncio.Task[wire.Connection]] = []

        async def dial(node: int, before: Sequence[asyncio.Task[wire.Connection]]) -> wire.Connection:
            if before:
                await asyncio.wait({before[-1]}, timeout=self._lease_s * _NEXT_DIAL)
            if any(map(_has_connected, before)):
                raise OSError("one before it answers")
            return await self._dial(*news.candidates[node], limit_s)

        for node in nodes:
            dials.append(asyncio.create_task(dial(node, tuple(dials))))
        try:
            for node, dialling in zip(nodes, dials, strict=True):
                try:
                    dialled = await dialling
                except OSError:
                    continue
                dials.remove(dialling)
                _leave_all(dials)
                return await self._vote_for(news, node, dialled, deadline, reached)
        finally:
            _leave_all(dials)
        return None

    async def _vote_for(
        self, news: c.JobNews, node: int, dialled: wire.Connection, deadline: float, reached: set[int]
    ) -> c.ToAgent | None:
        """First word of `node` as coordinator, or of another that it knows of; None where neither comes."""
        word = await self._hear_from(node, dialled, self._vote_ends(deadline), reached)
        self._may_return &= word is not None  # else it may take this one's vote for one that holds
        return await self._followed(news, node, word, deadline, reached)

    async def _followed(
        self, news: c.JobNews, node: int, word: c.ToAgent | None, deadline: float, reached: set[int]
    ) -> c.ToAgent | None:
        """What `node` has said as coordinator; where it goes by another, what that one says."""
        if not _goes_by_another(word, node):
            return word
        self._hang_up()
        address, is_former = word.candidates.get(word.coordinator), word.term == news.term
        if address is None or word.term < news.term or (is_former and not self._may_return):
            return None
        node = word.coordinator
        answer = await self._ask(address, node, self._lease_s * _DIAL, deadline, reached)
        if _goes_by_another(answer, node):
            self._hang_up()
            return None
        return self._unless_refused(answer) if is_former else answer

    async def _hear_from(
        self, node: int, dialled: wire.Connection, until: float, reached: set[int]
    ) -> c.ToAgent | None:
        """Say who this node is; first word of the answer, None where none comes until then."""
        self._take_line(dialled)
        reached.add(node)
        self._introduce(dialled[1])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.05, until - time.monotonic())):
                if (word := await self._read()) is not None:
                    if not _goes_by_another(word, node):
                        self._leader = node
                        self._confirm()
                    return word
        self._hang_up()
        return None


def _goes_by_another(word: c.ToAgent | None, node: int) -> TypeGuard[c.JobNews]:
    """Whether `node` has said that another coordinates."""
    return isinstance(word, c.JobNews) and word.coordinator != node


def _leave_all(dials: list[asyncio.Task[wire.Connection]]) -> None:
    """End dials that nobody waits for; what has connected is closed."""
    for dialling in dials:
        dialling.add_done_callback(_close)
        dialling.cancel()
    dials.clear()


def _close(dialling: asyncio.Task[wire.Connection]) -> None:
    if _has_connected(dialling):
        dialling.result()[1].close()


def _has_connected(dialling: asyncio.Task[wire.Connection]) -> bool:
    return dialling.done() and not dialling.cancelled() and dialling.exception() is None


def _listed(nodes: set[int]) -> str:
    return ", ".join(str(node) for node in sorted(nodes))
