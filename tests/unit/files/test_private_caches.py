# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Caches that another user may have written: nothing of them decides what is computed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings
from xpuruntime.engines.onnxruntime.pass_through import refuse_shared_caches
from xpuruntime.engines.tensorrt.building import CacheFile
from xpuruntime.files.paths import make_private, not_private
from xpuruntime.ops.tuning_cache import TuningCache

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")

MODEL = xrt.demo_model_path()
X = {"image": np.ones((1, 1, 8, 8), np.float32)}
ENTRY: dict[str, Any] = {"times": [{"kernel": "a.b", "config": "", "microseconds": 1.0}], "validators": {}}
ROOT = getattr(os, "geteuid", int)() == 0
as_root = pytest.mark.skipif(not ROOT, reason="only root may give files to others")


def session(cache: Path) -> xrt.InferenceSession:
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu", "artifacts": {"cache": str(cache)}}}
    return xrt.InferenceSession(MODEL, policy=policy)


def zero_the_weights(entry: Path) -> None:
    """Do what another user would do: other weights, and a manifest that fits them."""
    data = bytes(len((entry / "model.onnx.data").read_bytes()))
    (entry / "model.onnx.data").write_bytes(data)
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["files"]["model.onnx.data"]["sha256"] = hashlib.sha256(data).hexdigest()
    (entry / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Path, Path, Any]:
    """Return a cache, its entry, and what the model answers."""
    with session(tmp_path / "cache") as opened:
        right = opened.run(X)["logits"]
    (entry,) = (tmp_path / "cache").glob("*.xrt")
    return tmp_path / "cache", entry, right


def test_a_cache_that_is_made_is_private(filled: tuple[Path, Path, Any]) -> None:
    assert filled[0].stat().st_mode & 0o777 == 0o700
    assert not_private(filled[0]) is None


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
def test_nothing_is_taken_from_a_folder_that_others_may_write(filled: tuple[Path, Path, Any], mode: int) -> None:
    cache, entry, right = filled
    zero_the_weights(entry)
    cache.chmod(mode)
    for _ in range(2):
        with (
            pytest.warns(xrt.XpuRuntimeWarning, match=r"can be written by everybody\. Fix: chmod go-w"),
            session(cache) as opened,
        ):
            np.testing.assert_array_equal(opened.run(X)["logits"], right)
    cache.chmod(0o700)
    with session(cache) as opened:
        assert opened.plan.notes[-1].endswith("from the cache")
        np.testing.assert_array_equal(opened.run(X)["logits"], right)


SHARED: dict[str, Callable[[Path], None]] = {
    "entry": lambda entry: entry.chmod(0o777),
    "weights": lambda entry: (entry / "model.onnx.data").chmod(0o666),
    "manifest": lambda entry: (entry / "manifest.json").chmod(0o622),
}


@pytest.mark.parametrize("what", SHARED)
def test_an_entry_that_others_may_write_is_refused(filled: tuple[Path, Path, Any], what: str) -> None:
    cache, entry, _ = filled
    zero_the_weights(entry)
    SHARED[what](entry)
    with pytest.raises(xrt.XpuRuntimeError, match=r"can be written by everybody\. Fix: chmod go-w"):
        session(cache)


@as_root
@pytest.mark.parametrize("what", ["", "model.onnx.data", "manifest.json"])
def test_an_entry_of_another_user_is_refused(filled: tuple[Path, Path, Any], what: str) -> None:
    cache, entry, _ = filled
    zero_the_weights(entry)
    os.chown(entry / what, 12345, 12345)
    with pytest.raises(xrt.XpuRuntimeError, match=r"belongs to user id 12345\. Fix: "):
        session(cache)


def test_a_link_in_place_of_an_entry_is_never_replaced(filled: tuple[Path, Path, Any], tmp_path: Path) -> None:
    cache, entry, _ = filled
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.txt").write_text("years of work")
    entry.rename(tmp_path / "away.xrt")
    entry.symlink_to(tmp_path / "documents")
    policy = {
        "execution": {"engine": "onnxruntime", "device": "cpu", "artifacts": {"cache": str(cache), "stale": "rebuild"}}
    }
    with pytest.raises(xrt.XpuRuntimeError, match="it is no entry of a cache"):
        xrt.InferenceSession(MODEL, policy=policy)
    assert (tmp_path / "documents" / "thesis.txt").read_text() == "years of work"


