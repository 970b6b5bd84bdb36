# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Bisection of versions: the search, claims and journals; and planted packages that are installed and run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_interpreters import UNOPTIMISED
from sampled import ALL

from xpuruntime.errors import EngineError, InputError
from xpuruntime.evidence import Difference
from xpuruntime.locks import environments
from xpuruntime.locks.bisect_versions import (
    bisect_versions,
    first_bad,
    judge,
    read_claim,
)
from xpuruntime.locks.diff.result import Diff, Level
from xpuruntime.locks.environments import listed_versions, versions_between
from xpuruntime.measuring.statistics import RatioVerdict


@given(count=st.integers(2, 60), data=st.data())
def test_the_first_bad_version_is_found_or_is_among_the_skipped_ones(count, data):
    change = data.draw(st.integers(1, count - 1))
    skipped = data.draw(st.sets(st.integers(1, count - 2))) if count > 2 else set()
    judged = []

    def verdict(version):
        judged.append(version)
        number = int(version)
        return "skipped" if number in skipped else "bad" if number >= change else "good"

    last_good, bad = first_bad([str(place) for place in range(count)], verdict)
    assert last_good < change <= bad
    assert last_good not in skipped
    assert set(range(last_good + 1, bad)) <= skipped
    assert len(judged) == len(set(judged)), "none is judged twice"
    if not skipped:
        assert bad == change
        assert len(judged) <= (count - 2).bit_length(), "each halves what is left"


def diff_with(**levels):
    names = ("environment", "plan", "placement", "kernels", "numerics", "time")
    found = tuple(levels.get(name, Level(name=name, verdict="same")) for name in names)
    return Diff(before="a", after="b", model="m", levels=found)


def row(**changes):
    return Difference(**{"subject": "fc1", "code": "kernel", "before": "x", "after": "y", "nodes": ("fc1",), **changes})


KERNEL = Level(name="kernels", verdict="differs", rows=(row(),))
SILENT = Level(name="kernels", verdict="unobservable", reason="the engine does not report")
OUTPUT = Level(
    name="numerics",
    verdict="differs",
    rows=(row(subject="output y", code="drift 1e-4", nodes=(), figures={"max_rel": 1e-4}),),
)
RESHAPED = Level(name="numerics", verdict="differs", rows=(row(subject="output y", code="another shape", nodes=()),))


@pytest.mark.parametrize(
    ("claim", "levels", "verdict"),
    [
        ("runs", {"kernels": KERNEL}, "good"),
        ("kernels", {}, "good"),
        ("kernels", {"kernels": KERNEL}, "bad"),
        ("kernels", {"kernels": SILENT}, "skipped"),
        ("unit:fc1.layout", {"kernels": KERNEL}, "good"),
        ("unit:fc2.kernel", {"kernels": KERNEL}, "good"),
        ("unit:fc1.kernel", {"kernels": SILENT}, "skipped"),
        ("numerics", {"numerics": OUTPUT}, "bad"),
        ("accuracy", {"numerics": OUTPUT}, "good"),
        ("accuracy <= 1e-3", {"numerics": OUTPUT}, "good"),
        ("accuracy <= 1e-5", {"numerics": OUTPUT}, "bad"),
        ("accuracy", {"numerics": RESHAPED}, "bad"),
        ("speed.latency.p50 <= +5%", {}, "skipped"),
    ],
)
def test_a_claim_is_judged_by_the_level_that_it_is_of(claim, levels, verdict):
    assert judge(read_claim(claim), diff_with(**levels))[0] == verdict


@pytest.mark.parametrize(
    ("verdict", "within", "expected"),
    [("slower", False, "bad"), ("tied", True, "good"), ("faster", True, "good"), ("inconclusive", False, "skipped")],
)
def test_speed_is_judged_by_interleaved_rounds(verdict, within, expected):
    namespace = SimpleNamespace(
        speed=SimpleNamespace(
            ratio=1.0, low=0.9, high=1.1, verdict=RatioVerdict(verdict), within_limit=within, too_noisy=False
        )
    )
    assert judge(read_claim("speed.latency.p50 <= +5%"), namespace)[0] == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "speed",
        "speed.latency.p99 <= 5%",
        "unit:fc1.colour",
        "accuracy <= -1",
        "accuracy >= 1",
    ],
)
def test_what_is_no_claim_is_refused_with_what_is(text):
    with pytest.raises(InputError, match="claim"):
        read_claim(text)


