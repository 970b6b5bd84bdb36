# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which kernel runs on a device: pins, the fastest measured, its file, and replaying exactly that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_work import WORKS, make_work
from torch_work import warm_up

import xpuruntime as xrt
from xpuruntime import ExecutionPolicy, KernelPolicy, Policy, UnsupportedOperationError, _core
from xpuruntime.ops.decision_log import Decision
from xpuruntime.ops.tuning_cache import TuningCache

NAMES = list(WORKS)
BEST = KernelPolicy(auto_strategy="best_performance")
CUDA_KERNELS = [
    ("matmul", "cublas.cublasLt"),
    ("product", "cublas.cublasLt"),
    ("product", "cublas.cublas"),
    ("matmul", "cublas.cublas"),
    ("skinny", "cuda_raw.skinny"),
    ("matmul", "cuda_raw.skinny"),
    ("attention", "cuda_raw.flash_attention_v2"),
    ("attention", "cudnn.sdpa"),
    ("attention_backward", "cuda_raw.flash_attention_v2"),
    ("attention_backward", "cudnn.sdpa"),
    ("layer_norm", "cuda_raw.layer_norm"),
    ("rms_norm", "cuda_raw.rms_norm"),
    ("layer_norm_backward", "cuda_raw.layer_norm"),
    ("rms_norm_backward", "cuda_raw.rms_norm"),
    ("conv", "cudnn.conv_heuristic"),
    ("conv", "cudnn.conv_default"),
    ("conv", "cudnn.conv_exhaustive"),
    ("conv", "cuda_raw.depthwise_conv"),
    ("depthwise", "cuda_raw.depthwise_conv"),
    *(
        (f"conv_{of}_gradient", f"cudnn.conv_{how}")
        for of in ("input", "weight")
        for how in ("heuristic", "default", "exhaustive")
    ),
]
#: What is refused, and words of the reason: by kernel and dtype, or for the work at any other dtype.
REFUSALS = {
    ("matmul", "cublas.cublas"): "adds no bias",
    ("matmul", "cuda_raw.skinny"): "at most 64 rows of a, and m is 200",
    ("conv", "cuda_raw.depthwise_conv"): "32 channels in 1 groups and 64 filters",
    ("cuda_raw.skinny", torch.float32): "not float32",
    ("cuda_raw.flash_attention_v2", torch.float32): "is float32",
    ("cudnn.sdpa", torch.float32): "not float32",
}


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    warm_up()


def test_the_list_is_complete() -> None:
    here = {(kernel.op, kernel.id) for kernel in xrt.ops.kernels() if kernel.device_type == "cuda"}
    ours = {"skinny": "matmul", "product": "matmul", "depthwise": "conv"}
    assert {(ours.get(work, work), kernel) for work, kernel in CUDA_KERNELS} >= here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "kernel"), CUDA_KERNELS)
def test_a_pinned_kernel_runs_or_says_why_not(name: str, kernel: str, dtype: torch.dtype) -> None:
    work = make_work(name, dtype)
    work.poison()
    expected = REFUSALS.get((kernel, dtype)) or REFUSALS.get((name, kernel))
    if expected is not None:
        with pytest.raises(UnsupportedOperationError) as caught:
            work(kernel=kernel)
        lines = [line.strip() for line in str(caught.value).splitlines()]
        (reason,) = (line for line in lines if line.startswith(f"{kernel}:"))
        assert expected in reason
        return
    work(kernel=kernel)
    work.check()
    decision = xrt.decisions()[-1]
    assert (decision.chosen, decision.source, decision.asked_by) == (kernel, "pinned", "kernel=")
    assert decision.op == work.op


@pytest.mark.parametrize("name", NAMES)
def test_the_fastest_is_chosen_and_replayed_bit_by_bit(name: str) -> None:
    work = make_work(name)
    policy = Policy(kernels=BEST, execution=ExecutionPolicy(determinism="run_to_run"))
    work(policy=policy)
    work.check()
    decision = xrt.decisions()[-1]
    served = [candidate for candidate in decision.candidates if candidate.measured_us is not None]
    if len({candidate.id for candidate in decision.candidates if candidate.accepted}) > 1 or len(served) > 1:
        assert decision.source == "tuned", decision.text
        assert min(one.measured_us or 0 for one in served) > 0
    first = {key: value.clone() for key, value in work.into.items()}
    replay = Policy(execution=ExecutionPolicy(determinism="run_to_run"))
    for _ in range(3):
        work.poison()
        work(kernel=decision.kernel, policy=replay)
        torch.cuda.synchronize()
        for key, value in work.into.items():
            assert torch.equal(value, first[key]), f"{decision.kernel}: {key} has other bits"
    again = xrt.decisions()[-1]
    assert (again.chosen, again.config) == (decision.chosen, decision.config)


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_means_the_same_bits(name: str) -> None:
    policy = Policy(execution=ExecutionPolicy(determinism="run_to_run"))
    work = make_work(name)
    work(policy=policy)
    first = {key: value.clone() for key, value in work.into.items()}
    for _ in range(10):
        work.poison()
        work(policy=policy)
        for key, value in work.into.items():
            assert torch.equal(value, first[key])


