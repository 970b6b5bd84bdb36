# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tools of PyTorch that know operators by name, under a policy: its FLOP counter and selective checkpointing."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from operator import attrgetter

import pytest

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

pytestmark = pytest.mark.torch

REFERENCE = {
    "matmul": ["cpu.reference", "auto"], "attention": "cpu.reference", "conv": ["cpu.reference", "auto"],
    "layer_norm": "cpu.reference", "rms_norm": "cpu.reference",
}  # fmt: skip


def flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def leaf(*shape, device="cpu"):
    return torch.ones(*shape, device=device, requires_grad=True)


CALLS = {
    "linear": lambda: torch.nn.Linear(8, 4)(leaf(2, 3, 8)).sum().backward(),
    "bmm": lambda: (leaf(2, 3, 8) @ leaf(2, 8, 5)).sum().backward(),
    "baddbmm": lambda: torch.baddbmm(leaf(3, 5), leaf(2, 3, 8), leaf(2, 8, 5)).sum().backward(),
    "conv": lambda: torch.nn.Conv2d(2, 3, 3)(leaf(1, 2, 6, 6)).sum().backward(),
    "conv_transpose": lambda: torch.nn.ConvTranspose1d(2, 3, 3, stride=2)(leaf(1, 2, 6)).sum().backward(),
    "layer_norm": lambda: torch.nn.LayerNorm(8)(leaf(2, 8)).sum().backward(),
}


@pytest.mark.parametrize("name", CALLS)
def test_flops_are_those_that_pytorch_counts(name):
    plain = flops(CALLS[name])
    assert plain > 0 or name == "layer_norm"
    with xt.kernel_policy(**REFERENCE):
        assert flops(CALLS[name]) == plain


@pytest.mark.parametrize(("kv_heads", "options"), [(4, {}), (4, {"is_causal": True}), (2, {"enable_gqa": True})])
@pytest.mark.parametrize("gradient", [False, True])
def test_flops_of_attention_are_those_of_the_fused_kernels_of_pytorch(kv_heads, options, gradient):
    def fused():
        # PyTorch has a formula for no kernel of the CPU.
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            leaf(2, 4, 8, 16, device="meta"), *(leaf(2, 4, 6, 16, device="meta") for _ in range(2))
        )[0]
        if gradient:
            out.sum().backward()

    def ours():
        with torch.set_grad_enabled(gradient):
            out = sdpa(leaf(2, 4, 8, 16), leaf(2, kv_heads, 6, 16), leaf(2, kv_heads, 6, 16), **options)
        if gradient:
            out.sum().backward()

    with xt.kernel_policy(attention="cpu.reference"):
        assert flops(ours) == flops(fused) > 0


COUNTER_FIRST = """
from torch.utils.flop_counter import FlopCounterMode
import torch, xpuruntime.pytorch as xt
q = torch.ones(1, 2, 8, 16)
with FlopCounterMode(display=False) as counter, xt.kernel_policy(attention="cpu.reference"):
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
print(counter.get_total_flops())
"""


def test_a_counter_that_is_made_before_the_first_policy_counts_too():
    done = subprocess.run(
        [sys.executable, "-c", COUNTER_FIRST], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.splitlines() == [str(2 * 2 * 2 * 8 * 8 * 16)], done.stderr


SAVED = {
    "mm": ("matmul", "aten.mm"), "convolution": ("conv", "aten.convolution"),
    "attention": ("attention", "xpuruntime.attention"), "layer_norm": ("layer_norm", "aten.native_layer_norm"),
    "rms_norm": ("rms_norm", "aten._fused_rms_norm"),
}  # fmt: skip
PARTS = {
    "mm": lambda x: x.flatten(0, 2) @ x.flatten(0, 2).T, "convolution": lambda x: torch.conv2d(x, x),
    "attention": lambda x: sdpa(x, x, x), "layer_norm": lambda x: torch.layer_norm(x, (8,)),
    "rms_norm": lambda x: torch.rms_norm(x, (8,)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_selective_checkpointing_saves_what_a_list_names(name):
    op, path = SAVED[name]

    def run(saved):
        def part(x):
            return PARTS[name](x * 2).sin().sum()

        x = leaf(1, 2, 4, 8)
        with xt.explain() as report:
            contexts = partial(create_selective_checkpoint_contexts, saved)
            checkpoint(part, x, use_reentrant=False, context_fn=contexts).backward()
        return x.grad, sum(row.count for row in report.rows if row.op == op and row.phase == "train")

    with xt.kernel_policy(**REFERENCE):
        recomputed, twice = run([])
        kept, once = run([attrgetter(f"{path}.default")(torch.ops)])
    assert (twice, once) == (2, 1)
    torch.testing.assert_close(kept, recomputed, rtol=0, atol=0)
