# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt serve`` and ``xrt oip-check``."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpuruntime.cli.options import (
    HtmlOption,
    JsonOption,
    PolicyOption,
    TrustOption,
    devices,
    flag_option,
    text_option,
)
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.policies.kinds import Kind
    from xpuruntime.serving.models.settings import ServeSettings
    from xpuruntime.serving.server import Server
    from xpuruntime.serving.transport.options import Tls

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A model file, an artifact, a folder of versions 1, 2, ..., or a serve.yaml.",
        show_default=False,
    ),
]
ServedDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        "-d",
        help="Device, such as cpu or cuda:0, or several, such as cuda:0,cuda:1. Overrides the policy.",
        autocompletion=devices,
        show_default=False,
    ),
]
NameOption = Annotated[
    str | None, text_option("--name", metavar="NAME", help="Name of the model in URLs. Default: that of the file.")
]
ServeLockOption = Annotated[
    str | None, text_option("--lock", metavar="FILE", help="Serve exactly what this lock records, or refuse.")
]
HttpOption = Annotated[
    str | None, text_option("--http", metavar="HOST:PORT", help="Address of REST, or 'off'. Default: 127.0.0.1:8000.")
]
GrpcOption = Annotated[
    str | None, text_option("--grpc", metavar="HOST:PORT", help="Address of gRPC, or 'off'. Default: 127.0.0.1:8001.")
]
BatchOption = Annotated[
    int | None, text_option("--batch", metavar="ROWS", help="Batch requests together, up to this many rows.")
]
DelayOption = Annotated[
    str | None,
    text_option(
        "--delay", metavar="TIME", help="Longest time that a batch waits for more requests, such as 500us or 2ms."
    ),
]
RepositoryOption = Annotated[bool, flag_option("--repository", "Let clients list, load and unload models.")]
KeyOption = Annotated[
    str | None,
    text_option(
        "--key-file", metavar="FILE", help="File with the token that is required to list, load and unload models."
    ),
]
TokenOption = Annotated[
    str | None,
    text_option(
        "--token-file", metavar="FILE", help="File with the token that is required everywhere except for health."
    ),
]
CertificateOption = Annotated[
    str | None, text_option("--tls-certificate", metavar="FILE", help="Certificate of the server, PEM.")
]
PrivateKeyOption = Annotated[
    str | None, text_option("--tls-key", metavar="FILE", help="Key of the certificate, PEM without a passphrase.")
]
ClientsOption = Annotated[
    str | None,
    text_option(
        "--tls-clients", metavar="FILE", help="Accept only clients with a certificate of these authorities, PEM."
    ),
]
DrainOption = Annotated[
    str, typer.Option("--drain", metavar="TIME", help="Longest time to wait for accepted requests when shutting down.")
]

#: Seconds after which a thread that has Python to itself lets others run. The event loop asks for it at each of its
#: events, and waits so long beside a thread that decodes or encodes JSON; Python's own 5 ms add up.
_SWITCH_SECONDS = 0.0005
#: Objects between two collections of garbage, which the event loop waits for: the 100,000 of a command take 0.1 s.
_COLLECTED_AFTER = 10_000
_MICROSECONDS = re.compile(r"([0-9]{1,9})(us|ms|s)")


