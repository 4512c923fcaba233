"""Under `torchrun`, and under `hyperpodrun` that restarts processes: exceptions are met in the processes.

Ranks tell each other of an exception over their own store; nobody's process ends. A process that dies is the
launcher's business, which starts all of them again; each node's memory server has kept what they had.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hyperpod_ext.errors import UnreachableError
from hyperpod_ext.runtime.control_plane.elastic_events import ElasticEvent, StopAtElasticEvent
from hyperpod_ext.runtime.control_plane.exchange import spread
from hyperpod_ext.runtime.control_plane.launcher import Launcher
from hyperpod_ext.runtime.control_plane.own_store import OwnStore, listens
from hyperpod_ext.runtime.control_plane.settings import Settings
from hyperpod_ext.runtime.control_plane.standalone import Members, RendezvousRound
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.interface import address_towards
from hyperpod_ext.runtime.process_group.groups import ProcessGroups
from hyperpod_ext.runtime.process_group.store import Address, PartitionedStore

_MEET = timedelta(minutes=10)
_MARGIN = timedelta(seconds=30)
"""Longer than rank 0 takes to say who is missing."""
_START, _FAULT = "hpx-start", "hpx-fault"
_LOOK_S = 0.05
_FOR_EVER = timedelta(days=14)


class TorchrunMembers(Members):
    """This process among the ranks of a job whose launcher restarts all processes or none."""

    def __init__(self, groups: ProcessGroups, launcher: Launcher) -> None:
        super().__init__(groups)
        self._launcher = launcher
        self._event: ElasticEvent | None = None
        if launcher is Launcher.HYPERPODRUN:  # first of all: whoever has no handler dies of the signal
            self._event = ElasticEvent()
            self.stop_at_step = StopAtElasticEvent(self._event, self._stop_for_others)
        environ = os.environ
        self._local_size = int(environ["LOCAL_WORLD_SIZE"])
        self._world_size, self._me = int(environ["WORLD_SIZE"]), int(environ["RANK"])
        meeting = self._meeting()
        nodes = self._world_size // self._local_size
        self._settings = Settings.of(nodes, self._local_size, environ, _suffix(meeting, launcher))
        self._keys = OwnStore(self._settings.secret)
        host = address_towards(os.environ["MASTER_ADDR"])
        mine = self._keys.start(host)
        store = PrefixStore(f"hpx-{start_of_all(meeting, self._me, mine, _MEET)}", meeting)
        self._addresses = addresses_of_all(store, self._me, self._world_size, mine, _MEET)
        self._meeting_store = meeting  # where rank 0 hosts it, others may still be reading
        self._last = ("", 0)
        self._faults = 0
        if self._me == 0:
            self._say(_promise(launcher))

    def _meeting(self) -> TCPStore:
        """The launcher's store, or, where it has none for its workers, one of rank 0: only to find each other.

        Raises:
            UnreachableError: nobody answers there.
        """
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            return TCPStore(host, port, is_master=self._me == 0 and not hosted, timeout=_MEET, wait_for_workers=False)
        except RuntimeError as error:
            message = f"ranks cannot meet at MASTER_ADDR:MASTER_PORT, {host}:{port}: {error}"
            raise UnreachableError(message, hint="The port must be free on the first node, and reachable.") from error

    def _next_round(self) -> RendezvousRound:
        number = 1 if self._round is None else self._round.number + 1
        node = int(os.environ["GROUP_RANK"])
        local_rank = int(os.environ["LOCAL_RANK"])
        return RendezvousRound(number, self._me, self._world_size, local_rank, self._local_size, node, self._addresses)

    def _met(self, rendezvous: RendezvousRound, store: PartitionedStore) -> None:
        watch = (store.clone(), rendezvous.number)
        threading.Thread(target=self._watch, args=watch, name="hpx-watch", daemon=True).start()

    def _watch(self, store: PartitionedStore, number: int) -> None:
        """Until this rank hears of an exception in epoch `number`, or has left it."""
        try:
            store.wait([f"{_FAULT}/{self._me}"], _FOR_EVER)
        except ConnectionError:
            if self._finishing:
                return  # whoever is done may go
        else:
            spread(store, _FAULT, self._me, self._world_size)
        self._abort(number)

    def _stop_for_others(self, step: int) -> None:
        """The operator will start the job with other nodes: wait until every node's memory has what it is to have."""
        self._ask("elastic-saved", None, lambda answers: None)
        if self._node is not None:
            self._node.hand_over()
        self._ask("elastic-uploaded", None, lambda answers: None)
        self.event("stopped", rank=self.rank, step=step)
        if self.rank == 0:
            self._say(f"all ranks have stopped after step {step}, for another number of nodes")

    def _comes_again(self) -> bool:
        return self._event is not None and self._event.received

    def failed(self, failure: c.Failed) -> bool:
        """Have all ranks begin anew in their processes; the same exception again is left to the launcher."""
        self._tell_fault(failure.step, failure.cause)
        self._faults += 1
        same = failure.place or failure.cause, failure.step
        again, self._last = same == self._last, same
        what = f"rank {self.rank}, step {failure.step}: {failure.cause}"
        if why := self._why_to_end(failure, again):
            self._say(f"{what}; {why}, so {self._launcher.value} hears of it")
            return False
        self._say(f"{what}; all ranks begin anew in their processes")
        assert self._store is not None
        assert self._round is not None
        spread(self._store, _FAULT, self._me, self._world_size)
        self._abort(self._round.number)
        return True

    def _why_to_end(self, failure: c.Failed, again: bool) -> str:
        """Why this process ends of it; empty: it stays."""
        if failure.final:
            return "trying again cannot help"
        if failure.process_unusable:
            return "this process cannot go on"
        if again:
            return "it happens each time"
        return "max_restarts is used up" if self._faults > self.settings.config.restart.max_restarts else ""


