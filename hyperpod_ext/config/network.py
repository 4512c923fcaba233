"""Network between nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hyperpod_ext.config.base import Config


class Network(Config):
    """Network between nodes, and its encryption."""

    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$", examples=["ens5"])] | None = None
    """Interface of every node, for snapshots between nodes, the ranks' key-value servers, gloo, and NCCL's sockets.
    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in `env` take precedence. Default: the interface over which a node reaches
    the first node."""
    tls: bool = False
    """Encrypt messages and snapshots between agents and memory servers, with TLS 1.3. Gradients are not encrypted,
    because gloo and NCCL of PyTorch's builds have no TLS. Needs `cryptography` in the image."""