def serve(
    source: SourceArgument,
    *,
    name: NameOption = None,
    policy: PolicyOption = None,
    device: ServedDeviceOption = None,
    lock: ServeLockOption = None,
    trust: TrustOption = False,
    batch: BatchOption = None,
    delay: DelayOption = None,
    http: HttpOption = None,
    grpc: GrpcOption = None,
    repository: RepositoryOption = False,
    key_file: KeyOption = None,
    token_file: TokenOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: PrivateKeyOption = None,
    tls_clients: ClientsOption = None,
    drain: DrainOption = "30s",
    json: JsonOption = False,
) -> None:
    """Serve models over the Open Inference Protocol, REST and gRPC, until Ctrl-C, SIGTERM or SIGHUP.

    On shutdown, accepted requests are still answered, and new ones are refused.
    """
    from xpuruntime.cli.output import error_line, working
    from xpuruntime.policies.kinds import read_duration
    from xpuruntime.serving.models.settings import is_settings_file
    from xpuruntime.serving.server import Server
    from xpuruntime.serving.transport.options import read_token

    of_model = {
        "--name": name, "--policy": policy, "--device": device, "--lock": lock, "--batch": batch, "--delay": delay,
    }  # fmt: skip
    settings = _settings(source, of_model, trust=trust)
    settings = _with_listeners(settings, http, grpc, repository=repository, key_file=key_file)
    server = Server.from_settings(
        settings,
        token=None if token_file is None else read_token(token_file, "the token file"),
        tls=_tls(tls_certificate, tls_key, tls_clients),
        drain_seconds=read_duration(drain, "--drain"),
        gc_freeze=True,
    )
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    with _until_signalled() as stopped:
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            try:
                with working("loading models", as_json=json):
                    server.start()
                    _check_loaded(server, single=not is_settings_file(source))
                stopped.loaded = True
            except _StoppedLoading:
                error_line("ended before the models were loaded", label="note")
                return
            gc.set_threshold(_COLLECTED_AFTER, *thresholds[1:])
            _say(server, as_json=json)
            if token_file is None and tls_clients is None:
                _warn_of_open_addresses(server)
            stopped.wait()
        finally:
            sys.setswitchinterval(interval)
            gc.set_threshold(*thresholds)
            server.close()
    _say_unanswered(server)


def _settings(source: str, of_model: Mapping[str, Any], *, trust: bool) -> ServeSettings:
    from xpuruntime.policies.kinds import Text
    from xpuruntime.serving.batching.settings import BatchSettings
    from xpuruntime.serving.models.model_settings import ModelSettings, check_model_name
    from xpuruntime.serving.models.settings import is_settings_file, settings_of_source

    _check("--name", Text(what="a name", parse=check_model_name), of_model["--name"])
    places = (of_model["--device"] or "").split(",")
    for device in places if of_model["--device"] is not None else ():
        _check("--device", ModelSettings.KINDS["device"], device)
    _check("--batch", BatchSettings.KINDS["max_batch_size"], of_model["--batch"])
    options = [option for option, value in of_model.items() if value is not None] + ["--trust"] * trust
    batching = {"max_batch_size": of_model["--batch"], "max_queue_delay_us": _microseconds(of_model["--delay"])}
    if of_model["--delay"] is not None and of_model["--batch"] is None and not is_settings_file(source):
        raise InputError("--delay: without --batch no request waits for others. Fix: add --batch 8")
    stated = {key: value for key, value in batching.items() if value is not None}
    keys = {key: of_model[f"--{key}"] for key in ("policy", "device", "lock")}
    if len(places) > 1:
        keys = {**keys, "device": None, "devices": places}
    model = {**keys, "trust": trust, "batching": stated or None}
    return settings_of_source(source, model, name=of_model["--name"], given=options)


def _check(option: str, kind: Kind, value: Any) -> None:
    from xpuruntime.policies.document import Refused

    try:
        if value is not None:
            kind.check(value)
    except Refused as refused:
        raise InputError(f"{option}: {refused.message()}") from None


def _microseconds(text: str | None) -> int | None:
    if text is None:
        return None
    match = _MICROSECONDS.fullmatch(text.strip())
    if match is None:
        raise InputError(f"--delay is {text!r}. Fix: write a whole number and us, ms or s, such as 500us")
    return int(match[1]) * {"us": 1, "ms": 1000, "s": 1_000_000}[match[2]]


def _with_listeners(
    settings: ServeSettings, http: str | None, grpc: str | None, *, repository: bool, key_file: str | None
) -> ServeSettings:
    plain = {}
    for section, address in (("http", http), ("grpc", grpc)):
        if address is not None:
            stated, listen = getattr(settings, section), None if address == "off" else address
            _check(f"--{section}", stated.KINDS["listen"], listen)
            plain[section] = stated.replace(listen=listen)
    admin = settings.admin
    if repository:
        admin = admin.replace(repository=True)
    if key_file is not None:
        admin = admin.replace(key_file=key_file)
    settings = settings.replace(**plain, admin=admin)
    if settings.http.listen is None and settings.grpc.listen is None:
        raise InputError("neither REST nor gRPC is on, so nothing is served. Fix: state --http or --grpc")
    return settings


