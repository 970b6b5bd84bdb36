# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training under a policy on CUDA: the loss curve is that of PyTorch's own kernels, and the same policy repeats."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training_runs

import xpuruntime as xrt
import xpuruntime.pytorch as xt

pytestmark = [
    pytest.mark.torch,
    # What a kernel of ours does not take runs by PyTorch's own, and is said; here the losses count.
    pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning"),
]

RUNS = {
    "digits": functools.partial(training_runs.train_digits, "cuda"),
    "text": functools.partial(training_runs.train_text, "cuda", width=256, heads=4, layers=4, length=128),
}
STEPS = 40
POLICIES = {
    "cuda_raw": {
        "attention": "cuda_raw.flash_attention_v2",
        "layer_norm": "cuda_raw.layer_norm",
        "rms_norm": "cuda_raw.rms_norm",
    },
    "vendors": {"matmul": "cublas.cublasLt", "attention": "cudnn.sdpa", "conv": "cudnn.conv_heuristic"},
    "all": {
        "matmul": "cublas.cublas",
        "attention": "cuda_raw.flash_attention_v2",
        "layer_norm": "cuda_raw.layer_norm",
        "rms_norm": "cuda_raw.rms_norm",
        "conv": "cudnn.conv_default",
    },
}
#: Most that the loss of a step may differ, in nats.
NATS = {None: 2e-3, torch.bfloat16: 5e-2}


@pytest.fixture(autouse=True)
def _exact_and_clean():
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    xt.clear_kernel_policy()


@functools.cache
def natively(run, autocast):
    return RUNS[run](steps=STEPS, autocast=autocast)[0]


@pytest.mark.parametrize("autocast", NATS, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run", RUNS)
def test_the_loss_curve_is_that_of_pytorch(run, policy, autocast):
    expected = natively(run, autocast)
    assert expected[-1] < 0.85 * expected[0]  # it learns
    with xt.kernel_policy(**POLICIES[policy]):
        losses, _ = RUNS[run](steps=STEPS, autocast=autocast)
    assert max(abs(loss - other) for loss, other in zip(losses, expected, strict=True)) < NATS[autocast]
    served = {decision.op for decision in xrt.decisions()}
    if policy != "vendors":
        assert served >= {"layer_norm", "layer_norm_backward"}
    if policy != "vendors" and run == "text":
        assert served >= {"rms_norm", "rms_norm_backward"}
    if policy != "cuda_raw":
        assert served >= {"matmul"} | ({"conv"} if run == "digits" else set())
    if autocast is torch.bfloat16 and run == "text":
        assert served >= {"attention", "attention_backward"}


def test_the_same_policy_and_seed_repeat_bit_by_bit():
    # In a process of its own: cuBLAS reads its setting for determinism once, when it starts.
    program = """
import sys
import torch, training_runs
import xpuruntime.pytorch as xt
kernels = {"matmul": "cublas.cublasLt", "attention": "cuda_raw.flash_attention_v2", "conv": "cudnn.conv_heuristic",
           "layer_norm": "cuda_raw.layer_norm", "rms_norm": "cuda_raw.rms_norm"}
policy = {"schema": "xpuruntime.policy/1", "kernels": kernels, "execution": {"determinism": "run_to_run"}}
for run, size in (("digits", {}), ("text", {"width": 128, "layers": 2, "length": 64})):
    found = []
    for seed in (0, 0, 1):
        with xt.kernel_policy(policy):
            losses, model = getattr(training_runs, "train_" + run)(
                "cuda", steps=12, autocast=torch.bfloat16, seed=seed, **size)
        found.append((losses, [one.detach() for one in model.parameters()]))
    (first, weights), (second, again), (other, _) = found
    assert first == second, (run, first, second)
    assert first != other
    assert all(torch.equal(one, two) for one, two in zip(weights, again))
print("repeats")
"""
    folder = str(Path(training_runs.__file__).parent)
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "repeats"), done.stderr
