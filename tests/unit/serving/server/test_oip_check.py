# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt oip-check``: our server passes every check, and a server that does it wrong fails those it should."""

from __future__ import annotations

import contextlib
import http.server
import json
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

import xpuruntime as xrt
from xpuruntime.cli.entry import run
from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.serving import Access, Server, Tls, TransportOptions
from xpuruntime.serving.conformance.checking import check_server
from xpuruntime.serving.conformance.result import ConformanceResult

pytest.importorskip("grpc", reason="needs grpc, of the extra serve")
pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")


@pytest.fixture(scope="module")
def digits() -> Iterator[Server]:
    with (
        xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session,
        Server({"digits": session}, http="127.0.0.1:0", grpc="127.0.0.1:0") as server,
    ):
        yield server


def test_our_server_passes_every_check(digits, capsys):
    code = run(["oip-check", digits.url, "--grpc", digits.grpc_address, "--shape", "image=2,1,8,8", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert [check for check in document["checks"] if check["outcome"] != "pass"] == []
    assert (code, document["schema"], document["models"]) == (0, "xpuruntime.oip-check/1", ["digits"])
    assert {check["transport"] for check in document["checks"]} == {"rest", "grpc"}
    assert any(check["detail"] == "logits FP32 [2, 10]" for check in document["checks"])


def test_a_server_with_tls(pem, capsys):
    certificate, key = pem
    with (
        xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session,
        Server({"digits": session}, http="127.0.0.1:0", grpc="127.0.0.1:0", tls=Tls(certificate, key)) as server,
    ):
        assert server.grpc_url == f"grpcs://{server.grpc_address}"
        for address in (server.grpc_address, server.grpc_url):
            result = check_server(server.url, address, tls_ca=certificate)
            assert [one for one in result.checks if one.outcome != "pass"] == []
        assert check_server(server.url, f"grpc://{server.grpc_address}", tls_ca=certificate).failed
        with pytest.raises(XpuRuntimeError, match=r"certificate.* Fix: state .* \(--tls-ca\)"):
            check_server(server.url)
    assert run(["oip-check", server.url, "--tls-ca", str(key)]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_every_datatype_of_a_model_is_checked(served):
    result = check_server(served.server.url, served.server.grpc_address, models=["echo"])
    assert result.failed == ()
    outcomes = {(one.transport, one.name): one.outcome for one in result.checks}
    assert outcomes["rest", "infer echo: JSON"] == "unobservable"
    assert outcomes["rest", "infer echo: binary tensors"] == "pass"
    assert outcomes["grpc", "infer echo: raw contents"] == "pass"
    assert result.exit_code == 0


def test_a_server_with_a_token(service, tmp_path):
    (tmp_path / "token").write_text("a-token-of-length")
    options = TransportOptions(access=Access(token="a-token-of-length"))
    with Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0", options=options) as server:
        call = ["oip-check", server.url, "--grpc", server.grpc_address, "--model", "digits"]
        assert run(call) == 1
        assert run([*call, "--token-file", str(tmp_path / "token")]) == 0


class Wrong(http.server.BaseHTTPRequestHandler):
    """Says yes to everything, names other outputs, and counts wrongly."""

    def do_GET(self) -> None:
        tensor = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
        self._send(
            {"name": "m", "version": 1, "platform": "", "inputs": [tensor], "outputs": [{**tensor, "name": "y"}]}
        )

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        output = {"name": "z", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
        self._send({"model_name": "m", "outputs": [output]})

    def _send(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def check(handler: type[Wrong], models: Sequence[str] = ("m",), **options: Any) -> ConformanceResult:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.block_on_close = False
    with serving(server) as port:
        return check_server(f"http://127.0.0.1:{port}", models=models, **options)


def test_a_wrong_server_fails_what_it_does_wrong():
    result = check(Wrong)
    assert result.exit_code == 1
    failed = {one.name: one.detail for one in result.failed}
    assert failed["server metadata"].endswith("Expected `str`, got `int` - at `$.version`")
    assert failed["unknown path is refused"].startswith("status 200")
    assert failed["infer m: JSON"] == "output 'z' is not in the metadata"
    assert failed["infer m: fewer elements than the shape is refused"].startswith("status 200")
    outcomes = {one.name: one.outcome for one in result.checks}
    assert outcomes["infer m: binary tensors"] == "unobservable"
    assert outcomes["health: live"] == "pass"


class Hostile(Wrong):
    """Answers each request with `head`, and then with `more` without an end."""

    head, more, pause = b"HTTP/1.1 200 OK\r\n", b"", 0.0

    def do_GET(self) -> None:
        try:
            self.wfile.write(self.head)
            while self.more:
                self.wfile.write(self.more)
                time.sleep(self.pause)
        except OSError:
            pass


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"head": b"HTTP/1.1 200 OK\r\n\r\n", "more": b"x" * 65536}, "longer than 8 MiB"),
        ({"head": b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\n"}, "length that no memory holds"),
        ({"head": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n"}, "is no HTTP: .*non-negative"),
        ({"head": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%s\r\n" % (b"f" * 17)}, "is no HTTP"),
        ({"head": b"", "more": b"HTTP/1.1 100 Continue\r\n\r\n", "pause": 0.01}, "timed out"),
        ({"more": b"A: b\r\n", "pause": 0.01}, "timed out"),
        ({"head": b"HTTP/1.1 200 OK\r\n\r\n", "more": b"x", "pause": 0.01}, "timed out"),
    ],
)
def test_an_answer_is_bounded_in_time_and_length(answer, reason):
    with pytest.raises(XpuRuntimeError, match=reason):
        check(type("Answers", (Hostile,), answer), seconds=0.2)


class Listing(Wrong):
    """Has facts of the wrong type in one place; says when a request comes too late, and refuses all inference."""

    facts: ClassVar[dict[str, object]] = {}
    listed: object = ({"name": "m", "state": "READY"},)
    late = ""

    def do_GET(self) -> None:
        if self.late and self.path.endswith(self.late):
            time.sleep(0.1)
        tensor = {"name": "x", "datatype": "FP32", "shape": [1]}
        facts = {"name": "m", "platform": "", "inputs": [tensor], "outputs": [tensor]}
        status = 404 if "no-such" in self.path or self.path.endswith("stats") else 200
        server = {"name": "s", "version": "1", "extensions": []}
        self._send({"error": ""} if status == 404 else {**facts, **self.facts} if "/m" in self.path else server, status)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(*((self.listed, 200) if self.path.endswith("index") else ({"error": "no"}, 400)))


def test_a_model_that_refuses_everything_was_not_checked():
    result = check(Listing, models=())
    assert (result.failed, result.models, result.exit_code) == ((), ("m",), 4)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"listed": [{"name": 1}]}, "$[0].name"),
        ({"listed": 1}, "array"),
        ({"facts": {"platform": None}}, "$.platform"),
        ({"facts": {"inputs": [1]}}, "$.inputs[0]"),
        ({"facts": {"inputs": [{"name": "x", "datatype": "FP32", "shape": ["1"]}]}}, "$.inputs[0].shape[0]"),
        ({"facts": {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-7]}]}}, "only -1 is a free"),
        ({"facts": {"outputs": [{"name": "x", "datatype": "FP32", "shape": []}] * 2}}, "listed twice"),
        ({"facts": {"versions": "1"}}, "$.versions"),
    ],
)
def test_facts_of_a_wrong_type_fail_a_check_that_names_the_place(wrong, place):
    result = check(type("Lists", (Listing,), wrong), models=())
    assert [place in one.detail for one in result.failed] == [True]


