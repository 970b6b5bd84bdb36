# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Metrics of a file: each way in which the code of a user goes wrong is a claim, and none is a pass."""

from __future__ import annotations

import importlib
import os
import tempfile
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest
from verify_cases import CPU, only_claim

import xpuruntime as xrt
from xpuruntime.errors import InputError
from xpuruntime.locks.verification import metrics as metric_function
from xpuruntime.locks.verification.metrics import Metric, read_value, write_value
from xpuruntime.locks.worker_side.xrt_session_worker import write_array

HANGS = ["while True: pass", "import ctypes; ctypes.PyDLL(None).sleep(600)", "import time; time.sleep(600)"]


def verified(digits: str, folder: Path, body: str, **options):
    path = folder / "metric.py"
    path.write_text("import os, sys\n\ndef top1(run):\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\n")
    policy = {**CPU, "verify": {"metrics": {"top1": 0.5}}}
    return xrt.verify(digits, policy, only=["accuracy"], metrics=[f"{path}:top1"], **options)


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('no data')", "top1 raised ValueError: no data"),
        ("sys.exit(0)", "top1 raised SystemExit: 0"),
        ("return 'good'", "top1 returned a value of type str, which is no number"),
        ("return 10 ** 400", "which is no number"),
        ("raise GeneratorExit", "top1 raised GeneratorExit"),
        ("raise KeyboardInterrupt", "top1 raised KeyboardInterrupt"),
        ("return float('nan')", "top1 returned NaN"),
        ("return run({'nonsense': 1})", "top1 raised InputError: the model has no input 'nonsense'"),
        ("return run({'image': object()})", "top1 raised TypeError: a value of type object cannot be passed"),
        ("class E(Exception):\n    def __str__(self): raise OSError\nraise E", "top1 raised E"),
    ],
)
def test_a_metric_that_fails_is_a_claim_that_failed(digits, tmp_path, body, words):
    result = verified(digits, tmp_path, body)
    claim = only_claim(result, "accuracy.metric.top1")
    assert (claim.verdict, claim.code) == ("fail", "metric_failed")
    assert words in claim.reason
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("body", "observed", "words"),
    [
        ("os._exit(0)", "exit 0", "top1 ended its process with exit status 0"),
        ("os._exit(3)", "exit 3", "top1 ended its process with exit status 3"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV", "top1 ended its process by SIGSEGV"),
        ("os.closerange(3, 256); return 1", "exit 1", "top1 ended its process with exit status 1"),
        ("import numpy as np; run({'image': np.zeros((1, 1, 8, 8), 'f')}); os._exit(0)", "exit 0", "exit status 0"),
    ],
)
def test_a_metric_that_ends_its_process_is_a_claim_that_failed(digits, tmp_path, body, observed, words):
    result = verified(digits, tmp_path, body)
    claim = only_claim(result, "accuracy.metric.top1")
    assert (claim.verdict, claim.code, claim.observed) == ("fail", "metric_crashed", observed)
    assert words in claim.reason
    assert result.exit_code == 1


@pytest.mark.parametrize("body", HANGS)
def test_a_metric_that_does_not_return_is_inconclusive(digits, tmp_path, body):
    path = tmp_path / "pid"
    body = f"from pathlib import Path; Path({str(path)!r}).write_text(str(os.getpid()))\n{body}"
    result = verified(digits, tmp_path, body, metric_timeout=3.0)
    claim = only_claim(result, "accuracy.metric.top1")
    assert (claim.verdict, claim.code) == ("inconclusive", "metric_timeout")
    assert claim.reason == "top1 took more than 3 s, and its process was killed"
    assert "metric_timeout" in claim.fix
    assert result.exit_code == 4
    assert not is_alive(int(path.read_text()))


def test_time_of_runs_counts(digits, tmp_path):
    result = verified(
        digits, tmp_path, "import numpy as np\nwhile True: run({'image': np.zeros((1, 1, 8, 8), 'f')})",
        metric_timeout=3.0,
    )  # fmt: skip
    assert only_claim(result, "accuracy.metric.top1").code == "metric_timeout"


def test_what_a_metric_prints_is_on_stderr(digits, tmp_path, capfd):
    body = "print('on stdout'); os.write(1, b'written'); print('on stderr', file=sys.stderr); return 1"
    assert verified(digits, tmp_path, body).verdict == "pass"
    out, err = capfd.readouterr()
    assert out == ""
    assert all(words in err for words in ("on stdout\n", "written", "on stderr\n"))


