# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt serve``: says where it listens, serves until a signal, and refuses what it cannot serve."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

from xpuruntime.inference import InferenceSession

pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
pytest.importorskip("grpc", reason="needs grpc, of the extra serve")


ANY = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")


@pytest.fixture
def start():
    started = []

    def run(*arguments: str) -> tuple[subprocess.Popen, str]:
        code = "from xpuruntime.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        return process, line

    yield run
    for process in started:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def hangup(action):
    """Have processes that are started inherit what SIGHUP does."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def end(process: subprocess.Popen, number: int = signal.SIGTERM) -> tuple[int, str]:
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def ask(url: str, path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"{url}{path}", data, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["term", "hup"])
def test_a_model_is_served_until_a_signal(start, digits, number):
    with hangup(signal.SIG_DFL):  # the tests may run under nohup
        process, line = start(digits, *ANY)
    words = line.split()
    assert words[:3] == ["serving", "digits", "at"]
    assert words[4:5] == ["and"]
    assert words[5].startswith("grpc://127.0.0.1:")
    image = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)
    tensor = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": image.ravel().tolist()}
    answer = ask(words[3], "/v2/models/digits/infer", {"inputs": [tensor]})
    with InferenceSession(digits, device="cpu") as session:
        expected = session.run({"image": image})["logits"]
    np.testing.assert_allclose(np.array(answer["outputs"][0]["data"]).reshape(1, 10), expected, rtol=1e-4, atol=1e-5)
    assert end(process, number) == (0, "")


TELLING = """
import atexit, gc, signal, sys
from xpuruntime.cli import main


def tell(*_):
    print(sys.getswitchinterval(), gc.get_threshold()[0], flush=True)


gc.set_threshold(100_000)
signal.signal(signal.SIGUSR1, tell)
atexit.register(tell)
main()
"""


def test_others_wait_little_for_python_while_it_serves(digits):
    command = [sys.executable, "-c", TELLING, "serve", digits, *ANY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("serving ")
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.readline().split() == ["0.0005", "10000"]
            process.terminate()
            assert process.stdout.readline().split() == ["0.005", "100000"]
        finally:
            process.kill()


SLOW = """
import pathlib, time
import xpuruntime.inference.session as session
open_session = session.InferenceSession.__init__
def slow(self, *arguments, **options):
    pathlib.Path("loading").touch()
    {wait}
    open_session(self, *arguments, **options)
