# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks over REST, by a client that bounds the time and the length of each answer."""

from __future__ import annotations

import functools
import http.client
import io
import ssl
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.serving.conformance.result import (
    Checker,
    FailedCheck,
    UnobservableCheck,
    check_outputs,
    need_same,
    probe_inputs,
)
from xpuruntime.serving.messages import InferRequest, InferResponse, RequestedOutput
from xpuruntime.serving.protocol.datatypes import DATATYPES
from xpuruntime.serving.protocol.rest import NoJsonFormError, read_response, write_request

if TYPE_CHECKING:
    import socket

    from _typeshed import WriteableBuffer

#: Bytes that are read of an answer: with tensors, and with facts alone, which take many times as much once decoded.
_MOST_OF_TENSORS, _MOST_OF_FACTS = 128 << 20, 8 << 20


class Answer(NamedTuple):
    """A response; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self, kind: Any = Any) -> Any:
        """Return the body as JSON of a type; raise FailedCheck where it is none."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.ValidationError as error:
            raise FailedCheck(f"the answer is none of the protocol: {error}") from None
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise FailedCheck(f"status {self.status} with a body that is no JSON: {error}") from None


class HttpClient:
    """Requests to one server."""

    def __init__(self, url: str, token: str | None, seconds: float, authorities: bytes | None = None) -> None:
        self._authorities = None if authorities is None else authorities.decode("latin-1")
        self._scheme, self._host, self._port, self._path = _parts_of(url)
        self._seconds = seconds
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Send one request on a connection of its own."""
        kind: Any = http.client.HTTPConnection
        connection_options: dict[str, Any] = {}
        if self._scheme == "https":
            kind, connection_options = (
                http.client.HTTPSConnection,
                {"context": ssl.create_default_context(cadata=self._authorities)},
            )
        deadline = time.monotonic() + self._seconds
        most = _MOST_OF_TENSORS if path.endswith("/infer") else _MOST_OF_FACTS
        connection = kind(self._host, self._port, timeout=self._seconds, **connection_options)
        connection.connect()
        connected = connection.sock
        connection.sock = _Bounded(connected, deadline, most)
        try:
            connection.request(method, self._path + path, body, {**self._headers, **headers})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        except (ValueError, OverflowError) as error:  # such as the length of a chunk
            raise http.client.HTTPException(str(error)) from None
        except MemoryError:
            raise FailedCheck("the answer states a length that no memory holds") from None
        finally:
            connected.close()


def _parts_of(url: str) -> tuple[str, str, int | None, str]:
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise _no_url(url, f": {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise _no_url(url, "")
    if port == 0:
        raise _no_url(url, ": no server has port 0")
    if parts.username is not None or parts.password is not None:
        raise InputError("the URL has a user or password, which is not sent. Fix: leave it out, and use --token-file")
    if parts.query or parts.fragment:
        raise _no_url(url, ": it has a query or fragment")
    return parts.scheme, parts.hostname, port, urllib.parse.quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")


def _no_url(url: str, why: str) -> InputError:
    return InputError(f"{url[:80]!r} is no URL of a server{why}. Fix: write http://HOST:PORT")


class _Bounded(io.RawIOBase):
    """A socket as `http.client` uses one, which reads until a deadline and a count of bytes."""

    def __init__(self, connected: socket.socket, deadline: float, most: int) -> None:
        self._socket, self._deadline, self._most, self._left = connected, deadline, most, most
        self.sendall = connected.sendall

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(seconds)
        count = self._socket.recv_into(buffer)
        self._left -= count
        if self._left < 0:
            raise FailedCheck(f"the answer is longer than {self._most >> 20} MiB, and was not read to its end")
        return count

    def close(self) -> None:
        """Leave the socket open: the answer may still be read when `http.client` ends the connection."""


_UNKNOWN = "xrt-oip-check-no-such-model"


# As metadata and lists of models must be; null for an optional key is judged with the answers of inference.
class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]


class _Metadata(msgspec.Struct):
    name: str
    platform: str
    versions: list[str] | None = None
    inputs: list[_Tensor] | None = None
    outputs: list[_Tensor] | None = None


class _Listed(msgspec.Struct):
    name: str
    state: str | None = None


class _Statistics(msgspec.Struct):
    model_stats: list[_Listed]


class _Server(msgspec.Struct):
    name: str
    version: str
    extensions: list[str]


class _Nullable(msgspec.Struct):
    outputs: list[dict[str, msgspec.Raw]]


class RestChecks:
    """Checks of one server over REST."""

    def __init__(self, client: HttpClient) -> None:
        self.ask = client.ask
        self.checker = Checker("rest")
        self.server: Mapping[str, Any] = {}
        self.answers: dict[str, InferResponse] = {}
        #: Names of inputs of the models that were checked.
        self.inputs: set[str] = set()
        self._nulls: dict[str, list[str]] = {}

    def run_server(self) -> None:
        """Check what is there without a model."""
        run = self.checker.run
        run("health: live", lambda: self._need("GET", "/v2/health/live"))
        run("health: ready", lambda: self._need("GET", "/v2/health/ready"))
        run("server metadata", self._metadata)
        run("unknown path is refused", lambda: self._refused(self.ask("GET", "/v2/xrt-no-such-path"), body=False))
        run("unknown model: error object", lambda: self._refused(self.ask("GET", f"/v2/models/{_UNKNOWN}")))
        run(
            "unknown model: infer",
            lambda: self._refused(self.ask("POST", f"/v2/models/{_UNKNOWN}/infer", b'{"inputs":[]}')),
        )

    def models(self) -> list[str]:
        """Return the models that the server lists, by the extensions that list them."""
        for method, path, kind in (
            ("POST", "/v2/repository/index", list[_Listed]),
            ("GET", "/v2/models/stats", _Statistics),
        ):
            try:
                answer = self.ask(method, path, b"{}" if method == "POST" else None)
                document = answer.json(kind) if answer.status == 200 else []
            except (OSError, http.client.HTTPException):
                continue
            except FailedCheck as error:
                self.checker.fail(f"models that {path} lists", str(error))
                continue
            listed = document.model_stats if isinstance(document, _Statistics) else document
            names = {entry.name for entry in listed if entry.state in (None, "READY")}
            if names:
                return sorted(names)
        return []

    def run_model(self, model: str, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check one model."""
        run, path = self.checker.run, f"/v2/models/{quote(model, safe='')}"
        metadata: dict[str, Any] = {}
        if not run(f"{model}: metadata", lambda: self._model_metadata(path, metadata, model)):
            return
        self.inputs.update(input_["name"] for input_ in metadata["inputs"])
        run(f"{model}: ready", lambda: self._need("GET", f"{path}/ready"))
        versions = metadata.get("versions") or ()
        if versions:
            run(
                f"{model}: path of a version",
                lambda: self._need("GET", f"{path}/versions/{quote(versions[0], safe='')}"),
            )
        inputs: list[Any] = []

        def probe() -> None:
            inputs.extend(probe_inputs(metadata, shapes))

        if not run(f"{model}: inputs are of the protocol", probe):
            return
        request = InferRequest(model, inputs, id="xrt-oip-check")
        binary = "binary_tensor_data" in self.server.get("extensions", ())
        run(f"infer {model}: JSON", lambda: self._infer_json(path, request, metadata))
        run(f"infer {model}: optional keys are left out, not null", lambda: self._no_nulls(model))
        run(f"infer {model}: nested data", lambda: self._again(path, request, "nested data", nested=True))
        run(f"infer {model}: one output", lambda: self._one_output(path, request))
        run(f"infer {model}: binary tensors", lambda: self._binary(path, request, metadata, offered=binary))
        if any(DATATYPES[input_.datatype].only_raw for input_ in inputs):
            return
        self._run_errors(path, request)

    def _run_errors(self, path: str, request: InferRequest) -> None:
        run, model = self.checker.run, request.model
        body, _ = write_request(request)
        plain = msgspec.json.decode(body)

        def changed(**change: Any) -> bytes:
            first, *rest = plain["inputs"]
            return msgspec.json.encode({**plain, "inputs": [{**first, **change}, *rest]})

        wrong = {
            "malformed JSON": body[:-1],
            "no inputs": b"{}",
            "unknown input": changed(name="xrt_no_such_input"),
            "unknown datatype": changed(datatype="FP8"),
            "fewer elements than the shape": changed(data=plain["inputs"][0]["data"][:-1]),
            "negative shape": changed(shape=[-1]),
            "unknown output": msgspec.json.encode({**plain, "outputs": [{"name": "xrt_no_such_output"}]}),
        }
        for name, sent in wrong.items() if plain["inputs"] else ():
            run(f"infer {model}: {name} is refused", functools.partial(self._refuses, f"{path}/infer", sent))
        run("health: live after wrong requests", lambda: self._need("GET", "/v2/health/live"))

    def _need(self, method: str, path: str) -> str:
        answer = self.ask(method, path)
        if answer.status != 200:
            raise FailedCheck(f"{path} has status {answer.status}")
        return ""

    def _refuses(self, path: str, body: bytes) -> str:
        return self._refused(self.ask("POST", path, body))

    def _refused(self, answer: Answer, *, body: bool = True) -> str:
        if not 400 <= answer.status < 600:
            raise FailedCheck(f"status {answer.status}, and not one of an error")
        if body:
            document = answer.json()
            if not isinstance(document, dict) or not isinstance(document.get("error"), str):
                raise FailedCheck(f"status {answer.status} without {{'error': text}}")
        typical = answer.status < 500 or answer.status == 501
        return f"status {answer.status}{'' if typical else ', where the protocol has typically 400'}"

    def _metadata(self) -> str:
        answer = self.ask("GET", "/v2")
        if answer.status != 200:
            raise FailedCheck(f"status {answer.status}")
        metadata = answer.json(_Server)
        self.server = msgspec.to_builtins(metadata)
        return f"{metadata.name} {metadata.version}: {', '.join(metadata.extensions) or 'no extension'}"

    def _model_metadata(self, path: str, into: dict[str, Any], model: str) -> None:
        answer = self.ask("GET", path)
        if answer.status != 200:
            raise FailedCheck(f"status {answer.status}")
        metadata = answer.json(_Metadata)
        if metadata.name != model:
            raise FailedCheck(f"name is {metadata.name!r}")
        for side in (metadata.inputs, metadata.outputs):
            names = [tensor.name for tensor in side or ()]
            for tensor in side or ():
                if tensor.datatype not in DATATYPES:
                    raise FailedCheck(f"{tensor.name!r} has the datatype {tensor.datatype!r}")
                if min(tensor.shape, default=0) < -1:
                    raise FailedCheck(
                        f"{tensor.name!r} has the shape {tensor.shape}, where only -1 is a free dimension"
                    )
                if names.count(tensor.name) > 1:
                    raise FailedCheck(f"{tensor.name!r} is listed twice")
        if not metadata.inputs:
            raise UnobservableCheck("it states no inputs, so no request can be made")
        into.update(msgspec.to_builtins(metadata))
        into["outputs"] = into["outputs"] or []

    def _infer(self, path: str, request: InferRequest, **how: bool) -> tuple[InferResponse, Answer]:
        body, length = write_request(request, **how)
        headers = {"Content-Type": "application/json"}
        if length is not None:
            headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(length)}
        answer = self.ask("POST", f"{path}/infer", body, **headers)
        if answer.status != 200:
            raise UnobservableCheck(
                f"status {answer.status} for probe inputs: {answer.body[:200].decode(errors='replace')}"
            )
        stated = answer.headers.get("inference-header-content-length")
        if stated is not None and not (stated.isascii() and stated.isdecimal() and len(stated) < 16):
            raise FailedCheck(f"Inference-Header-Content-Length is {stated!r}")
        return read_response(answer.body, None if stated is None else int(stated)), answer

    def _infer_json(self, path: str, request: InferRequest, metadata: Mapping[str, Any]) -> str:
        try:
            response, answer = self._infer(path, request)
        except NoJsonFormError as error:
            raise UnobservableCheck(str(error)) from None
        check_outputs(response, metadata, request.model)
        if response.id != request.id:
            raise FailedCheck(f"the id {request.id!r} came back as {response.id!r}")
        if not answer.headers.get("content-type", "").startswith("application/json"):
            raise FailedCheck(f"Content-Type is {answer.headers.get('content-type')!r}")
        self.answers[request.model] = response
        self._nulls[request.model] = _null_keys(answer)
        return ", ".join(f"{output.name} {output.datatype} {list(output.shape)}" for output in response.outputs)

    def _first(self, model: str) -> InferResponse:
        if model not in self.answers:
            raise UnobservableCheck("there is no answer in JSON to compare with")
        return self.answers[model]

    def _no_nulls(self, model: str) -> None:
        self._first(model)
        if self._nulls[model]:
            raise FailedCheck(f"null in {', '.join(self._nulls[model])}")

    def _again(self, path: str, request: InferRequest, what: str, **how: bool) -> None:
        first = self._first(request.model)
        need_same(first, self._infer(path, request, **how)[0], what)

    def _one_output(self, path: str, request: InferRequest) -> str:
        name = self._first(request.model).outputs[-1].name
        single_request = InferRequest(request.model, request.inputs, outputs=[RequestedOutput(name)])
        names = [output.name for output in self._infer(path, single_request)[0].outputs]
        if names != [name]:
            raise FailedCheck(f"{name!r} was asked for, and {names} came")
        return name

    def _binary(self, path: str, request: InferRequest, metadata: Mapping[str, Any], *, offered: bool) -> str:
        if not offered:
            raise UnobservableCheck("the server does not list binary_tensor_data")
        response, answer = self._infer(path, request, binary=True)
        check_outputs(response, metadata, request.model)
        if "inference-header-content-length" not in answer.headers:
            raise FailedCheck("binary_data_output was asked for, and the outputs came in JSON")
        if request.model in self.answers:
            need_same(self.answers[request.model], response, "the binary answer")
        self.answers.setdefault(request.model, response)
        body, length = write_request(request, binary=True)
        lying = self.ask("POST", f"{path}/infer", body, **{"Inference-Header-Content-Length": str(len(body) + 1)})
        self._refused(lying)
        lying = self.ask("POST", f"{path}/infer", body[:-1], **{"Inference-Header-Content-Length": str(length)})
        self._refused(lying)
        return "and lengths that lie are refused"


def _null_keys(answer: Answer) -> list[str]:
    null_keys = [key for key, value in answer.json(dict[str, msgspec.Raw]).items() if bytes(value) == b"null"]
    outputs = answer.json(_Nullable).outputs
    within = {key for output in outputs for key, value in output.items() if bytes(value) == b"null"}
    return [*null_keys, *(f"outputs.{key}" for key in sorted(within))]
