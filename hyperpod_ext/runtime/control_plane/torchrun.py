"""Control plane under `torchrun`, and under `hyperpodrun` without `--inprocess-restart`.

After an exception, the ranks notify each other through their own store, and no process ends. After the death of a
process, the launcher starts all processes again. The new processes restore from the memory servers of their nodes.
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
"""Additional time for which ranks other than 0 wait for rank 0's answer, which names the missing ranks."""
_START, _FAULT = "hpx-start", "hpx-fault"
_LOOK_S = 0.05
_FOR_EVER = timedelta(days=14)


class TorchrunMembers(Members):
    """Control plane of one process in a job whose launcher restarts either all processes or none of them."""

    def __init__(self, groups: ProcessGroups, launcher: Launcher) -> None:
        super().__init__(groups)
        self._launcher = launcher
        self._event: ElasticEvent | None = None
        # install the handler first: without a handler, SIGUSR1 would kill the process
        if launcher is Launcher.HYPERPODRUN:
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
        self._meeting_store = meeting  # keep the store open: if rank 0 hosts it, others may still read
        self._last = ("", 0)
        self._faults = 0
        if self._me == 0:
            self._log(_promise(launcher))

    def _meeting(self) -> TCPStore:
        """Return the store in which ranks exchange their addresses: the launcher's store, or one that rank 0 hosts.

        Raises:
            UnreachableError: no store answers at MASTER_ADDR and MASTER_PORT.
        """
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            return TCPStore(host, port, is_master=self._me == 0 and not hosted, timeout=_MEET, wait_for_workers=False)
        except RuntimeError as error:
            message = f"rank {self._me} cannot open or reach the ranks' store at {host}:{port}: {error}"
            hint = "The port (MASTER_ADDR, MASTER_PORT) must be free on the first node, and reachable from all nodes."
            raise UnreachableError(message, hint=hint) from error

    def _next_round(self) -> RendezvousRound:
        number = 1 if self._round is None else self._round.number + 1
        node = int(os.environ["GROUP_RANK"])
        local_rank = int(os.environ["LOCAL_RANK"])
        return RendezvousRound(number, self._me, self._world_size, local_rank, self._local_size, node, self._addresses)

    def _met(self, rendezvous: RendezvousRound, store: PartitionedStore) -> None:
        watch = (store.clone(), rendezvous.number)
        threading.Thread(target=self._watch, args=watch, name="hpx-watch", daemon=True).start()

    def _watch(self, store: PartitionedStore, number: int) -> None:
        """Wait for a notice of an exception in attempt `number`, and forward it; return when this rank has finished."""
        try:
            store.wait([f"{_FAULT}/{self._me}"], _FOR_EVER)
        except ConnectionError:
            if self._finishing:
                return  # no fault: connections break when a rank that has finished ends
        else:
            spread(store, _FAULT, self._me, self._world_size)
        self._abort(number)

    def _stop_for_others(self, step: int) -> None:
        """Stop before a restart with another number of nodes, once all nodes have finished their saves and copies."""
        self._ask("elastic-saved", None, lambda answers: None)
        if self._node is not None:
            self._node.hand_over()
        self._ask("elastic-uploaded", None, lambda answers: None)
        self.event("stopped", rank=self.rank, step=step)
        if self.rank == 0:
            self._log(f"all ranks have stopped after step {step}, to restart with another number of nodes")

    def _comes_again(self) -> bool:
        return self._event is not None and self._event.received

    def failed(self, failure: c.Failed) -> bool:
        """Restart all ranks within their processes. If the same exception has repeated, return False, so that the
        launcher restarts all processes."""
        self._report_fault(failure.step, failure.cause)
        self._faults += 1
        same = failure.place or failure.cause, failure.step
        again, self._last = same == self._last, same
        what = f"rank {self.rank}, step {failure.step}: {failure.cause}"
        if why := self._why_to_end(failure, again):
            self._log(f"{what}; {why}, so this process ends and {self._launcher.value} takes over")
            return False
        self._log(f"{what}; all ranks restart in their processes")
        assert self._store is not None
        assert self._round is not None
        spread(self._store, _FAULT, self._me, self._world_size)
        self._abort(self._round.number)
        return True

    def _why_to_end(self, failure: c.Failed, again: bool) -> str:
        """Return the reason why this process must end; empty if it continues."""
        if failure.final:
            return "trying again cannot help"
        if failure.process_unusable:
            return "this process cannot continue"
        if again:
            return "the same exception has repeated"
        return "max_restarts is used up" if self._faults > self.settings.config.restart.max_restarts else ""