session.InferenceSession.__init__ = slow
from xpuruntime_command import main
main()
"""


@pytest.mark.parametrize(
    ("wait", "number"),
    [
        ("for _ in range(6000): time.sleep(0.01)", signal.SIGTERM),
        ("import ctypes; ctypes.CDLL(None).sleep(60)", signal.SIGHUP),  # as a library that does not return
    ],
    ids=["term", "native"],
)
def test_a_signal_ends_the_load(digits, tmp_path, wait, number):
    (scratch := tmp_path / "scratch").mkdir()
    with hangup(signal.SIG_DFL):
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW.format(wait=wait), "serve", digits, *ANY, "--drain", "2s"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(scratch)},
        )  # fmt: skip
    until = time.monotonic() + 60
    while not (tmp_path / "loading").exists() and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "", "note: ended before the models were loaded\n")
    assert [path.name for path in scratch.iterdir() if path.name != ".ses"] == []


def test_a_server_under_nohup_outlives_the_terminal(start, digits):
    with hangup(signal.SIG_IGN):  # as nohup does
        process, line = start(digits, "--http", "127.0.0.1:0", "--grpc", "off")
    process.send_signal(signal.SIGHUP)
    assert ask(line.split()[3], "/v2/health/ready") == {"ready": True}
    assert end(process) == (0, "")


def test_options_become_settings(start, digits, tmp_path):
    token = tmp_path / "token"
    token.write_text("a token of some length\n".replace(" ", "-"))
    process, line = start(
        digits, "--http", "127.0.0.1:0", "--grpc", "off", "--name", "nice", "--batch", "8", "--delay", "2ms",
        "--device", "cpu,cpu", "--repository", "--key-file", str(token), "--json",
    )  # fmt: skip
    lines = [line]
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            break
    said = json.loads("".join(lines))
    assert said["schema"] == "xpuruntime.serve.listening/1"
    assert (said["grpc"], said["models"]) == (None, ["nice"])
    config = ask(said["http"], "/v2/models/nice/config")
    assert config["max_batch_size"] == 8
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 2000
    assert [entry["device"] for entry in ask(said["http"], "/v2/models/nice/evidence")["devices"]] == ["cpu", "cpu"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(said["http"], "/v2/repository/index", {})
    request = urllib.request.Request(
        f"{said['http']}/v2/repository/index", b"", {"Authorization": f"Bearer {token.read_text().strip()}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)[0]["state"] == "READY"
    assert end(process)[0] == 0


def test_an_open_address_without_a_token_is_warned_of(start, digits):
    process, line = start(digits, "--http", "0.0.0.0:0", "--grpc", "off")
    assert line.startswith("serving digits at http://0.0.0.0:")
    code, err = end(process)
    assert code == 0
    assert err.startswith("warning: 0.0.0.0:")
    assert "no token is asked for" in err


def test_a_file_of_settings_is_served(start, digits, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "schema: xpuruntime.serve/1\nhttp: {listen: '127.0.0.1:0'}\ngrpc: {listen: false}\n"
        f"models:\n  one: {{source: '{digits}'}}\n  two: {{source: missing.onnx, required: false}}\n"
    )
    process, line = start(str(file))
    assert line.startswith("serving one, two at http://127.0.0.1:")
    url = line.split()[-1]
    assert ask(url, "/v2/health/ready") == {"ready": True}
    assert ask(url, "/v2/models/one")["name"] == "one"
    code, err = end(process)
    assert code == 0
    assert err.startswith("warning: two is not served: ")


def test_models_that_load_with_the_first_request_are_not_loaded_at_the_start(start, digits, tmp_path):
    yaml = tmp_path / "serve.yaml"
    yaml.write_text(
        "schema: xpuruntime.serve/1\nhttp: {listen: '127.0.0.1:0'}\ngrpc: {listen: false}\n"
        f"models: {{lazy: {{source: '{digits}', load: on_demand}}}}\n"
    )
    process, line = start(str(yaml))
    assert line.startswith("serving lazy at http://127.0.0.1:")
    assert ask(line.split()[-1], "/v2/models/stats") == {"model_stats": []}
    assert end(process) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        (["{missing}"], 2, "missing.onnx"),
        (["{digits}", "--http", "8000"], 2, "error: --http: '8000' is not an address"),
        (["{digits}", "--http", "off", "--grpc", "off"], 2, "nothing is served"),
        (["{digits}", "--name", "a b"], 2, "error: --name: 'a b' cannot name a model"),
        (["{digits}", "--batch", "-1"], 2, "error: --batch: the number -1 is out of range"),
        (["{digits}", "--delay", "soon"], 2, "--delay is 'soon'"),
        (["{digits}", "--delay", "2ms"], 2, "--delay: without --batch no request waits for others"),
        (["{digits}", "--key-file", "{missing}"], 2, "cannot be read"),
        (["{yaml}", "--batch", "8"], 2, "--batch describes one model"),
        (["{yaml}"], 2, "state one under models"),
    ],
)
def test_what_cannot_be_served_is_refused(xrt, digits, tmp_path, arguments, code, match):
    yaml = tmp_path / "serve.yaml"
    yaml.write_text("schema: xpuruntime.serve/1\nmodels: {}\n")
    missing = tmp_path / "missing.onnx"
    result = xrt("serve", *ANY, *(argument.format(digits=digits, missing=missing, yaml=yaml) for argument in arguments))
    assert (result.code, result.out) == (code, "")
    assert match in result.err
