"""Finds free TCP ports on this machine. The module needs only the standard library."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_KERNELS_OWN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _TRIES = 10000, 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port on the address `host` of this machine.

    The port is below the range that the kernel uses for outgoing connections. An outgoing connection could take a port
    in that range before the caller listens on the port.
    """
    for _ in range(_TRIES):
        port = random.randrange(_LOWEST, max(_lowest_of_the_kernel(), _LOWEST + 1))
        if _can_listen(host, port):
            return port
    with socket.create_server((host, 0), family=family_of(host)) as probe:
        return int(probe.getsockname()[1])


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of `host`: IPv6 for a numeric IPv6 address, otherwise IPv4."""
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
