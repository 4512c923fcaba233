"""Section of a job's spec for the network between the job's nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hyperpod_ext.config.base import Config


class Network(Config):
    """Network between the nodes of a job, and its encryption."""

    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$", examples=["ens5"])] | None = None
    """Name of the network interface of every node that carries snapshots between nodes, and traffic of the ranks'
    key-value servers, of gloo and of NCCL's sockets. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in `env` take
    precedence. Default: the interface over which a node reaches the first node."""
    tls: bool = False
    """Whether agents and memory servers encrypt their messages and snapshots with TLS 1.3. Gradients are not encrypted,
    because gloo and NCCL in PyTorch's builds have no TLS. TLS needs the package `cryptography` in the image."""
