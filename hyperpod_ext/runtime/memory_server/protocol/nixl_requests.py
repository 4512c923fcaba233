"""Requests of a memory server to its NIXL process over socket pairs, and the process's answers."""

from __future__ import annotations

import typing
from typing import Literal

from hyperpod_ext.runtime.ipc.declared import Bytes, Count, Declared, Kinds
from hyperpod_ext.runtime.memory_server.protocol.request import Done, Request


class Started(Declared):
    """The NIXL process has loaded NIXL. If loading fails, the process sends an error instead of this message."""

    version: str
    """Version of NIXL."""


class Lane(Request[Done]):
    """Read requests from one more socket, whose file descriptor comes with this message. This request has no answer."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["lane"] = "lane"


class MapRegion(Request[Done]):
    """Map a region of shared memory for reading and writing. The region's file descriptor comes with this message."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["map_region"] = "map_region"
    region: Count
    """Number by which later requests identify the region."""
    nbytes: Bytes


class Exposed(Declared):
    metadata: str
    """NIXL's metadata for access to the region from another node, in base64."""
    address: Count
    """Start address of the region in the NIXL process."""


class Expose(Request[Exposed]):
    """Allow other nodes to read a region until a `withdraw` request."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["expose"] = "expose"
    region: Count


class Withdraw(Request[Done]):
    """End other nodes' access to a region that one `expose` request has allowed. This request has no answer."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["withdraw"] = "withdraw"
    region: Count


class Forget(Request[Done]):
    """Unmap a region. This request has no answer."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["forget"] = "forget"
    region: Count


class ReadRemote(Request[Done]):
    """Read bytes from another node's memory into a region."""

    sender, reader = "memory server", "NIXL process"
    op: Literal["read_remote"] = "read_remote"
    metadata: str
    """Metadata from the `Exposed` answer of the other node's NIXL process."""
    address: Count
    """Address of the bytes in the memory of the other node's NIXL process."""
    region: Count
    start: Bytes
    """Offset in the region at which the bytes are written."""
    nbytes: Bytes


AnyNixlRequest = Lane | MapRegion | Expose | Withdraw | Forget | ReadRemote
NIXL_REQUESTS: Kinds[AnyNixlRequest] = Kinds("request to the NIXL process", "op", typing.get_args(AnyNixlRequest))
