"""Network: what nodes reach each other by."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hyperpod_ext.config.base import Config


class Network(Config):
    """What nodes reach each other by, and whether others on the way can read it."""

    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$", examples=["ens5"])] | None = None
    """Interface of every node, for snapshots between nodes, the ranks' key-value servers, gloo, and NCCL's own sockets.
    `env` may name others by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. Default: that by which
    a node reaches the first one."""
    tls: bool = False
    """Whether agents, and memory servers, encrypt what they say to each other: messages and snapshots, by TLS 1.3.
    Gradients are not: gloo and NCCL of PyTorch's builds have no TLS. It takes `cryptography` in the image."""
