"""What a memory server asks the process that runs NIXL for it, over socket pairs, and what that answers."""

from __future__ import annotations

import typing
from typing import Literal

from hyperpod_ext.runtime.ipc.declared import Bytes, Count, Declared, Kinds
from hyperpod_ext.runtime.memory_server.protocol.request import Done, Request


class Started(Declared):
    """It has loaded NIXL. In its place comes an error where it could not."""

    version: str
    """Of NIXL."""


class Lane(Request[Done]):
    """Requests will come over one more socket, whose descriptor is sent with this. Not answered."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["lane"] = "lane"


class MapRegion(Request[Done]):
    """A region of shared memory, whose descriptor is sent with this, is to be written or read."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["map_region"] = "map_region"
    region: Count
    """Its number from now on."""
    nbytes: Bytes


class Exposed(Declared):
    metadata: str
    """What NIXL of another node needs to reach the region, in base64."""
    address: Count
    """Where it begins."""


class Expose(Request[Exposed]):
    """Other nodes are to read a region until `withdraw`."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["expose"] = "expose"
    region: Count


class Withdraw(Request[Done]):
    """Nobody is to read the region any more, as far as this `expose` goes. Not answered."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["withdraw"] = "withdraw"
    region: Count


class Forget(Request[Done]):
    """A region is gone. Not answered."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["forget"] = "forget"
    region: Count


class ReadRemote(Request[Done]):
    """Bytes of another node's memory are to be read into a region."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["read_remote"] = "read_remote"
    metadata: str
    """From the other node's `Exposed`."""
    address: Count
    """Where the bytes are there."""
    region: Count
    start: Bytes
    """Where in the region they go."""
    nbytes: Bytes


AnyNixlRequest = Lane | MapRegion | Expose | Withdraw | Forget | ReadRemote
NIXL_REQUESTS: Kinds[AnyNixlRequest] = Kinds("request to the NIXL process", "op", typing.get_args(AnyNixlRequest))