def test_limits_of_claims():
    assert read_claim("speed.latency.p50 <= +5%").limit == pytest.approx(0.05)
    assert read_claim("speed.latency.p50").limit == pytest.approx(0.05)
    assert read_claim("accuracy").limit == 1e-3
    assert read_claim("unit:a.b/c.kernel")[3:] == ("a.b/c", "kernel")


def test_a_range_of_versions():
    versions = ["1.0", "1.1", "1.10", "2.0"]
    assert versions_between(versions, "1.1", "2.0") == ["1.1", "1.10", "2.0"]
    assert versions_between(versions, "2.0", "1.1") == ["2.0", "1.10", "1.1"]
    with pytest.raises(InputError, match=r"'3.0' is not among the versions"):
        versions_between(versions, "1.0", "3.0")
    with pytest.raises(InputError, match="as good and as bad"):
        versions_between(versions, "1.0", "1.0")


#: Sessions whose runs wait for 3 ms.
SLOWED = """
import time
import xpuruntime

own = xpuruntime.InferenceSession.__init__

def opened(self, *args, **kwargs):
    own(self, *args, **kwargs)
    run = self.run

    def slowed(*args, **kwargs):
        time.sleep(0.003)
        return run(*args, **kwargs)

    self.run = slowed

xpuruntime.InferenceSession.__init__ = opened
"""


