"""An agent's connection to the coordinator. If the coordinator is lost, the agent votes for the next coordinator, or
becomes the coordinator itself."""

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
"""Share of the lease (`restart.lease_s`) within which a candidate must get the votes of a majority. A candidate is an
agent with a copy of the job state, which can become the coordinator."""
_HOLD = 0.97
"""Share of the lease for which a voter waits for its candidate: more than `_SEARCH`, because the candidate may have
begun its search later than the voter. The rest of the lease is reserved for ending processes."""
_DIAL = 1 / 6
"""Share of the lease within which a connection to another node must succeed."""
_NEXT_DIAL = 1 / 60
"""Share of the lease after which the next candidate is also tried, if a candidate has not answered."""
_DIAL_FORMER = 1 / 24
"""Share of the lease within which a connection to the lost coordinator must succeed."""
_CONNECT_AGAIN_S = 0.05
"""Number of seconds to wait before connecting again to a coordinator that has closed the connection without a
message."""
_TRIES = 3
"""Number of failed attempts in a row after which a node stops trying to connect. A single attempt may fail because of a
damaged transmission."""
_SAME_JOB = "All nodes of a job need the same secret (HPX_SECRET_FILE), the same network.tls and the same endpoint."
_UNACKNOWLEDGED = 10_000
"""Maximum number of unacknowledged events to keep for sending them again."""


class ExcludedError(JobFailedError):
    """Raised if this node must stop, because other nodes may continue the job without this node."""


@dataclass(frozen=True, slots=True)
class _Search:
    """A node's search for the next coordinator, after the coordinator was lost."""

    news: c.JobNews
    """Newest `JobNews` message from the lost coordinator."""
    deadline: float
    reached: set[int]
    """Nodes to which this node has connected during the search."""

    @property
    def left_s(self) -> float:
        """Number of seconds until the deadline of the search."""
        return self.deadline - time.monotonic()