def _promise(launcher: Launcher) -> str:
    """Return a notice for the log: how faults are handled under this launcher."""
    again = "starts all processes again"
    if launcher is Launcher.TORCHRUN:
        times = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        again = f"{again}, {times} times (--max-restarts)" if times != "0" else "ends the job (--max-restarts 0)"
    return (
        f"under {launcher.value}, exceptions are handled in the process. A process that dies is not replaced alone: "
        f"{launcher.value} {again}; state comes from each node's memory"
    )


def _suffix(meeting: TCPStore, launcher: Launcher) -> str:
    """Return a suffix for the name of an unnamed job: the same suffix whenever one torchrun starts its processes."""
    if launcher is not Launcher.TORCHRUN:
        return ""  # under hyperpodrun, a pod runs only one job, so no suffix is needed
    return meeting.compare_set("hpx-job", "", secrets.token_hex(4)).decode()


def start_of_all(store: Store, rank: int, mine: Address, limit: timedelta) -> str:
    """Return rank 0's random name for this start of all processes. The name separates the ranks' addresses in the store
    from those of earlier starts.

    TORCHELASTIC_RESTART_COUNT cannot serve as the name, because each node counts only its own faults.

    Raises:
        UnreachableError: no running rank 0 has published a name within `limit`.
    """
    if rank == 0:
        store.set(_START, json.dumps([*mine, name := secrets.token_hex(8)]))
        return name
    deadline = time.monotonic() + limit.total_seconds()
    while time.monotonic() < deadline:
        if store.check([_START]):
            host, port, name = json.loads(store.get(_START))
            if listens((host, port)):  # a rank 0 that does not listen is from an earlier start
                return str(name)
        time.sleep(_LOOK_S)
    raise UnreachableError(
        f"rank 0 has not started within {limit.total_seconds():g} s", hint="The log of rank 0 may show why."
    )


def addresses_of_all(store: Store, rank: int, world_size: int, mine: Address, limit: timedelta) -> tuple[Address, ...]:
    """Return the addresses of all ranks. Rank 0 collects the addresses, so that every other rank needs only one request
    to the store.

    Raises:
        UnreachableError: a rank has not published its address within `limit`.
    """
    store.set(f"address/{rank}", json.dumps(mine))
    if rank == 0:
        store.set("addresses", json.dumps(_collected(store, [f"address/{one}" for one in range(world_size)], limit)))
    try:
        store.wait(["addresses"], limit + _MARGIN)
    except RuntimeError as error:
        raise UnreachableError(f"rank 0 has not sent the addresses of all ranks: {error}") from error
    found = json.loads(store.get("addresses"))
    if missing := [str(rank) for rank, address in enumerate(found) if address is None]:
        raise UnreachableError(
            f"ranks {', '.join(missing)} have not sent their address in {limit.total_seconds():g} s",
            hint="Their processes have not reached this point. Their logs may show why.",
        )
    return tuple((str(host), int(port)) for host, port in found)


def _collected(store: Store, keys: Sequence[str], limit: timedelta) -> list[Any]:
    """Wait for the values of `keys`, and return them. The value is None for a key that is not set within `limit`."""
    try:
        store.wait(list(keys), limit)
    except RuntimeError:
        return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]
    return [json.loads(value) for value in store.multi_get(list(keys))]
