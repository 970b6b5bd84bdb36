# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt oip-check``: our server passes every check, and a server that does it wrong fails those it should."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

import xpuruntime as xrt
from xpuruntime.cli.entry import run
from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.serving import Access, Server, TransportOptions
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
    found = json.loads(capsys.readouterr().out)
    assert [one for one in found["checks"] if one["outcome"] != "pass"] == []
    assert (code, found["schema"], found["models"]) == (0, "xpuruntime.oip-check/1", ["digits"])
    assert {one["transport"] for one in found["checks"]} == {"rest", "grpc"}
    assert any(one["detail"] == "logits FP32 [2, 10]" for one in found["checks"])


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


def check(handler: type[Wrong]) -> ConformanceResult:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        return check_server(f"http://127.0.0.1:{server.server_port}", models=["m"])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_wrong_server_fails_what_it_does_wrong():
    result = check(Wrong)
    assert result.exit_code == 1
    failed = {one.name: one.detail for one in result.failed}
    assert failed["server metadata"] == "name and version are not text"
    assert failed["unknown path is refused"].startswith("status 200")
    assert failed["infer m: JSON"] == "output 'z' is not in the metadata"
    assert failed["infer m: fewer elements than the shape is refused"].startswith("status 200")
    outcomes = {one.name: one.outcome for one in result.checks}
    assert outcomes["infer m: binary tensors"] == "unobservable"
    assert outcomes["health: live"] == "pass"


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
        asked = json.loads(body) if body.endswith(b"}") and b"inputs" in body else None
        if asked is None or "/m/" not in self.path:
            self._send({"error": "no request"}, 400)
            return
        output = {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1, 2], "parameters": None}
        facts = {"model_name": "m", "model_version": None, "id": asked.get("id"), "parameters": None}
        self._send({**facts, "outputs": [output]})


def test_null_for_an_optional_key_fails_one_check_alone():
    outcomes = {one.name: (one.outcome, one.detail) for one in check(Nulls).checks}
    name = "infer m: optional keys are left out, not null"
    assert outcomes[name] == ("fail", "null in model_version, parameters, outputs.parameters")
    for name in ("infer m: JSON", "infer m: nested data", "infer m: one output"):
        assert outcomes[name][0] == "pass"


@pytest.mark.parametrize("url", ["", "ftp://a", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(InputError, match="is no URL of a server"):
        check_server(url)


def test_a_server_that_is_not_there_is_said_so(digits):
    with pytest.raises(XpuRuntimeError, match=r"no server answers at http://127\.0\.0\.1:1: Connection refused"):
        check_server("http://127.0.0.1:1")
    with pytest.raises(XpuRuntimeError, match="is no HTTP"):
        check_server(f"http://{digits.grpc_address}")


@pytest.mark.parametrize("shape", ["image", "=1", "image=1,x", "image="])
def test_what_is_no_shape_is_refused(shape, capsys):
    assert run(["oip-check", "http://127.0.0.1:1", "--shape", shape]) == 2
    assert "write INPUT=1,3,224,224" in capsys.readouterr().err