def _promise(launcher: Launcher) -> str:
    """What a person should know who chose this launcher."""
    again = "starts all processes again"
    if launcher is Launcher.TORCHRUN:
        times = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        again = f"{again}, {times} times (--max-restarts)" if times != "0" else "ends the job (--max-restarts 0)"
    return (
        f"under {launcher.value}, exceptions are met in the process. A process that dies is not replaced alone: "
        f"{launcher.value} {again}; state comes from each node's memory"
    )


def _suffix(meeting: TCPStore, launcher: Launcher) -> str:
    """Tells jobs apart that nobody named. Every start of the processes by one torchrun has the same."""
    if launcher is not Launcher.TORCHRUN:
        return ""  # its pod is one job's alone
    return meeting.compare_set("hpx-job", "", secrets.token_hex(4)).decode()


def start_of_all(store: Store, rank: int, mine: Address, limit: timedelta) -> str:
    """Name of this start of all processes, which keeps their addresses apart from earlier ones. Rank 0 gives it.

    TORCHELASTIC_RESTART_COUNT is no such name: each node counts its own faults alone.

    Raises:
        UnreachableError: no rank 0 that runs has named one within `limit`.
    """
    if rank == 0:
        store.set(_START, json.dumps([*mine, name := secrets.token_hex(8)]))
        return name
    deadline = time.monotonic() + limit.total_seconds()
    while time.monotonic() < deadline:
        if store.check([_START]):
            host, port, name = json.loads(store.get(_START))
            if listens((host, port)):  # else it is of an earlier start
                return str(name)
        time.sleep(_LOOK_S)
    raise UnreachableError(f"rank 0 has not started within {limit.total_seconds():g} s")


def addresses_of_all(store: Store, rank: int, world_size: int, mine: Address, limit: timedelta) -> tuple[Address, ...]:
    """Of all ranks. Rank 0 collects them, so that the launcher's store answers each of the others once.

    Raises:
        UnreachableError: some rank has not told its own within `limit`.
    """
    store.set(f"address/{rank}", json.dumps(mine))
    if rank == 0:
        store.set("addresses", json.dumps(_collected(store, [f"address/{one}" for one in range(world_size)], limit)))
    try:
        store.wait(["addresses"], limit + _MARGIN)
    except RuntimeError as error:
        raise UnreachableError(f"rank 0 has not told the addresses of all ranks: {error}") from error
    found = json.loads(store.get("addresses"))
    if missing := [str(rank) for rank, address in enumerate(found) if address is None]:
        raise UnreachableError(
            f"ranks {', '.join(missing)} have not told their address in {limit.total_seconds():g} s",
            hint="Their processes have not come as far; their own logs say why.",
        )
    return tuple((str(host), int(port)) for host, port in found)


def _collected(store: Store, keys: Sequence[str], limit: timedelta) -> list[Any]:
    """Values of `keys`, once all are there; None in the place of those that do not come within `limit`."""
    try:
        store.wait(list(keys), limit)
    except RuntimeError:
        return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]
    return [json.loads(value) for value in store.multi_get(list(keys))]