def times(decision: Decision) -> dict[tuple[str, str], float]:
    return {
        (candidate.id, candidate.config): candidate.measured_us
        for candidate in decision.candidates
        if candidate.measured_us is not None
    }


def test_measured_times_are_kept_in_the_file_and_found(tmp_path: Path) -> None:
    dispatcher = _core.Dispatcher.instance()
    cache = TuningCache(tmp_path / "tuning.json")
    dispatcher.set_tuning_store(cache)
    work = make_work("matmul")
    work(policy=Policy(kernels=BEST, execution=ExecutionPolicy(tf32=True)))
    first = xrt.decisions()[-1]
    assert first.source == "tuned", first.text
    entries = json.loads(cache.path.read_text())["entries"]
    assert len(entries) == 1
    dispatcher.forget_measurements()
    work(policy=Policy(kernels=BEST, execution=ExecutionPolicy(tf32=False)))  # another place, the same work
    second = xrt.decisions()[-1]
    assert (second.kernel, second.source) == (first.kernel, "tuned")
    assert times(second) == times(first)


IN_ANOTHER_PROCESS = """
import torch
import xpuruntime as xrt
torch.manual_seed(0)
a = torch.randn(96, 512, device="cuda").bfloat16()
b = torch.randn(512, 1000, device="cuda").bfloat16()
with xrt.use_policy(xrt.KernelPolicy(auto_strategy="best_performance")):
    xrt.ops.matmul(a, b)
torch.cuda.synchronize()
one = xrt.decisions()[-1]
times = sorted((each.id, each.config, each.measured_us) for each in one.candidates if each.measured_us is not None)
print(one.kernel, one.source, times, list(one.notes), sep="|")
"""


def test_a_second_process_measures_nothing(tmp_path: Path) -> None:
    def run() -> list[str]:
        environment = {**os.environ, "XPURUNTIME_TUNING_CACHE": str(tmp_path / "tuning.json")}
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split("|")

    first, second = run(), run()
    assert first[1] == "tuned"
    assert first[3] == "[]"
    assert "cublas.cublasLt" in first[2]
    assert second == first, "the second took the times of the first"
    path = tmp_path / "tuning.json"
    document = json.loads(path.read_text())
    (entry,) = document["entries"].values()
    name = next(iter(entry["validators"]))
    entry["validators"][name] = "another one"
    path.write_text(json.dumps(document))
    third = run()
    assert third[1] == "tuned"
    assert "stale" in third[3]
    assert name in third[3]


def test_rules_choose_by_the_number_of_rows() -> None:
    policy = KernelPolicy(
        matmul="cublas.cublas",
        rules=[{"match": {"op": "matmul", "m": "<=16", "dtype": "bf16"}, "use": "cuda_raw.skinny"}],
    )
    with xrt.use_policy(policy):
        for name, chosen, source in (("skinny", "cuda_raw.skinny", "rule"), ("product", "cublas.cublas", "pinned")):
            work = make_work(name)
            work()
            work.check()
            decision = xrt.decisions()[-1]
            assert (decision.chosen, decision.source) == (chosen, source), decision.text


def test_prefer_replaces_and_strict_refuses() -> None:
    work = make_work("attention", torch.bfloat16)
    policy = KernelPolicy(attention="cpu.reference")
    work(policy=policy)
    work.check()
    decision = xrt.decisions()[-1]
    assert decision.source == "fallback"
    assert any("cpu.reference" in note for note in decision.notes)
    with pytest.raises(UnsupportedOperationError, match=r"cpu\.reference"):
        work(policy=Policy(kernels=policy, mode="strict"))


def test_a_configuration_of_no_algorithm_is_refused() -> None:
    work = make_work("matmul")
    with pytest.raises((xrt.InputError, UnsupportedOperationError)) as caught:
        work(kernel="cublas.cublasLt@algo=nonsense")
    assert "nonsense" in str(caught.value)
    work()
    work.check()
