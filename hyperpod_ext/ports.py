"""Free ports of this machine. Standard library only."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_KERNELS_OWN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _TRIES = 10000, 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of `host`.

    It is below the kernel's range for outgoing connections, which could otherwise take it before its user listens.
    """
    for _ in range(_TRIES):
        port = random.randrange(_LOWEST, max(_lowest_of_the_kernel(), _LOWEST + 1))
        if _can_listen(host, port):
            return port
    with socket.create_server((host, 0), family=family_of(host)) as probe:
        return int(probe.getsockname()[1])


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of a numeric address, IPv4 or IPv6; for a name, IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _lowest_of_the_kernel() -> int:
    try:
        return int(_KERNELS_OWN.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def _can_listen(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port), family=family_of(host)).close()
    except OSError:
        return False
    return True
