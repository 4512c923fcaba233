"""An agent's connection to the coordinator, and the search for another coordinator after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.election import ElectionListener
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import Address, encode, with_version
from hyperpod_ext.runtime.membership.job_state_changes import chained, changed
from hyperpod_ext.runtime.membership.quorum import candidates, may_take_over

_SEARCH = 0.9
"""Share of the lease in which a candidate must find a majority."""
_HOLD = 0.97
"""Share of the lease after which a voter stops waiting, longer than `_SEARCH` because the candidate may have begun its
search later. The rest of the lease is for ending processes."""
_DIAL = 1 / 6
"""Share of the lease within which a connection to another node must succeed."""
_NEXT_DIAL = 1 / 60
"""Share of the lease between the starts of two connection attempts."""
_DIAL_FORMER = 1 / 24
"""Share of the lease within which a connection to the lost coordinator must succeed."""
_CONNECT_AGAIN_S = 0.05
"""Seconds to wait before dialling a coordinator again that closed the connection without a message."""
_TRIES = 3
"""Number of failed handshakes in a row after which a node gives up. One failure may be damage in transit."""
_SAME_JOB = "All nodes of a job need the same secret (HPX_SECRET_FILE), the same network.tls and the same endpoint."
_UNACKNOWLEDGED = 10_000
"""Most unacknowledged events that are kept for sending again."""


class ExcludedError(JobFailedError):
    """This node must stop, because other nodes may continue without it."""


@dataclass(frozen=True, slots=True)
class _Search:
    """A search for another coordinator."""

    news: c.JobNews
    """Newest job news from the lost coordinator."""
    deadline: float
    reached: set[int]
    """Nodes to which this node could connect."""

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


class CoordinatorClient:
    """Exchanges messages with the coordinator, which runs on this node or another.

    Args:
        election: this node's listener for other agents.
        handshake: makes the first message to a coordinator, from this agent's id, newest term and job state.
        take_over: makes this node's agent the coordinator, from its own handshake, its voters' handshakes, and the
            nodes
            that are gone for good.
    """

    def __init__(
        self,
        settings: NodeSettings,
        election: ElectionListener,
        handshake: Callable[[str, int, wire.Message | None], c.AgentHandshake],
        take_over: Callable[[c.AgentHandshake, list[c.AgentHandshake], frozenset[int]], None],
    ) -> None:
        self._settings, self._election, self._handshake, self._take_over = settings, election, handshake, take_over
        election.client = self
        self._lease_s = settings.config.restart.lease_s
        self._id = secrets.token_hex(8)
        self.job_state: wire.Message | None = None
        """The job state from which this agent could coordinate; None if this node is no candidate."""
        self._digest = ""
        """Digest of the job state."""
        self.news: c.JobNews | None = None
        """Newest job news; None before the job has begun."""
        self._leader = -1
        """Node of the current or lost coordinator. A new coordinator's node is set before its news arrive."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard_at = self._data_at = time.monotonic()
        self._unacknowledged: deque[c.Event] = deque(maxlen=_UNACKNOWLEDGED)
        self._acknowledged = 0
        self._beating: asyncio.Task[None] | None = None
        self._over = False
        self._connect_arguments: tuple[Callable[[], tuple[str, int]], Callable[[], str]] | None = None
        """Arguments of the last call of `connect`, used to connect again."""
        self._unanswered_since: float | None = None
        """Since when coordinators have closed the connection without a message; None if they answer."""
        self._confirmed = False
        """Whether the connected node is known to coordinate. Until then only the handshake is sent."""
        self.waits_for = ""
        """Why this node waits, as a sentence, while the coordinator is lost and no other is found; else empty."""
        self._lost: frozenset[int] = frozenset()
        """Nodes that are gone for good according to the operator, including the coordinator's node."""
        self._may_return = True
        """Whether this node may return to the lost coordinator. The node may not return while another node may still
        count its vote, because then the job could have two coordinators."""
        self.given_up = False
        """Whether this node closed the connection because its coordinator was silent or gone."""
        self._counting: asyncio.Future[None] | None = None
        self._unsent: list[c.FromAgent] = []
        """Reports since the handshake; they are sent once the connected node coordinates."""

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def has_coordinator(self) -> bool:
        """Whether the connected node coordinates."""
        return self._writer is not None and self._confirmed

    def heard_since(self, moment: float) -> bool:
        """Return whether the coordinator has sent anything since `moment`, a reading of `time.monotonic()`."""
        return self._data_at > moment

    async def connect(
        self, endpoint: Callable[[], tuple[str, int]], give_up: Callable[[], str], limit_s: float | None = None
    ) -> None:
        """Connect to the first coordinator, which may start later than this node.

        Args:
            give_up: returns a reason to stop waiting; empty to keep waiting.
            limit_s: time limit, in seconds; None for the time limit for a node to join.

        Raises:
            JobFailedError: the coordinator did not start in time, or `give_up` returned a reason.
        """
        self._connect_arguments = endpoint, give_up
        deadline = time.monotonic() + (self._settings.join_timeout_s if limit_s is None else limit_s)
        refusals = 0
        while True:
            host, port = endpoint()
            try:
                self._use(await self._dial(host, port, self._settings.join_timeout_s))
                return
            except OSError as error:
                if why := give_up():
                    raise JobFailedError(f"node {self._settings.node}: {why}") from error
                refusals = refusals + 1 if isinstance(error, wire.WireError) else 0
                if refusals == _TRIES:
                    why = f"node {self._settings.node} cannot join the job of the coordinator at {host}:{port}: {error}"
                    raise JobFailedError(why, hint=_SAME_JOB) from error
                if time.monotonic() > deadline:
                    raise JobFailedError(f"no coordinator at {host}:{port}: {error}") from error
                await asyncio.sleep(0.1)

    @property
    def own_address(self) -> str:
        """This node's address in its connection to the coordinator."""
        assert self._writer is not None
        return str(self._writer.get_extra_info("sockname")[0])

    def send_handshake(self) -> None:
        """Send the handshake and all unacknowledged events, and send heartbeats from now on."""
        assert self._writer is not None
        self._send_own_handshake(self._writer)
        self._confirm()
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())

    def _confirm(self) -> None:
        assert self._writer is not None
        self._lost, self.waits_for, self.given_up = frozenset(), "", False
        self._confirmed, self._heard_at, self._acknowledged = True, time.monotonic(), 0
        unsent: list[c.FromAgent] = [*self._unacknowledged, *self._unsent]
        for report in unsent:
            self._writer.write(wire.encode(encode(report)))
        self._unsent.clear()

    def send(self, report: c.FromAgent) -> None:
        """Send a report to the coordinator.

        While disconnected, events are buffered and other messages dropped, because the next handshake has the full
        state.
        Messages between a handshake and its answer are sent after the answer: a vote may wait for seconds, and a worker
        may die meanwhile.
        """
        if isinstance(report, c.Event):
            self._unacknowledged.append(report)
        elif self._writer is not None and not self._confirmed:
            self._unsent.append(report)
        if self._writer is not None and self._confirmed and not self._writer.is_closing():
            self._writer.write(wire.encode(encode(report)))

    async def next(self) -> c.ToAgent | None:
        """Return the next order. None if the job has ended, or if the coordinator is lost before the job began.

        Raises:
            ExcludedError: this node must stop.
        """
        while True:
            message = await self._read()
            if message is None:
                if self._over:
                    return None
                self._close_connection()
                if self.news is None:
                    if not await self._connect_again():
                        return None
                    continue
                message = await self._look_for_another(self.news)
            match message:
                case c.Heard(heard=heard):
                    while self._acknowledged < heard and self._unacknowledged:
                        self._unacknowledged.popleft()
                        self._acknowledged += 1
                    continue
                case c.EndJob():
                    self._over = True
                case c.StopNode(why=why, hint=hint):
                    raise ExcludedError(f"node {self._settings.node} stops: {why}", hint=hint)
                case c.JobState(job_state=job_state, digest=digest):
                    self._store_job_state(job_state, digest)
                    continue
                case c.JobStateChange():
                    self._change(message)
                    continue
                case c.JobNews():
                    self.news, self._leader = message, message.coordinator
                    self._election.release_voters()
                    if self._settings.node not in message.candidates:
                        self.job_state = None
            return message

    async def _connect_again(self) -> bool:
        """Connect again, within one lease, after a coordinator closed the connection without a message."""
        now = time.monotonic()
        if self._unanswered_since is None:
            self._unanswered_since = now
        left = self._unanswered_since + self._lease_s - now
        if self._connect_arguments is None or left <= 0:
            return False
        await asyncio.sleep(_CONNECT_AGAIN_S)
        try:
            await self.connect(*self._connect_arguments, limit_s=left)
        except JobFailedError:
            return False
        self.send_handshake()
        return True

    def _store_job_state(self, job_state: wire.Message, digest: str) -> None:
        self.job_state, self._digest = job_state, digest
        self.send(c.Acknowledged(number=int(job_state["number"])))

    def _change(self, change: c.JobStateChange) -> None:
        """Apply a change of the job state. If the change is based on another state than this node's, request the full
        state."""
        if self.job_state is None or (self._digest, chained(change.before, change.changes)) != (
            change.before,
            change.digest,
        ):
            self.send(c.AskJobState())
            return
        try:
            job_state = changed(self.job_state, change.changes)
        except (LookupError, TypeError) as error:
            why = f"cannot apply a change of the job state, and requests the full state: {error!r}"
            sys.stderr.write(f"node {self._settings.node} {why}\n")
            self.send(c.AskJobState())
            return
        self._store_job_state(job_state | {"number": change.number}, change.digest)

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
        self._close_connection()

    def _send_own_handshake(self, writer: asyncio.StreamWriter) -> None:
        self._unsent.clear()
        writer.write(wire.encode(with_version(encode(self._own_handshake()))))

    def _own_handshake(self) -> c.AgentHandshake:
        return self._handshake(self._id, self.news.term if self.news is not None else 0, self.job_state)

    async def _read(self) -> c.ToAgent | None:
        """Return the next message, skipping malformed messages; None if the connection has ended."""
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
        """Record that the nodes at these hosts are gone for good, according to the operator. If the coordinator's node
        is among them, these nodes do not count for a majority. May be called again.

        Args:
            replaced: whether other nodes have replaced these nodes, so that they are lost. Otherwise they may still be
                about
                to leave.
        """
        if self.news is None:
            return
        members = self.job_state["members"] if self.job_state is not None else {}
        leads = members.get(str(self._leader), {"address": self.news.candidates.get(self._leader, ("", 0))})
        if leads["address"][0] not in hosts and not self.waits_for:
            # return before the loop over all members, because each pod that requests a number leads to this call
            return
        known = {**self.news.candidates, **{int(node): its["address"] for node, its in members.items()}}
        gone = frozenset(node for node, (host, _) in known.items() if host in hosts)
        # drop the connection only once: a later connection may be to the node that this node votes for
        is_news = self._confirmed or self._leader not in self._lost
        if self._leader in gone or (gone and replaced and self.waits_for):
            self._lost |= gone
            self._counting = asyncio.ensure_future(self._election.look_again())
        if self._leader in gone and replaced and is_news:
            self.given_up = True
            self.disconnect()

    def disconnect(self) -> None:
        """Abort the connection, as a network failure would."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _use(self, dialled: wire.Connection) -> None:
        """Use this connection from now on.

        A coordinator counts as alive when its data arrive, not when they are read: the order before them may take
        longer than the coordinator may be silent.
        """
        reader, self._writer = dialled
        take = reader.feed_data

        def heard(data: Any) -> None:
            self._heard_at = self._data_at = time.monotonic()
            take(data)

        # asyncio has no other way to be called when data arrive
        reader.feed_data = heard  # type: ignore[method-assign]
        self._reader = reader

    def _close_connection(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
        self._confirmed = False

    async def _beat(self) -> None:
        """Send heartbeats, and drop the connection to a coordinator that was silent for half a lease."""
        every = self._lease_s / 6
        while True:
            before = time.monotonic()
            await asyncio.sleep(every)
            now = time.monotonic()
            if now - before > 2 * every:  # this process was paused, and has not read messages that arrived meanwhile
                self._heard_at = max(self._heard_at, now - self._lease_s / 4)
            if self._writer is None or not self._confirmed:
                continue
            if now - self._heard_at > self._lease_s / 2:
                self.given_up = True
                self._writer.transport.abort()  # `next` then looks for another coordinator
                continue
            with contextlib.suppress(ConnectionError):
                self._writer.write(wire.encode(encode(c.Beat(clock=now))))

    async def _dial(self, host: str, port: int, timeout_s: float) -> wire.Connection:
        settings = self._settings
        async with asyncio.timeout(timeout_s):
            return await wire.dial(host, port, settings.secret, encrypted=settings.config.encrypted)

    # --- the coordinator is lost ----------------------------------------------------------------

    async def _look_for_another(self, news: c.JobNews) -> c.ToAgent:
        """Return the first message of the next coordinator, which may be this node.

        Each node votes for the lowest candidate that it can reach. A candidate with a majority of votes coordinates. A
        node that finds no coordinator within its lease stops.
        """
        me, job_state = self._settings.node, self.job_state
        members = {int(node) for node in job_state["members"]} if job_state is not None else set[int]()
        silent = time.monotonic() - self._heard_at
        search_s = max(_SEARCH * self._lease_s - silent, self._lease_s / 4)
        # the operator reports lost nodes, so two halves of a split network cannot both continue
        if self._settings.listen is not None:
            search_s = max(search_s, self._settings.config.restart.node_wait_s)
        search = _Search(news, time.monotonic() + search_s, {me})
        self.waits_for = f"the coordinator, node {news.coordinator}, is lost; this node looks for another"
        try_former = self._settings.listen is not None
        self._may_return = True
        before, offers = self._before_me(news, job_state is not None)
        if not self.given_up and (first := await self._reconnect(search)) is not None:
            return first
        while search.left_s > 0:
            if try_former and (first := await self._try_former(search)) is not None:
                return first
            try_former = try_former or offers
            if (first := await self._vote_for_lowest(search, before)) is not None:
                return first
            if offers and (first := await self._offer_myself(search, members)) is not None:
                return first
            await asyncio.sleep(0.02)
        self._close_connection()
        listed, reached = f" ({_listed(members)})" if members else "", _listed(search.reached | {*self._election.votes})
        raise ExcludedError(
            f"node {me} stops: the coordinator, node {news.coordinator}, is lost, and of the {news.members} nodes"
            f"{listed} it reaches {reached} only: no majority, so the others may continue without it",
            hint="Three nodes or more, spares among them, survive the loss of any one of them."
            if members and not may_take_over(members, members - {news.coordinator})
            else "Look at the network between the nodes.",
        )

    async def _reconnect(self, search: _Search) -> c.ToAgent | None:
        """Return the former coordinator's first message over a new connection, in case only the old connection
        broke."""
        former, me = search.news.coordinator, self._settings.node
        if (address := search.news.candidates.get(former)) is None:
            return None
        for tries in itertools.count(1):
            if search.left_s < 0 or (tries > _TRIES and former != me):
                break
            try:
                dialled = await self._dial(*address, self._lease_s * _DIAL_FORMER)
            except (ConnectionRefusedError, TimeoutError):
                break
            except OSError:
                await asyncio.sleep(0.02)
                continue
            limit_s = min(search.left_s, self._lease_s * _DIAL)
            if (first := await self._first_message(search, former, dialled, limit_s)) is not None:
                return self._unless_refused(await self._resolve(search, former, first))
        return None

    def _before_me(self, news: c.JobNews, has_state: bool) -> tuple[list[int], bool]:
        """Return the candidates that this node may vote for, and whether this node is a candidate itself. A candidate
        votes only for lower candidates, because the lowest live candidate coordinates."""
        others = candidates(news.candidates, news.coordinator)
        me = self._settings.node
        if me not in others:
            return others, False
        return (others[: others.index(me)], True) if has_state else ([node for node in others if node != me], False)

    async def _try_former(self, search: _Search) -> c.ToAgent | None:
        """Return the first message of the lost coordinator if it is back, else None.

        A coordinator may be paused or cut off for too short a time for the other nodes to elect a new one. Without an
        operator, only the node that collects votes tries to reach the lost coordinator, and sends the answer to the
        voters.
        Under an operator, every node tries this first: otherwise nothing ends its search, and a coordinator that has
        released the node answers with `StopNode`.
        """
        former, under_operator = search.news.coordinator, self._settings.listen is not None
        address = search.news.candidates.get(former)
        if address is None or not (self._may_return or under_operator):
            return None
        first = await self._try(search, address, former, _DIAL if under_operator else _DIAL_FORMER)
        return self._unless_refused(await self._resolve(search, former, first))

    def _unless_refused(self, first: c.ToAgent | None) -> c.ToAgent | None:
        """Return the former coordinator's message. If that message refuses this node, return None, because another
        coordinator may accept the node; under an operator, return the refusal."""
        if not isinstance(first, c.StopNode) or self._settings.listen is not None:
            return first
        self._close_connection()
        return None

    async def _try(self, search: _Search, address: Address, node: int, share: float) -> c.ToAgent | None:
        """Return the first message of `node`, which may be the coordinator already; None if no message arrives in time.

        Args:
            share: share of the lease for making the connection.
        """
        ends = time.monotonic() + min(search.left_s, self._lease_s * _DIAL)
        try:
            dialled = await self._dial(*address, min(self._lease_s * share, max(0.05, ends - time.monotonic())))
        except OSError:
            return None
        return await self._first_message(search, node, dialled, ends - time.monotonic())

    async def _offer_myself(self, search: _Search, members: set[int]) -> c.ToAgent | None:
        """Wait for the votes of a majority, then coordinate the job. Returns the new coordinator's first message; None
        without a majority."""
        me, wait_s = self._settings.node, min(search.left_s, self._lease_s / 6)
        if me not in members or not await self._election.wait_for_majority(members, me, wait_s, lambda: self._lost):
            return None
        self._take_over(self._own_handshake(), list(self._election.votes.values()), self._lost)
        while search.left_s > 0:
            try:
                self._use(await self._dial(*self._election.address, self._lease_s))
            except OSError:  # only this connection broke; the node coordinates in any case
                await asyncio.sleep(0.02)
                continue
            self._leader = me
            self.send_handshake()
            if (first := await self._read()) is not None:
                return first
            self._close_connection()
        return None

    async def _vote_for_lowest(self, search: _Search, nodes: list[int]) -> c.ToAgent | None:
        """Vote for the first of `nodes` that can be reached. Returns that node's first message as coordinator. Returns
        None if no node is reached, or if the node does not become coordinator.

        Nodes are dialled in parallel, shortly after one another, because a whole rack may be gone.
        """
        limit_s = min(self._lease_s * _DIAL, max(0.05, search.left_s))
        dials: list[asyncio.Task[wire.Connection]] = []

        async def dial(node: int, before: Sequence[asyncio.Task[wire.Connection]]) -> wire.Connection:
            if before:
                await asyncio.wait({before[-1]}, timeout=self._lease_s * _NEXT_DIAL)
            if any(map(_has_connected, before)):
                raise OSError("a candidate before this one has answered")
            ends = time.monotonic() + limit_s
            for tries in itertools.count(1):
                try:
                    return await self._dial(*search.news.candidates[node], max(0.05, ends - time.monotonic()))
                except ConnectionError as error:
                    if isinstance(error, ConnectionRefusedError) or tries == _TRIES:
                        raise
                # only this connection broke. Do not dial the next candidate yet, because a vote cannot be withdrawn
                # during a search
                await asyncio.sleep(0.02)
            raise AssertionError

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
                return await self._vote_for(search, node, dialled)
        finally:
            _leave_all(dials)
        return None

    async def _vote_for(self, search: _Search, node: int, dialled: wire.Connection) -> c.ToAgent | None:
        """Vote for `node`. Returns its first message as coordinator. If `node` names another coordinator, returns that
        coordinator's first message. Returns None without either."""
        hold_s = search.left_s + (_HOLD - _SEARCH) * self._lease_s
        if self._settings.listen is not None:  # a long search must regularly dial the other candidates again
            hold_s = min(search.left_s, self._lease_s)
        first = await self._first_message(search, node, dialled, hold_s)
        self._may_return &= first is not None  # if no answer came, `node` may still count this vote
        return await self._resolve(search, node, first)

    async def _resolve(self, search: _Search, node: int, first: c.ToAgent | None) -> c.ToAgent | None:
        """Return `first`, the first message of `node`. If `first` names another coordinator, return that coordinator's
        first message instead."""
        if not _names_another(first, node):
            return first
        self._close_connection()
        address, is_former = first.candidates.get(first.coordinator), first.term == search.news.term
        if address is None or first.term < search.news.term or (is_former and not self._may_return):
            return None
        answer = await self._try(search, address, first.coordinator, _DIAL)
        if _names_another(answer, first.coordinator):
            self._close_connection()
            return None
        if is_former and (answer is None or isinstance(answer, c.StopNode)):
            await asyncio.sleep(self._lease_s * _DIAL_FORMER)  # slow down: the next vote may get the same answer
        return self._unless_refused(answer) if is_former else answer

    async def _first_message(
        self, search: _Search, node: int, dialled: wire.Connection, limit_s: float
    ) -> c.ToAgent | None:
        """Send the handshake on `dialled`. Returns the first message of `node`; None if none arrives in time."""
        self._use(dialled)
        search.reached.add(node)
        self._send_own_handshake(dialled[1])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.05, limit_s)):
                if (first := await self._read()) is not None:
                    if not _names_another(first, node):
                        self._leader = node
                        self._confirm()
                    return first
        self._close_connection()
        return None


def _names_another(first: c.ToAgent | None, node: int) -> TypeGuard[c.JobNews]:
    """Return whether `first` is the news of `node` that another node coordinates."""
    return isinstance(first, c.JobNews) and first.coordinator != node


def _leave_all(dials: list[asyncio.Task[wire.Connection]]) -> None:
    """Cancel all connection attempts, and close the connections that were made."""
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
