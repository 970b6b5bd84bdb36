# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Addresses that a server listens on: read, bound, and shown with the ports that they got."""

from __future__ import annotations

import re
import socket

from xpuruntime.argument_types import TEXT, check_types
from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.files.paths import reason_of

__all__ = ["bind", "check_apart", "read_address", "shown", "unusable"]

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.*_-]+)):([0-9]{1,5})")
_EVERYWHERE = frozenset({"0.0.0.0", "::"})


def read_address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, such as ``127.0.0.1:8000`` or ``[::1]:0``."""
    check_types({option: TEXT}, {option: text})
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise InputError(f"{option} is {text[:80]!r}. Fix: write HOST:PORT, such as 127.0.0.1:8000, or [::1]:0")
    host = match[1] or match[2]
    return "0.0.0.0" if host == "*" else host, int(match[3])


def check_apart(first: str, second: str) -> None:
    """Refuse two addresses that share one: the second listener would have none of it, or a part of it alone."""
    hosts, ports = zip(*(read_address(text, "address") for text in (first, second)), strict=True)
    if ports[0] != ports[1] or ports[0] == 0:
        return
    try:
        found = [{str(one[4][0]) for one in socket.getaddrinfo(host, ports[0])} for host in hosts]
    except OSError:
        return  # said as it is bound
    if found[0] & found[1] or _EVERYWHERE & (found[0] | found[1]):
        raise InputError(f"http {first} and grpc {second} are the same address. Fix: give one of them another port")


def bind(text: str, option: str) -> socket.socket:
    """Return a socket that is bound to an address; with port 0, to a free one.

    Raises
    ------
    InputError
        It is no address.
    XpuRuntimeError
        The address is in use, or is none of this machine.
    """
    host, port = read_address(text, option)
    made: socket.socket | None = None
    try:
        family, kind, number, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, number)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(where)
        made.listen(2048)  # it is ours from now on: bound alone, another process could take it too
    except OSError as error:
        if made is not None:
            made.close()
        raise unusable(text, option, reason_of(error)) from None
    return made


def unusable(text: str, option: str, reason: str) -> XpuRuntimeError:
    """Return the error of an address that cannot be listened on."""
    return XpuRuntimeError(
        f"{option} {text} cannot be listened on: {reason}. Fix: stop what uses it, or name another, such as with port 0"
    )


def shown(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