def _tls(certificate: str | None, key: str | None, clients: str | None) -> Tls | None:
    from xpuruntime.serving.transport.options import Tls

    if certificate is None or key is None:
        if certificate is not key or clients is not None:
            raise InputError("TLS needs a certificate and its key. Fix: state --tls-certificate and --tls-key")
        return None
    return Tls(certificate, key, clients)


def _check_loaded(server: Server, *, single: bool) -> None:
    """Raise where no model could be loaded, with the error of the first; warn of others."""
    from xpuruntime.cli.output import error_line

    names = list(dict.fromkeys(model["name"] for model in server.models.index()))
    if not names:
        raise InputError("the file names no model. Fix: state one under models")
    failed = {name: error for name in names if (error := server.models.failure(name)) is not None}
    if failed and (single or len(failed) == len(names)):
        raise next(iter(failed.values()))
    for name, error in failed.items():
        error_line(f"{name} is not served: {error}", label="warning")


def _say(server: Server, *, as_json: bool) -> None:
    from xpuruntime.cli.output import print_json, print_plain, results

    names = list(dict.fromkeys(model["name"] for model in server.models.index()))
    grpc = server.grpc_address
    if as_json:
        record = {"schema": "xpuruntime.serve.listening/1", "http": server.url or None, "grpc": grpc or None}
        print_json({**record, "models": names})
    else:
        where = " and ".join(filter(None, (server.url, server.grpc_url)))
        print_plain(f"serving {', '.join(names)} at {where}")
    results().flush()


def _warn_of_open_addresses(server: Server) -> None:
    from xpuruntime.cli.output import error_line
    from xpuruntime.serving.transport.gate import is_loopback

    for address in filter(None, (server.http_address, server.grpc_address)):
        if not is_loopback(address.rpartition(":")[0].strip("[]")):
            text = f"{address} can be reached from other machines, and no token is asked for; --token-file sets one"
            error_line(text, label="warning")


def _say_unanswered(server: Server) -> None:
    from xpuruntime.cli.output import error_line

    if not server.drained:
        error_line("requests were not answered in the time of --drain", label="warning")


class _StoppedLoading(KeyboardInterrupt):
    """A signal came before anything was served: no request is waited for."""


def _until_signalled() -> Any:
    """Return a context manager with a latch that Ctrl-C, SIGTERM or SIGHUP sets."""
    # Until its `loaded` is set, the first one raises. A second one interrupts at once.
    import signal
    from contextlib import contextmanager

    from xpuruntime.runtime.interruptible_waits import Latch

    class Stopped(Latch):
        loaded = False

    @contextmanager
    def handled() -> Iterator[Stopped]:
        stopped = Stopped()
        watched = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which nohup sets
            watched.append(signal.SIGHUP)

        def stop(number: int, frame: Any) -> None:
            del number, frame
            if stopped.is_set():
                raise KeyboardInterrupt
            stopped.set()
            if not stopped.loaded:
                raise _StoppedLoading

        before = {number: signal.signal(number, stop) for number in watched}
        try:
            yield stopped
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return handled()


UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Address of REST, such as http://127.0.0.1:8000.", show_default=False)
]
CheckGrpcOption = Annotated[
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
CheckTokenOption = Annotated[
    str | None, text_option("--token-file", metavar="FILE", help="File with the token to send.")
]
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
    grpc: CheckGrpcOption = None,
    model: ModelOption = None,
    shape: ShapeOption = None,
    token_file: CheckTokenOption = None,
    tls_ca: AuthoritiesOption = None,
    timeout: TimeoutOption = "30s",
    html: HtmlOption = None,
    json: JsonOption = False,
) -> int:
    """Check that a server speaks the Open Inference Protocol, this one or any other.

    Exits with 1 when a check failed, and with 4 when no inference could be checked.
    """
    from xpuruntime.cli.output import print_and_save, working
    from xpuruntime.policies.kinds import read_duration
    from xpuruntime.serving.conformance.checking import check_server
    from xpuruntime.serving.transport.options import read_token

    shapes = dict(_shape(text) for text in shape or ())
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
    print_and_save(result, html=html, as_json=json)
    return result.exit_code


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = text.rpartition("=")
    if not equals or not name or not all(size.isascii() and size.isdecimal() for size in sizes.split(",")):
        raise InputError(f"--shape {text} cannot be read. Fix: write INPUT=1,3,224,224")
    return name, tuple(map(int, sizes.split(",")))
