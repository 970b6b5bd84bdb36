# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The example of a package with kernels, installed by pip and used in processes of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from plugin_tools import EXAMPLE, build_library, install_example, python, xrt

MINE = {
    "matmul": "example_native.matmul",
    "rms_norm": "example.numpy_rms_norm",
    "layer_norm": "example_triton.layer_norm",
}
#: Begins every program.
BEGIN = """
import numpy as np
import xpuruntime as xrt
from xpuruntime.ops import decisions
random = np.random.default_rng(7)
a, b, bias = (random.standard_normal(shape, np.float32) for shape in ((37, 300), (300, 71), (71,)))
want = a.astype(np.float64) @ b + bias
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example(tmp_path_factory.mktemp("example"))


def test_its_kernels_are_listed(example: Path) -> None:
    found = xrt("kernels", "--json", folder=example)
    assert (found.returncode, found.stderr) == (0, "")
    listed = {kernel["id"]: kernel for kernel in json.loads(found.stdout)["kernels"]}
    for op, name in MINE.items():
        assert listed[name]["op"] == op
        assert listed[name]["backend"] == name.partition(".")[0]
        assert listed[name]["automatic"] is True
    assert listed["example_native.matmul"]["version"] == "0.1.0"
    assert listed["example.numpy_rms_norm"]["version"].startswith("0.1.0, numpy ")
    assert {listed[name]["device_type"] for name in MINE.values()} == {"cpu", "cuda"}
    table = xrt("kernels", "rms_norm", folder=example)
    assert "example.numpy_rms_norm" in table.stdout
    assert "example_native" not in table.stdout


def test_what_is_missing_for_triton_is_said(example: Path) -> None:
    """In a process that finds no Triton, whatever is installed here; neither is imported to find out."""
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("triton", "torch") else find(name, *more)
import xpuruntime as xrt
(one,) = (k for k in xrt.ops.kernels("layer_norm") if k.id == "example_triton.layer_norm")
assert not one.available
assert one.reason == "not installed: triton, torch; pip install 'xpuruntime-example-kernels[triton]'", one.reason
import sys
assert not {"torch", "triton"} & set(sys.modules)
"""
    done = python(code, example)
    assert done.returncode == 0, done.stderr


def test_policies_and_calls_name_them_and_results_are_right(example: Path) -> None:
    code = """
with xrt.use_policy({"mode": "strict", "kernels": {"matmul": "example_native.matmul"}}):
    out = xrt.ops.matmul(a, b, bias)
np.testing.assert_allclose(out, want, rtol=0, atol=1e-3)
assert decisions()[-1].kernel == "example_native.matmul@block_n=64", decisions()[-1].text
assert decisions()[-1].source == "pinned"
for size in (32, 64, 128):
    out = xrt.ops.matmul(a, b, bias, kernel=f"example_native.matmul@block_n={size}")
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-3)

policy = xrt.KernelPolicy(rules=[{"match": {"op": "matmul", "m": "<=40"}, "use": "example_native.matmul"}])
into = np.full((71, 37), np.nan, np.float32).T
assert xrt.ops.matmul(a, b.T.copy().T, bias, out=into, policy=policy) is into
np.testing.assert_allclose(into, want, rtol=0, atol=1e-3)
assert (decisions()[-1].chosen, decisions()[-1].source) == ("example_native.matmul", "rule")

x, residual, weight = a, a[::-1].copy(), random.standard_normal(300, np.float32)
y, total, rstd = xrt.ops.rms_norm(
    x, weight, residual, eps=0.1, return_sum=True, return_stats=True, kernel="example.numpy_rms_norm"
)
s = x.astype(np.float64) + residual
scale = 1 / np.sqrt((s * s).mean(axis=1) + 0.1)
np.testing.assert_allclose(y, s * scale[:, None] * weight, rtol=1e-5, atol=1e-5)
np.testing.assert_array_equal(total, x + residual)
np.testing.assert_allclose(rstd, scale, rtol=1e-6)
np.testing.assert_array_equal(residual, a[::-1])
assert xrt.ops.rms_norm(x, out=x, kernel="example.numpy_rms_norm") is x  # in place
"""
    done = python(BEGIN + code, example)
    assert done.returncode == 0, done.stderr