def test_what_was_left_out_is_said():
    result = check(type("Lists", (Listing,), {"listed": [{"name": f"m{at}"} for at in range(9)]}), models=())
    details = {one.name: one.detail for one in result.checks}
    assert details["models"].startswith("1 more are listed")
    tensor = {"name": "x", "datatype": "FP32", "shape": [2**32, 2**32]}
    result = check(type("Lists", (Listing,), {"facts": {"inputs": [tensor]}}), shapes={"y": [1]})
    details = {one.name: (one.outcome, one.detail) for one in result.checks}
    assert details["m: inputs are of the protocol"][0] == details["shape of y"][0] == "unobservable"


def test_a_server_that_is_late_is_not_waited_for_in_every_check():
    result = check(type("Lists", (Listing,), {"late": "models/me"}), models=["me"] * 3, seconds=0.05)
    late = [one.detail for one in result.checks if one.name.startswith("me")]
    assert late == ["no answer came in time"] * 3
    result = check(type("Lists", (Listing,), {"late": "models/me"}), models=["me"] * 4, seconds=0.05)
    assert result.checks[-1].detail == "not asked: 3 answers in a row did not come in time"


class Unwell(Wrong):
    """Has an error of its own for every request, and says so for those to the model alone."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send({"error": "out of order"} if "/m/" in self.path else {}, 500)


def test_any_status_of_an_error_is_one_if_it_has_an_error_object():
    result = check(Unwell)
    outcomes = {one.name: (one.outcome, one.detail) for one in result.checks}
    assert outcomes["infer m: no inputs is refused"] == ("pass", "status 500, where the protocol has typically 400")
    assert outcomes["unknown model: infer"] == ("fail", "status 500 without {'error': text}")
    assert outcomes["infer m: JSON"][0] == "unobservable"
    assert result.exit_code == 1


class Nulls(Wrong):
    """Answers rightly, with null for optional keys that have no value."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        document = json.loads(body) if body.endswith(b"}") and b"inputs" in body else None
        if document is None or "/m/" not in self.path:
            self._send({"error": "no request"}, 400)
            return
        output = {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1, 2], "parameters": None}
        facts = {"model_name": "m", "model_version": None, "id": document.get("id"), "parameters": None}
        self._send({**facts, "outputs": [output]})


def test_null_for_an_optional_key_fails_one_check_alone():
    outcomes = {one.name: (one.outcome, one.detail) for one in check(Nulls).checks}
    name = "infer m: optional keys are left out, not null"
    assert outcomes[name] == ("fail", "null in model_version, parameters, outputs.parameters")
    for name in ("infer m: JSON", "infer m: nested data", "infer m: one output"):
        assert outcomes[name][0] == "pass"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://a",
        "http://",
        "http://[::1",
        "http://a:b",
        "http://a:0",
        "http://a:65536",
        "http://..",
        "http://a?b=c",
    ],
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(InputError, match="is no URL of a server"):
        check_server(url)


def test_a_password_in_the_url_and_a_wrong_address_are_refused():
    with pytest.raises(InputError, match="Fix: leave it out, and use --token-file"):
        check_server("http://user:secret@127.0.0.1:1")
    for address in ("127.0.0.1", "https://127.0.0.1:1", "127.0.0.1:0", "::1:1", "grpcs://a"):
        with pytest.raises(InputError, match="is no address of gRPC"):
            check_server("http://127.0.0.1:1", address)


def test_a_server_that_is_not_there_is_said_so(digits):
    with pytest.raises(XpuRuntimeError, match=r"no server answers at http://127\.0\.0\.1:1: Connection refused"):
        check_server("http://127.0.0.1:1")
    with pytest.raises(XpuRuntimeError, match="is no HTTP"):
        check_server(f"http://{digits.grpc_address}")