def wheel(folder, version, code, *, broken=False):
    """Write a wheel whose module is imported as the interpreter starts."""
    files = {
        "xrt_planted.py": f"version = {version!r}\n{code}",
        "zz_xrt_planted.pth": "import xrt_planted\n",
        f"xrt_planted-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: xrt-planted\nVersion: {version}\n",
        f"xrt_planted-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"xrt_planted-{version}.dist-info/RECORD"
    files[record] = "".join(f"{name},,\n" for name in (*files, record))
    path = folder / f"xrt_planted-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    if broken:
        path.write_bytes(path.read_bytes()[:-60])


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder of wheels in which 1.4 is cut off, 1.5 crashes, and 1.6 changed a default."""
    folder = tmp_path_factory.mktemp("wheels")
    for minor in range(10):
        code = "import os; os.abort()" if minor == 5 else textwrap.dedent(UNOPTIMISED) if minor >= 6 else ""
        wheel(folder, f"1.{minor}", code, broken=minor == 4)
    return folder


@pytest.fixture
def planted(index, monkeypatch, tmp_path):
    """Pip with this folder alone, and an empty folder for temporary files."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    return temporary


@pytest.fixture(scope="module")
def model():
    from pathlib import Path

    return Path(__file__).parents[2] / "models" / "convnet.onnx"


def test_the_version_that_changed_a_default_is_found(planted, model, tmp_path):
    assert listed_versions("xrt-planted") == [f"1.{minor}" for minor in range(10)]
    said = []
    versions = bisect_versions(
        "xrt-planted", "1.2", "1.8", model, claim="placement", device="cpu", progress=said.append,
        journal=tmp_path / "j.jsonl",
    )  # fmt: skip
    verdicts = {version.version: version.verdict for version in versions.versions}
    assert verdicts["1.2"] == "good"
    assert verdicts["1.8"] == "bad"
    assert verdicts.get("1.4", "skipped") == verdicts.get("1.5", "skipped") == "skipped"
    assert versions.first_bad == "1.6"
    assert versions.last_good in ("1.3", "1.5")
    assert versions.outcome == "not decided", "1.4 and 1.5 cannot be judged, so that any of them may be it"
    assert versions.between == ("1.4", "1.5")
    assert versions.exit_code == 4
    reasons = {version.version: version.reason for version in versions.versions}
    assert "cannot be installed" in reasons["1.4"]
    assert "it does not run" in reasons["1.5"]
    assert not list(planted.glob("xpuruntime-*")), "nothing is left behind"
    assert said[0].version == "1.8"
    assert "xrt-planted" in str(versions)
    again = bisect_versions(
        "xrt-planted", "1.2", "1.8", model, claim="placement", device="cpu", progress=said.append,
        journal=tmp_path / "j.jsonl", resume=True,
    )  # fmt: skip
    assert again == versions, "nothing is judged again"
    ask = partial(bisect_versions, "xrt-planted", "1.2", "1.8", model, device="cpu", resume=True)
    with pytest.raises(InputError, match=r"of another search: claim differ \(claim was \"placement\" and is \"runs\""):
        ask(claim="runs", journal=tmp_path / "j.jsonl")
    other = {"image": np.ones((1, 3, 32, 32), np.float32)}
    for differs, stated in (
        ("arguments", {"precision": "fp32"}),
        ("inputs", {"inputs": other}),
        ("with", {"extra": "x"}),
    ):
        with pytest.raises(InputError, match=f"of another search: {differs} differ"):
            ask(claim="placement", journal=tmp_path / "j.jsonl", **stated)
    with pytest.raises(InputError, match=r"no journal .*none to resume"):
        ask(claim="runs", journal=tmp_path / "none")
    with pytest.raises(InputError, match=r"no journal to resume\. Fix: .*give --journal FILE"):
        ask(claim="runs")


def test_a_claim_that_holds_with_the_bad_version_is_nothing_to_find(planted, model):
    versions = bisect_versions("xrt-planted", "1.9", "1.8", model, claim="placement", device="cpu")
    assert (versions.outcome, versions.exit_code) == ("nothing changed", 1)
    assert not list(planted.glob("xpuruntime-*"))


@pytest.mark.skipif(not ALL, reason="takes fifteen seconds of a processor: make test-patterns runs it")
def test_the_version_that_made_runs_slower_is_found(planted, model, tmp_path, monkeypatch):
    for version in ("2.0", "2.1", "2.2"):
        wheel(tmp_path, version, SLOWED if version == "2.2" else "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    claim = "speed.latency.p50 <= +200%"
    versions = bisect_versions("xrt-planted", "2.0", "2.2", model, claim=claim, device="cpu", budget=6)
    assert (versions.first_bad, versions.last_good, versions.outcome) == ("2.2", "2.1", "found"), versions
    assert "of the good version's time" in versions.versions[-1].reason


def test_a_good_version_that_does_not_run_and_wrong_names(planted, model, tmp_path):
    with pytest.raises(EngineError, match=r"the good version, xrt-planted 1\.5, does not run: .*SIGABRT"):
        bisect_versions("xrt-planted", "1.5", "1.9", model, claim="placement", device="cpu")
    with pytest.raises(EngineError, match=r"xrt-planted 1\.4 cannot be installed"):
        bisect_versions("xrt-planted", "1.4", "1.9", model, claim="placement", device="cpu")
    with pytest.raises(InputError, match="has no version of 'xrt-nothing'"):
        bisect_versions("xrt-nothing", "1", "2", model, claim="runs")
    with pytest.raises(InputError, match="is not the name of a package"):
        bisect_versions("--upgrade", "1", "2", model, claim="runs")
    claim = "unit:node_lineer.precision"
    with pytest.raises(InputError, match=r"has no node 'node_lineer'\. Fix: write node_linear"):
        bisect_versions("xrt-planted", "1.0", "1.9", model, claim=claim)
    with pytest.raises(InputError, match="cannot read the model"):
        bisect_versions("xrt-planted", "1.0", "1.9", tmp_path / "none.onnx", claim="runs")
    assert not list(planted.glob("xpuruntime-*"))


def test_an_index_that_cannot_be_reached_is_told_from_one_without_the_package(planted, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(EngineError, match=r"index cannot be reached: .*Connection refused.*Fix: restore"):
        listed_versions("xrt-planted")


def test_ctrl_c_leaves_nothing_behind_and_the_journal_goes_on(planted, model, tmp_path):
    journal = tmp_path / "j.jsonl"
    command = [
        sys.executable, "-c", "from xpuruntime.cli import main; main()", "bisect", "xrt-planted", "1.3..1.6",
        str(model), "--claim", "placement", "--device", "cpu", "--journal", str(journal),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ends = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 1) and time.monotonic() < ends:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert not list(planted.glob("xpuruntime-*")), "environments and workers' folders are gone"
    judged = journal.read_bytes().count(b"\n") - 1
    again = subprocess.run([*command, "--resume", "--json"], capture_output=True, text=True, timeout=120)
    assert again.returncode == 4, again.stderr
    result = json.loads(again.stdout)
    assert result["first_bad"] == "1.6"
    assert result["schema"] == "xpuruntime.bisect/1"
    said = sum(again.stderr.count(f" is {verdict}: ") for verdict in ("good", "bad", "skipped"))
    assert said == len(result["versions"]) - 1 - judged, "what the journal has is not judged again"


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for Python")
def test_a_pip_that_is_killed_leaves_no_temporary_files(monkeypatch, tmp_path):
    room = tmp_path / "room"
    room.mkdir()
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nmktemp -d\nsleep 60\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(room))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(sys, "executable", str(script))
    assert environments._pip(["list"], 1.0) == (1, "", "pip took more than 1 s")
    assert not list(room.iterdir())