def test_refusals_have_their_reasons(example: Path) -> None:
    code = """
pair = np.ones((2, 3, 3), np.float32)
for call, said in (
    (lambda: xrt.ops.matmul(a, b, activation="relu", kernel="example_native.matmul"), "it has no activations"),
    (lambda: xrt.ops.matmul(pair, pair, kernel="example_native.matmul"), "a has 3 dimensions and b 3"),
    (lambda: xrt.ops.matmul(a.astype("f8"), b.astype("f8"), kernel="example_native.matmul"), "fp32 into fp32 only"),
    (lambda: xrt.ops.rms_norm(a.astype("f2"), kernel="example.numpy_rms_norm"), "and this is float16"),
    (lambda: xrt.ops.layer_norm(a, kernel="example_triton.layer_norm"), "serves cuda, and the operands are on cpu"),
    (lambda: xrt.ops.matmul(a, b, kernel="example_native.matmul@fast"), "as 'fast': its configurations are block_n=64"),
    (lambda: xrt.ops.rms_norm(a, kernel="example.numpy_rms_norm@fast"), "has no configuration 'fast'"),
):
    try:
        call()
    except (xrt.UnsupportedOperationError, xrt.InputError) as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
out = xrt.ops.matmul(a, b, bias, activation="relu", policy=xrt.KernelPolicy(matmul="example_native.matmul"))
np.testing.assert_allclose(out, np.maximum(want, 0), rtol=0, atol=1e-3)
assert decisions()[-1].source == "fallback"
(mine,) = (one for one in decisions()[-1].candidates if one.id == "example_native.matmul")
assert (mine.accepted, mine.reason) == (False, "it has no activations")
"""
    done = python(BEGIN + code, example)
    assert done.returncode == 0, done.stderr


def test_they_are_measured_and_decisions_list_them(example: Path, tmp_path: Path) -> None:
    """Beside the built-in ones, on the CPU; the others have a reason, and the times are kept, for this version."""
    code = """
policy = xrt.KernelPolicy(auto_strategy="best_performance")
out = xrt.ops.matmul(a, b, bias, policy=policy)
np.testing.assert_allclose(out, want, rtol=0, atol=1e-3)
y = xrt.ops.rms_norm(a, policy=policy)
for decision, name in zip(decisions(), ("example_native.matmul", "example.numpy_rms_norm")):
    assert decision.source == "tuned", decision.text
    times = {one.id: one.measured_us for one in decision.candidates if one.measured_us is not None}
    assert name in times and len(times) > 1, decision.text
    assert all(one.reason for one in decision.candidates if one.id != decision.chosen), decision.text
    assert name in str(decision)
"""
    cache = tmp_path / "tuning.json"
    done = python(BEGIN + code, example, XPURUNTIME_TUNING_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    entries = json.loads(cache.read_text())["entries"]
    assert len(entries) == 2
    assert '"example_native": "0.1.0"' in json.dumps(entries)


def test_they_pass_the_list_of_op_cases(example: Path) -> None:
    code = """
from xpuruntime.testing import check_kernel
assert len(check_kernel("example.numpy_rms_norm", ["*/*float16"])) > 50
refused = ["*/*float16", "*/float64", "*/float8*"]
refused += [f"matmul/batch{more}/float32" for more in ("", "-odd-transposed", "-of-b", "-one", "-two*", "-inside")]
refused += [f"matmul/{what}/float32" for what in ("bias-batch", "*gelu*", "*relu*", "*silu*", "k-zero-bias")]
assert len(check_kernel("example_native.matmul", refused)) > 20
"""
    done = python(code, example)
    assert done.returncode == 0, done.stderr


def test_the_library_is_built_by_the_command_in_its_readme(tmp_path: Path) -> None:
    readme = (EXAMPLE / "README.md").read_text()
    assert "c++ -std=c++17 -shared -fPIC -O3 -fvisibility=hidden" in readme
    library = build_library(EXAMPLE / "src" / "example_native.cpp", tmp_path / "mine.so", "-O3")
    code = f"""
from xpuruntime.ops import plugins
assert plugins.load_library({str(library)!r}) == ("example_native.matmul",)
np.testing.assert_allclose(xrt.ops.matmul(a, b, bias, kernel="example_native.matmul"), want, rtol=0, atol=1e-3)
"""
    done = python(BEGIN + code)
    assert done.returncode == 0, done.stderr


def test_the_code_of_the_readme_runs(example: Path) -> None:
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    done = python(code, example)
    assert done.returncode == 0, done.stderr
    assert "example_native.matmul" in done.stdout


def test_a_kernel_of_cuda_is_not_available_without_a_device(tmp_path: Path) -> None:
    code = """
import xpuruntime as xrt
from xpuruntime.ops.decision_log import _on_this_machine
import msgspec
cuda = [one for one in xrt.ops.kernels() if one.device_type == "cuda"]
assert xrt.get_device_count("cuda") or not any(one.available for one in cuda), cuda
made = msgspec.structs.replace(xrt.ops.kernels()[0], device_type="cuda", available=True)
assert _on_this_machine(made, "") is made
told = _on_this_machine(made, "no NVIDIA driver was found")
assert (told.available, told.reason) == (False, "there is no CUDA device: no NVIDIA driver was found")
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