def test_measured_times_of_others_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "tuning.json"
    assert TuningCache(path).put("k", ENTRY) == ""
    path.parent.chmod(0o777)
    for note in (TuningCache(path).find("k", {})[1], TuningCache(path).put("k", ENTRY)):
        assert "another user may have written it" in note
        assert "Fix: chmod go-w" in note
    path.parent.chmod(0o700)
    path.chmod(0o666)
    assert "another user may have written it" in TuningCache(path).find("k", {})[1]
    path.chmod(0o600)
    assert TuningCache(path).find("k", {}) == (ENTRY, "")


def test_caches_of_vendors_that_others_may_write_are_refused(tmp_path: Path) -> None:
    file = CacheFile(tmp_path / "cache" / "v.timing")
    assert file.update(lambda _: b"times")
    file.path.parent.chmod(0o777)
    for call in (file.read, lambda: file.update(lambda _: b"others")):
        with pytest.raises(xrt.EngineError, match=r"another user may have written it: .* Fix: chmod go-w"):
            call()
    for option in ("migraphx_model_cache_dir", "ModelCacheDirectory"):
        settings = OnnxRuntimeSettings(provider="X", strict=False, options={option: str(file.path.parent)})
        with pytest.raises(xrt.EngineError, match=f"{option} is not used"):
            refuse_shared_caches(settings)
        file.path.parent.chmod(0o700)
        refuse_shared_caches(settings)
        file.path.chmod(0o666)
        with pytest.raises(xrt.EngineError, match=f"{option} is not used"):
            refuse_shared_caches(settings)
        file.path.chmod(0o600)
        file.path.parent.chmod(0o777)


def test_a_cache_of_a_vendor_never_replaces_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(MODEL.read_bytes())
    with pytest.raises(xrt.EngineError, match="that file is an ONNX model"):
        CacheFile(path).update(lambda _: b"times")
    assert path.read_bytes() == MODEL.read_bytes()


def test_groups(tmp_path: Path) -> None:
    """A group of the user's own, as Debian makes one for each user, is nobody else."""
    make_private(tmp_path / "a" / "b")
    assert [(tmp_path / one).stat().st_mode & 0o777 for one in ("a", "a/b")] == [0o700, 0o700]
    (tmp_path / "a").chmod(0o770)
    if ROOT:
        assert not_private(tmp_path / "a") is None
        os.chown(tmp_path / "a", 0, 54321)
        assert "can be written by the group 54321" in str(not_private(tmp_path / "a"))
    assert not_private(tmp_path / "nothing") is None


NO_HOME = """
import os, sys
if os.getuid() == 0: os.setuid(54321)
import numpy as np, xpuruntime as xrt
from xpuruntime.files.paths import home_folder
from xpuruntime.ops import decisions
try: home_folder()
except xrt.InputError as error: print(error)
else: sys.exit(print("has a home"))
one = np.ones((3, 3), "f")
with xrt.use_policy(xrt.KernelPolicy(auto_strategy="best_performance")):
    print(xrt.ops.matmul(one, one)[0, 0])
for value in ("default", "~/cache", "~nobodyhere/cache"):
    try: xrt.InferenceSession(xrt.demo_model_path(), policy={"execution": {"engine": "onnxruntime", "device": "cpu",
        "artifacts": {"cache": value}}})
    except xrt.XpuRuntimeError as error: print(error)
"""


@pytest.mark.skipif(not ROOT, reason="only root may become a user without an entry in the user database")
def test_a_user_without_a_home(tmp_path: Path) -> None:
    """As in a container with a bare user id."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("HOME", "XDG_CACHE_HOME", "XPURUNTIME_TUNING_CACHE")
    }
    # Imported as root, since the interpreter may lie in root's home; then the user changes.
    code = (
        "import csv, numpy, onnx, onnxruntime, packaging.requirements, xpuruntime, xpuruntime.demo\n"
        "import xpuruntime.inference.session, xpuruntime.ops, xpuruntime.ops.tuning_cache\n" + NO_HOME
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("there is no home folder: HOME is not set")
    assert lines[1] == "3.0"
    assert "Fix: set HOME or XDG_CACHE_HOME" in lines[2]
    assert "Fix: set HOME or XDG_CACHE_HOME" in lines[3]
    assert "names a user without a home folder" in lines[4]
