"""Find an IP address of this machine: the address of a given network interface, or the address from which another
machine is reached."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from hyperpod_ext.errors import JobFailedError, UnreachableError

_SIOCGIFADDR = 0x8915
_ADDRESS_AT = 20
_IPV6_ADDRESSES, _OF_THE_LINK = Path("/proc/net/if_inet6"), "20"
_DISCARD = 9
"""Port for calls that require a port number but send no data (the port of the discard protocol)."""


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface. If the interface has no IPv4 address, return an IPv6 address that
    is not link-local.

    Raises:
        JobFailedError: the interface does not exist on this machine, or has no address.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            if found := _ipv6_of(interface):
                return found
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise JobFailedError(
                f"network.interface is {interface}, which has no IP address on {socket.gethostname()}: "
                f"{error.strerror}",
                hint=f"Interfaces here are {there}. Name one that every node has, or leave network.interface out.",
            ) from error
    return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])


def _ipv6_of(interface: str) -> str:
    """Return an IPv6 address of a network interface, other than a link-local address; empty if there is none."""
    try:
        lines = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
    except OSError:  # this kernel has no IPv6
        return ""
    found = [words[0] for words in lines if len(words) == 6 and words[5] == interface and words[3] != _OF_THE_LINK]
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(found[0])) if found else ""


def address_towards(host: str) -> str:
    """Return the IPv4 or IPv6 address that this machine uses to reach `host`. No data is sent to `host`.

    Raises:
        UnreachableError: the name `host` cannot be resolved, or there is no route to it.
    """
    failed: OSError | None = None
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
            except OSError as error:
                failed = failed or error
    except OSError as error:
        failed = error
    raise UnreachableError(
        f"this machine cannot reach {host}: {failed}", hint="MASTER_ADDR must be reachable from every node."
    )
