"""Network interfaces of this machine, and the address that one has."""

from __future__ import annotations

import fcntl
import socket
import struct

from hyperpod_ext.errors import JobFailedError

_SIOCGIFADDR = 0x8915
_ADDRESS_AT = 20


def address_of(interface: str) -> str:
    """IPv4 address of an interface.

    Raises:
        JobFailedError: there is no such interface here, or it has none.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise JobFailedError(
                f"network.interface is {interface}, which has no IPv4 address on {socket.gethostname()}: "
                f"{error.strerror}",
                hint=f"Interfaces here are {there}. Name one that every node has, or leave network.interface out.",
            ) from error
    return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])