class CoordinatorClient:
    """Exchanges messages with the coordinator, which runs on this node or on another node.

    Args:
        election: this node's listener, to which other agents connect to vote.
        handshake: function that returns the first message to a coordinator, from this agent's id, newest term and job
            state.
        take_over: function that starts the coordinator in this agent, from the agent's own handshake, the handshakes of
            its voters, and the nodes that are gone for good.
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
        """This agent's copy of the job state; None if this agent is not a candidate."""
        self._digest = ""
        """Digest of `job_state`, to check that a received change fits the job state of this agent."""
        self.news: c.JobNews | None = None
        """Newest `JobNews` message; None before the job has begun."""
        self._leader = -1
        """Node of the current coordinator, or of the lost coordinator during a search. The node number of a new
        coordinator is set even before its first `JobNews` arrives."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard_at = self._data_at = time.monotonic()
        self._unacknowledged: deque[c.Event] = deque(maxlen=_UNACKNOWLEDGED)
        self._acknowledged = 0
        self._beating: asyncio.Task[None] | None = None
        self._over = False
        self._connect_arguments: tuple[Callable[[], tuple[str, int]], Callable[[], str]] | None = None
        """Arguments of the last call of `connect`, with which to connect again."""
        self._unanswered_since: float | None = None
        """Time since which the coordinator has closed every connection without a message; None if the coordinator
        answers."""
        self._confirmed = False
        """Whether the connected node is known to be the coordinator. While `_confirmed` is False, only the handshake is
        sent."""
        self.waits_for = ""
        """Sentence for users that says that the coordinator is lost, and that this node looks for another. The sentence
        is empty if this node has a coordinator."""
        self._lost: frozenset[int] = frozenset()
        """Nodes that are gone for good according to the HyperPod operator. The set stays empty until the coordinator's
        node is gone or lost."""
        self._may_return = True
        """Whether this node may connect to the lost coordinator again. This is forbidden while another node may still
        count this node's vote for a new coordinator, because the job could then have two coordinators."""
        self.given_up = False
        """Whether this node has closed its connection, because the coordinator was silent or its node was gone."""
        self._counting: asyncio.Future[None] | None = None
        self._unsent: list[c.FromAgent] = []
        """Reports made since the handshake, to be sent once the connected node is known to be the coordinator."""

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def has_coordinator(self) -> bool:
        """Whether this agent is connected to a node that is known to be the coordinator."""
        return self._writer is not None and self._confirmed

    def heard_since(self, moment: float) -> bool:
        """Return whether data from the coordinator have arrived since `moment` (a value of `time.monotonic()`)."""
        return self._data_at > moment

    async def connect(
        self, endpoint: Callable[[], tuple[str, int]], give_up: Callable[[], str], limit_s: float | None = None
    ) -> None:
        """Connect to the first coordinator of the job, which may start later than this node.

        Args:
            endpoint: function that returns host and port of the coordinator; called for each attempt.
            give_up: function that returns why to stop the attempts; an empty string to continue.
            limit_s: time limit in seconds; None for the job's limit for a node to join.

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
                    raise JobFailedError(
                        f"node {self._settings.node} could not reach the job's coordinator at {host}:{port}: {error}",
                        hint="The coordinator runs on node 0 at first. Check that its agent runs, and that the port is "
                        "reachable.",
                    ) from error
                await asyncio.sleep(0.1)

    @property
    def own_address(self) -> str:
        """This node's IP address in its connection to the coordinator."""
        assert self._writer is not None
        return str(self._writer.get_extra_info("sockname")[0])

    def send_handshake(self) -> None:
        """Send the handshake and all unacknowledged events to the coordinator, and start to send heartbeats."""
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

        While this agent is disconnected, events are kept until a coordinator has acknowledged them. Other reports are
        dropped, because the next handshake contains the full state. Reports between a handshake and its answer are sent
        after the answer. The answer to a vote may take seconds, in which a worker may die.
        """
        if isinstance(report, c.Event):
            self._unacknowledged.append(report)
        elif self._writer is not None and not self._confirmed:
            self._unsent.append(report)
        if self._writer is not None and self._confirmed and not self._writer.is_closing():
            self._writer.write(wire.encode(encode(report)))

    async def next(self) -> c.ToAgent | None:
        """Return the coordinator's next order; None if the job has ended, or if the coordinator was lost before the job
        began.

        Raises:
            ExcludedError: the coordinator has ordered this node to stop, or the node has found no coordinator.
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
        """Connect again to the first coordinator, which has closed the connection without a message. Returns False if
        all attempts fail for one lease."""
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
        """Apply a change to this agent's copy of the job state. If the change does not fit the copy, request the full
        job state."""
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
        """Return the coordinator's next valid message; None if the connection has ended. Skips invalid messages."""
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
        """Record that the nodes at `hosts` are gone for good, according to the HyperPod operator. If the coordinator's
        node is gone, the majority that elects the next coordinator does not include gone nodes.

        Args:
            replaced: whether other nodes have already replaced the nodes at `hosts`. If False, the nodes may still run
                for a moment.
        """
        if self.news is None:
            return
        members = self.job_state["members"] if self.job_state is not None else {}
        leads = members.get(str(self._leader), {"address": self.news.candidates.get(self._leader, ("", 0))})
        if leads["address"][0] not in hosts and not self.waits_for:
            # skip the loop over all members below, because this method is called for each pod that requests a node
            # number
            return
        known = {**self.news.candidates, **{int(node): its["address"] for node, its in members.items()}}
        gone = frozenset(node for node, (host, _) in known.items() if host in hosts)
        # abort only once: a later connection may be to the node for which this node votes
        is_news = self._confirmed or self._leader not in self._lost
        if self._leader in gone or (gone and replaced and self.waits_for):
            self._lost |= gone
            self._counting = asyncio.ensure_future(self._election.look_again())
        if self._leader in gone and replaced and is_news:
            self.given_up = True
            self.disconnect()

    def disconnect(self) -> None:
        """Abort the connection to the coordinator, as a network failure would."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _use(self, dialled: wire.Connection) -> None:
        """Use the connection `dialled` from now on, and record when data arrive over this connection.

        The coordinator counts as alive when its data arrive, not when this agent reads them. While the agent carries
        out an order, it may read nothing for longer than the coordinator may be silent.
        """
        reader, self._writer = dialled
        take = reader.feed_data

        def heard(data: Any) -> None:
            self._heard_at = self._data_at = time.monotonic()
            take(data)

        # replaces `feed_data`, because asyncio has no callback for arriving data
        reader.feed_data = heard  # type: ignore[method-assign]
        self._reader = reader

    def _close_connection(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
        self._confirmed = False

    async def _beat(self) -> None:
        """Send heartbeats to the coordinator. If the coordinator was silent for half a lease, abort the connection."""
        every = self._lease_s / 6
        while True:
            before = time.monotonic()
            await asyncio.sleep(every)
            now = time.monotonic()
            if now - before > 2 * every:
                # after a pause of this process, do not count the coordinator as silent: its messages may be unread
                self._heard_at = max(self._heard_at, now - self._lease_s / 4)
            if self._writer is None or not self._confirmed:
                continue
            if now - self._heard_at > self._lease_s / 2:
                self.given_up = True
                self._writer.transport.abort()  # closing the connection makes `next` search for another coordinator
                continue
            with contextlib.suppress(ConnectionError):
                self._writer.write(wire.encode(encode(c.Beat(clock=now))))

    async def _dial(self, host: str, port: int, timeout_s: float) -> wire.Connection:
        settings = self._settings
        async with asyncio.timeout(timeout_s):
            return await wire.dial(host, port, settings.secret, encrypted=settings.config.encrypted)

    # --- the coordinator is lost ----------------------------------------------------------------

    async def _look_for_another(self, news: c.JobNews) -> c.ToAgent:
        """Find the next coordinator, which may be on this node, and return its first message.

        Each agent votes for the reachable candidate with the lowest node number. A candidate with the votes of a
        majority becomes the coordinator. An agent that finds no coordinator within its lease stops.
        """
        me, job_state = self._settings.node, self.job_state
        members = {int(node) for node in job_state["members"]} if job_state is not None else set[int]()
        silent = time.monotonic() - self._heard_at
        search_s = max(_SEARCH * self._lease_s - silent, self._lease_s / 4)
        # search longer under an operator: the search needs the operator's reports of gone nodes, so that a split
        # network cannot lead to two coordinators
        if self._settings.listen is not None:
            search_s = max(search_s, self._settings.config.restart.node_wait_s)
        search = _Search(news, time.monotonic() + search_s, {me})
        self.waits_for = f"the coordinator, node {news.coordinator}, is lost; this node looks for another coordinator"
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
            f"{listed} this node reaches only {reached}: no majority, so the other nodes may continue without it",
            hint="A job survives the loss of any one node only if it has at least three nodes, spares included."
            if members and not may_take_over(members, members - {news.coordinator})
            else "Check the network between the nodes.",
        )

    async def _reconnect(self, search: _Search) -> c.ToAgent | None:
        """Try to connect to the lost coordinator again, in case only the connection broke. Returns the coordinator's
        first message, or None if the attempt fails."""
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
        """Return the candidates for which this node may vote, and whether this node is a candidate itself. A candidate
        votes only for candidates with lower node numbers: the lowest reachable candidate becomes the coordinator."""
        others = candidates(news.candidates, news.coordinator)
        me = self._settings.node
        if me not in others:
            return others, False
        return (others[: others.index(me)], True) if has_state else ([node for node in others if node != me], False)

    async def _try_former(self, search: _Search) -> c.ToAgent | None:
        """Try to connect to the lost coordinator. Returns the coordinator's first message, or None if the coordinator
        is not back.

        A coordinator that was paused or cut off for a short time may be back before another coordinator is elected.
        Without the HyperPod operator, only the node that collects votes tries to reach the lost coordinator, and passes
        the answer on to its voters. Under the HyperPod operator, every node first tries to reach the lost coordinator.
        A coordinator that has released the node answers with `StopNode`; without this answer, the node's search might
        not end.
        """
        former, under_operator = search.news.coordinator, self._settings.listen is not None
        address = search.news.candidates.get(former)
        if address is None or not (self._may_return or under_operator):
            return None
        first = await self._try(search, address, former, _DIAL if under_operator else _DIAL_FORMER)
        return self._unless_refused(await self._resolve(search, former, first))

    def _unless_refused(self, first: c.ToAgent | None) -> c.ToAgent | None:
        """Return the former coordinator's message `first`. Without the HyperPod operator, return None instead of a
        `StopNode`, because another coordinator may accept this node."""
        if not isinstance(first, c.StopNode) or self._settings.listen is not None:
            return first
        self._close_connection()
        return None

    async def _try(self, search: _Search, address: Address, node: int, share: float) -> c.ToAgent | None:
        """Connect to `node`, which may already be the coordinator. Returns the first message of `node`, or None if no
        message arrives in time.

        Args:
            share: share of the lease within which the connection must be made.
        """
        ends = time.monotonic() + min(search.left_s, self._lease_s * _DIAL)
        try:
            dialled = await self._dial(*address, min(self._lease_s * share, max(0.05, ends - time.monotonic())))
        except OSError:
            return None
        return await self._first_message(search, node, dialled, ends - time.monotonic())

    async def _offer_myself(self, search: _Search, members: set[int]) -> c.ToAgent | None:
        """Wait for the votes of a majority, then start the coordinator on this node. Returns the new coordinator's
        first message; None without a majority."""
        me, wait_s = self._settings.node, min(search.left_s, self._lease_s / 6)
        if me not in members or not await self._election.wait_for_majority(members, me, wait_s, lambda: self._lost):
            return None
        self._take_over(self._own_handshake(), list(self._election.votes.values()), self._lost)
        while search.left_s > 0:
            try:
                self._use(await self._dial(*self._election.address, self._lease_s))
            except OSError:
                # try again: only the connection to the new coordinator broke
                await asyncio.sleep(0.02)
                continue
            self._leader = me
            self.send_handshake()
            if (first := await self._read()) is not None:
                return first
            self._close_connection()
        return None

    async def _vote_for_lowest(self, search: _Search, nodes: list[int]) -> c.ToAgent | None:
        """Vote for the first of `nodes` that can be reached. Returns the elected node's first message as coordinator.
        Returns None if no node can be reached, or if the elected node does not become the coordinator.

        The connection attempts start shortly after one another and run in parallel, because the nodes of a whole rack
        may be lost.
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
                # only the connection broke: try the same node before the next one, because a vote cannot be withdrawn
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
        """Vote for `node`. Returns the first message of `node` as coordinator, or of another coordinator that `node`
        names. Returns None if no coordinator sends a message."""
        hold_s = search.left_s + (_HOLD - _SEARCH) * self._lease_s
        if self._settings.listen is not None:
            # at most one lease, so that a long search also tries other candidates
            hold_s = min(search.left_s, self._lease_s)
        first = await self._first_message(search, node, dialled, hold_s)
        # without an answer, `node` may still count this vote, so this node must not return to the lost coordinator
        self._may_return &= first is not None
        return await self._resolve(search, node, first)

    async def _resolve(self, search: _Search, node: int, first: c.ToAgent | None) -> c.ToAgent | None:
        """Return the coordinator's first message. If `first`, the first message of `node`, names another node as
        coordinator, connect to the other node, and return the other node's first message. Otherwise return `first`."""
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
            # wait a moment, because the next vote may get the same answer
            await asyncio.sleep(self._lease_s * _DIAL_FORMER)
        return self._unless_refused(answer) if is_former else answer

    async def _first_message(
        self, search: _Search, node: int, dialled: wire.Connection, limit_s: float
    ) -> c.ToAgent | None:
        """Send the handshake to `node` over the connection `dialled`. Returns the first message of `node`, or None if
        no message arrives in time."""
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
    """Return whether `first` is a `JobNews` message from `node` that names another node as the coordinator."""
    return isinstance(first, c.JobNews) and first.coordinator != node


def _leave_all(dials: list[asyncio.Task[wire.Connection]]) -> None:
    """Cancel all pending connection attempts, and close all connections that were made."""
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
