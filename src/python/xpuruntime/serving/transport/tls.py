# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Tls`: certificate and key of a server, and whose clients it lets in."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.files.paths import reason_of, user_path
from xpuruntime.files.reading import read_regular

if TYPE_CHECKING:
    import os

__all__ = ["Tls", "read_authorities"]

_LARGEST = 16 << 20


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a server's identity, in PEM.

    Parameters
    ----------
    certificate, key : str or path
        The key without a passphrase.
    client_ca : str or path, optional
        Certificates of authorities; only clients with a certificate of one of them are let in.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    client_ca: str | os.PathLike[str] | None = None

    def check(self) -> None:
        """Raise InputError where a file is missing, is no PEM, or the key is not that of the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        what = "the certificate and key of TLS"
        try:
            context.load_cert_chain(user_path(self.certificate, what), user_path(self.key, what), password=_refuse)
            if self.client_ca is not None:
                what = "the certificates of client authorities"
                context.load_verify_locations(user_path(self.client_ca, what))
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise InputError(
                f"{what} cannot be used: {reason_of(error)}. Fix: name PEM files that belong together"
            ) from None

    def for_uvicorn(self) -> dict[str, Any]:
        """Return the arguments of uvicorn's configuration."""
        found: dict[str, Any] = {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        if self.client_ca is not None:
            found |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return found

    def for_grpc(self) -> Any:
        """Return the credentials of a gRPC server."""
        import grpc

        pair = (read_regular(self.key, _LARGEST), read_regular(self.certificate, _LARGEST))
        authorities = None if self.client_ca is None else read_regular(self.client_ca, _LARGEST)
        return grpc.ssl_server_credentials([pair], authorities, authorities is not None)


def read_authorities(path: str | os.PathLike[str], what: str) -> bytes:
    """Return the certificates in a PEM file. Raises InputError for another file; `what` names it."""
    try:
        data = read_regular(user_path(path, what), _LARGEST)
        ssl.create_default_context(cadata=data.decode("latin-1"))
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InputError(f"{what} {path} cannot be used: {reason_of(error)}. Fix: name a PEM file") from None
    return data


def _refuse() -> str:
    raise ValueError("the key has a passphrase")
