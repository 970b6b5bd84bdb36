# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Access`: who may call what, and which names may stand in a path."""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from xpuruntime.errors import InputError
from xpuruntime.files.paths import reason_of, user_path
from xpuruntime.files.reading import read_regular
from xpuruntime.serving.status import ServingError, Status

__all__ = ["Access", "check_model", "check_version", "is_loopback", "read_token"]


def is_loopback(host: str) -> bool:
    """Return whether an address or name is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")


_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Access:
    """What clients may do.

    Parameters
    ----------
    token : str, optional
        All routes but those of health ask for it, as ``Authorization: Bearer TOKEN``.
    admin_token : str, optional
        Routes that change the repository ask for it in place of `token`.
    repository : bool
        Whether clients may list, load and unload models of the repository.
    """

    token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    repository: bool = False

    def check(self, authorization: str, *, admin: bool = False) -> None:
        """Raise unless a caller with this ``Authorization`` may call, also what changes the repository."""
        token = self.admin_token if admin and self.admin_token is not None else self.token
        if token is None:
            return
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            which = "the key of the administrator" if token is self.admin_token else "a token"
            raise ServingError(
                Status.UNAUTHENTICATED, f"this server asks for {which}. Fix: send Authorization: Bearer TOKEN"
            )

    def check_site(self, origin: str, site: str, host: str, *, local: bool, admin: bool) -> None:
        """Raise where a browser sent a request for a page of another site, which a user only looked at.

        Parameters
        ----------
        origin, site, host : str
            The headers ``Origin``, ``Sec-Fetch-Site`` and ``Host``.
        local, admin : bool
            Whether it came to an address that only this machine reaches, and changes the repository: a name that was
            rebound to that address is foreign.
        """
        foreign = site not in ("", "same-origin", "none")
        try:
            own = urlsplit(f"//{host}")
            foreign = foreign or (origin != "" and urlsplit(origin).netloc.lower() != own.netloc.lower())
            if self.token is None and local and host and (origin or site or admin):
                foreign = foreign or not is_loopback(own.hostname or "")
        except ValueError:
            foreign = True
        if foreign:
            raise ServingError(
                Status.PERMISSION_DENIED,
                "the request is of a page of another site. Fix: send it from a program, to the server's address",
            )

    def check_repository(self) -> None:
        """Raise unless the repository is open to clients."""
        if not self.repository:
            raise ServingError(
                Status.PERMISSION_DENIED,
                "the model repository is closed to clients, as it is by default. "
                "Fix: start the server with --repository, or repository: true under admin",
            )


def read_token(path: str, what: str) -> str:
    """Return the token in a file: its one line, of 16 characters at least.

    Raises
    ------
    InputError
        The file cannot be read, or has no such line.
    """
    try:
        text = read_regular(user_path(path, what), 64 << 10).decode("latin-1").strip()
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {reason_of(error)}. Fix: name a file with a token") from None
    if len(text) < 16 or len(text.split()) != 1 or not text.isascii():
        raise InputError(f"{what} {path} has no token. Fix: write one line of 16 characters of ASCII or more")
    return text


def check_model(name: str) -> str:
    """Return the name of a model. Raises for one that no model can have."""
    if _NAME.fullmatch(name) is None or name in (".", ".."):
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"{name[:80]!r} cannot be the name of a model. Fix: 1 to 128 letters, digits, '.', '_' and '-'",
        )
    return name


def check_version(version: str) -> str:
    """Return a version, or nothing for the newest. Raises for one that no model can have."""
    if version and (_NAME.fullmatch(version) is None or version in (".", "..")):
        raise ServingError(
            Status.INVALID_ARGUMENT, f"{version[:80]!r} cannot be a version. Fix: a number such as 1, or none"
        )
    return version