def test_the_function_is_called_in_the_main_thread_of_another_process(digits, tmp_path):
    body = "import threading\nreturn threading.current_thread() is threading.main_thread() and os.getpid()"
    claim = only_claim(verified(digits, tmp_path, body), "accuracy.metric.top1")
    assert claim.figures["value"] not in (0, os.getpid())


def test_a_metric_computes_what_it_does_in_this_process(digits, tmp_path, monkeypatch):
    path = tmp_path / "metric_of_a_file.py"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom xpuruntime.demo import demo_images\n\n"
        "@dataclasses.dataclass\nclass Case:\n    count: int\n\n"
        "def top1(run):\n"
        "    images, labels = demo_images()\n"
        "    found = [run({'image': images[i:i + 32]})['logits'] for i in range(0, Case(128).count, 32)]\n"
        "    return sum((one.argmax(axis=1) == labels[32 * i:][:32]).sum() for i, one in enumerate(found)) / 128\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    here = Metric("here", importlib.import_module("metric_of_a_file").top1, 0.0)
    result = xrt.verify(digits, CPU, only=["accuracy"], metrics=[here, f"{path}:top1=0"])
    claims = {claim.id: claim.figures["value"] for claim in result.claims if "metric" in claim.id}
    assert claims["accuracy.metric.here"] == claims["accuracy.metric.top1"] > 0.9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}/metric.py", "write FILE.py:FUNCTION"),
        ("{}/metric.py:top1", "no floor is stated for 'top1'"),
        ("{}/metric.py:top1=high", "the floor 'high' is not a finite number"),
        ("{}/metric.py:top1=nan", "is not a finite number"),
        ("{}/metric.py:top2=1", "has no function 'top2'"),
        ("{}/nowhere.py:top1=1", "is not a file"),
        ("{}/broken.py:top1=1", "cannot be imported: RuntimeError: broken"),
        ("{}/ends.py:top1=1", "cannot be imported: the import ended its process with exit status 0"),
        ("{}/hangs.py:top1=1", "cannot be imported: the import took more than 3 s"),
    ],
)
def test_metrics_that_are_refused(digits, tmp_path, text, words):
    bodies = {
        "metric": "def top1(run):\n    return 1\n",
        "broken": "raise RuntimeError('broken')\n",
        "syntax": "def top1(run:\n",
        "exits": "import sys\nsys.exit(0)\n",
        "ends": "import os\nos._exit(0)\n",
        "crashes": "import ctypes\nctypes.string_at(0)\n",
        "hangs": "while True: pass\n",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(body)
    with pytest.raises(InputError, match=words):
        xrt.verify(digits, CPU, metrics=[text.format(tmp_path)], metric_timeout=3.0)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_time_limit_that_is_none(digits, seconds):
    with pytest.raises(InputError, match="is not a number of seconds above 0"):
        xrt.verify(digits, CPU, metric_timeout=seconds)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([[True], [False]]),
        np.zeros((0, 4), np.int8),
        np.array(["ä", "", "ends in\0", "\ud800"], object),
        [{0: 0.25, 1: 0.75}, {"one": None}],
        [np.ones(2), (1, "two", [3.5, True])],
    ],
)
def test_values_pass_as_they_are(tmp_path, value):
    found = read_value(write_value(value, tmp_path))
    np.testing.assert_equal(found, np.asarray(value) if isinstance(value, np.generic) else _lists(value))
    assert not isinstance(value, np.ndarray) or found.dtype == value.dtype
    assert list(tmp_path.iterdir()) == []


def _lists(value):
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("value", [object(), {(1, 2): 3}, [{1, 2}], np.array([b"a", None], object)])
def test_values_that_do_not_pass(tmp_path, value):
    with pytest.raises(TypeError, match="cannot be passed"):
        write_value(value, tmp_path)


