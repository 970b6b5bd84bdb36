# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt oip-check``."""

from __future__ import annotations

from typing import Annotated

import typer

from xpuruntime.cli.options import JsonOption, text_option
from xpuruntime.errors import InputError

__all__ = ["oip_check"]

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Address of REST, such as http://127.0.0.1:8000.", show_default=False)
]
GrpcOption = Annotated[
    str | None,
    text_option(
        "--grpc",
        metavar="HOST:PORT",
        help="Also check gRPC at this address; with TLS if the URL is https, or as grpcs://HOST:PORT.",
    ),
]
ModelOption = Annotated[
    list[str] | None,
    text_option("--model", metavar="NAME", help="Model to check inference with. Default: those listed, 8 at most."),
]
ShapeOption = Annotated[
    list[str] | None,
    text_option("--shape", metavar="INPUT=1,3,224,224", help="Shape of an input; other free dimensions are 1."),
]
TokenOption = Annotated[str | None, text_option("--token-file", metavar="FILE", help="File with the token to send.")]
AuthoritiesOption = Annotated[
    str | None,
    text_option(
        "--tls-ca", metavar="FILE", help="Trust these authorities of certificates, PEM. Default: those of the system."
    ),
]
TimeoutOption = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="Time within which each answer must come.")
]


def oip_check(
    url: UrlArgument,
    *,
    grpc: GrpcOption = None,
    model: ModelOption = None,
    shape: ShapeOption = None,
    token_file: TokenOption = None,
    tls_ca: AuthoritiesOption = None,
    timeout: TimeoutOption = "30s",
    json: JsonOption = False,
) -> int:
    """Check that a server speaks the Open Inference Protocol, this one or any other.

    Exits with 1 when a check failed, and with 4 when no inference could be checked.
    """
    from xpuruntime.cli.output import print_thing, working
    from xpuruntime.policies.quantities import read_duration
    from xpuruntime.serving.conformance.checking import check_server
    from xpuruntime.serving.options import read_token

    shapes = dict(_shape(one) for one in shape or ())
    token = None if token_file is None else read_token(token_file, "the token file")
    with working("asking the server", as_json=json):
        result = check_server(
            url,
            grpc,
            models=model or (),
            shapes=shapes,
            token=token,
            seconds=read_duration(timeout, "--timeout"),
            tls_ca=tls_ca,
        )
    print_thing(result, as_json=json)
    return result.exit_code


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = text.rpartition("=")
    if not equals or not name or not all(one.isascii() and one.isdecimal() for one in sizes.split(",")):
        raise InputError(f"--shape {text}: write INPUT=1,3,224,224")
    return name, tuple(map(int, sizes.split(",")))