def test_a_floor_without_a_metric_is_inconclusive(digits, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(
        "execution: {engine: onnxruntime, device: cpu}\nverify:\n  metrics: {top1: 0.9, top5: 0.99}\n"
        "  memory: {max_growth: 50%}\n"
    )
    metric = Metric("top1", lambda run: 0.95, 0.9)
    result = xrt.verify(digits, path, only=["accuracy"], metrics=[metric])
    claim = only_claim(result, "accuracy.metric.top5")
    assert (claim.verdict, claim.code, claim.requested) == ("inconclusive", "metric_not_given", ">= 0.99")
    assert (claim.key, claim.line) == ("verify.metrics.top5", 3)
    assert "--metric FILE.py:top5" in claim.fix
    assert only_claim(result, "accuracy.metric.top1").verdict == "pass"
    assert result.exit_code == 4
    assert xrt.verify(digits, path, only=["evidence"]).exit_code == 0


def test_a_metric_beside_other_sections_is_refused(digits):
    with pytest.raises(InputError, match="metrics are claims of accuracy, and only names evidence"):
        xrt.verify(digits, CPU, only=["evidence"], metrics=[Metric("top1", lambda run: 1.0, 0.5)])


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_budget_that_is_none(digits, seconds):
    with pytest.raises(InputError, match=r"budget: .* is not a number of seconds above 0"):
        xrt.verify(digits, CPU, budget=seconds)


def test_limits_beyond_any_clock(digits):
    metric = Metric("top1", lambda run: 1.0, 0.5)
    for forever in (float("inf"), 10**400):
        result = xrt.verify(digits, CPU, only=["accuracy"], metrics=[metric], metric_timeout=forever, budget=forever)
        assert result.verdict == "pass"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_disk_that_is_full_is_named(tmp_path):
    (path := tmp_path / "0.npy").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_array(path, np.zeros(100_000), "x")
    assert raised.value.filename == str(path)


def test_two_metrics_of_one_name_are_refused(digits):
    metrics = [Metric("top1", lambda run: 1.0, 0.5), Metric("top1", lambda run: 0.0, 0.5)]
    with pytest.raises(InputError, match="two metrics are named 'top1'"):
        xrt.verify(digits, CPU, only=["accuracy"], metrics=metrics)


EATS = "held = []\nwhile True: held.append(bytearray(b'x') * (16 << 20))"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process holds")
@pytest.mark.parametrize(
    "body",
    [EATS, f"import subprocess\nsubprocess.run([sys.executable, '-c', {EATS!r}])\nreturn 1"],
    ids=["itself", "child"],
)
def test_a_metric_that_holds_too_much_is_inconclusive(digits, tmp_path, body):
    result = verified(digits, tmp_path, body, metric_memory="400MiB", metric_timeout=60.0)
    claim = only_claim(result, "accuracy.metric.top1")
    assert (claim.verdict, claim.code, claim.observed) == ("inconclusive", "metric_memory", "out_of_memory")
    assert claim.reason.startswith("top1 held ")
    assert "over the limit of 419,430,400" in claim.reason
    assert "metric_memory" in claim.fix
    assert result.exit_code == 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process holds")
def test_a_file_that_holds_too_much_is_refused(digits, tmp_path):
    (tmp_path / "metric.py").write_text(f"{EATS}\ndef top1(run): return 1\n")
    words = "cannot be imported: the import held .* over the limit of 400,000,000"
    with pytest.raises(InputError, match=words):
        xrt.verify(digits, CPU, metrics=[f"{tmp_path}/metric.py:top1=0"], metric_memory=400_000_000)


@pytest.mark.parametrize("size", [0, -1, "8", "8 apples", "inf"])
def test_a_memory_limit_that_is_none(digits, size):
    with pytest.raises(InputError, match="metric_memory: "):
        xrt.verify(digits, CPU, metric_memory=size)


RUNS = "import numpy as np\nrun({'image': np.zeros((1, 1, 8, 8), 'f')})\nreturn 1"
FULL = """
import glob, tempfile
[folder] = glob.glob(tempfile.gettempdir() + "/xpuruntime-metric-*")
os.symlink("/dev/full", folder + "/full.npy")
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize(
    ("body", "ours"),
    [
        ("open('/dev/full', 'w').write('x' * 100_000)\nreturn 1", False),
        ("try: open('/dev/full', 'w').write('x' * 9999)\nexcept OSError as error: raise ValueError from error", False),
        (f"{FULL}import secrets\nsecrets.token_hex = lambda size: 'full'\n{RUNS}", False),
        (f"{FULL}{RUNS}", True),
    ],
    ids=["own-file", "cause", "inputs", "outputs"],
)  # fmt: skip
def test_a_full_disk_is_told(digits, tmp_path, monkeypatch, body, ours):
    (room := tmp_path / "room").mkdir()
    monkeypatch.setenv("TMPDIR", str(room))
    monkeypatch.setattr(tempfile, "tempdir", None)
    if ours:
        monkeypatch.setattr(metric_function, "secrets", types.SimpleNamespace(token_hex=lambda size: "full"))
    result = verified(digits, tmp_path, body)
    claim = only_claim(result, "accuracy.metric.top1")
    assert (claim.verdict, claim.code, claim.observed) == ("inconclusive", "metric_disk_full", "disk full")
    assert f"temporary files are in {room}" in claim.reason
    assert "TMPDIR" in claim.fix
    assert result.exit_code == 4
    assert [path for path in room.iterdir() if path.name != ".ses"] == []
