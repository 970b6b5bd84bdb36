# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Adapters of Liger, quack and FlashAttention 4, with the packages themselves where they are installed."""

from __future__ import annotations

import ast
import copy
import os
import pickle
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from xpuruntime.ops.torch_kernels import Operand, TorchCall, find_torch_kernel

pytest.importorskip("torch")

HERE = Path(__file__).parent


def file_of(module):
    """Return the file of a module that is not imported: quack and FlashAttention need a CUDA device for that."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{top} is not installed: {COMMANDS[top]}")
    return Path(spec.submodule_search_locations[0], *rest).with_suffix(".py")


COMMANDS = {
    "liger_kernel": 'pip install "xpuruntime[liger]"',
    "quack": 'pip install "xpuruntime[quack]"',
    "flashinfer": 'pip install "flashinfer-python>=0.7.4,<0.8"',
    "flash_attn": 'pip install "xpuruntime[fa4]"',
}


def test_liger_serves_a_step_on_the_cpu_by_the_interpreter():
    file_of("liger_kernel.ops.rms_norm")
    if find_spec("triton") is None:
        pytest.skip(f"triton is not installed: {COMMANDS['liger_kernel']}")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "liger_step.py")], capture_output=True, text=True, env=environment
    )
    assert run.stdout.endswith("served\n"), run.stdout + run.stderr


def test_cute_kernels_are_compiled_for_the_calls_of_adapters_without_a_card():
    for module in ("flash_attn.cute.interface", "quack.gemm_interface"):
        file_of(module)
    if find_spec("cutlass") is None:
        pytest.skip(f"nvidia-cutlass-dsl is not installed: {COMMANDS['flash_attn']}")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "cute_kernels.py")], capture_output=True, text=True
    )
    assert run.stdout.endswith("compiled\n"), run.stdout + run.stderr


@pytest.mark.parametrize(
    ("module", "function", "stated"),
    [
        ("quack.rmsnorm", "rmsnorm_fwd", {"x", "weight", "eps", "store_rstd", "weight_offset"}),
        ("quack.rmsnorm", "rmsnorm_bwd", {"x", "weight", "dout", "rstd", "weight_offset"}),
        ("quack.cross_entropy", "cross_entropy_fwd", {"x", "target", "ignore_index", "return_lse"}),
        ("quack.cross_entropy", "cross_entropy_bwd",
         {"x", "target", "dloss", "lse", "ignore_index", "inplace_backward"}),
        ("flash_attn.cute.interface", "_flash_attn_fwd",
         {"q", "k", "v", "softmax_scale", "causal", "return_lse", "out"}),
        ("flash_attn.cute.interface", "_flash_attn_bwd",
         {"q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "deterministic", "dq", "dk", "dv"}),
        ("quack.softmax", "softmax_fwd", {"x"}),
        ("quack.softmax", "softmax_bwd", {"dy", "y"}),
        ("quack.rotary", "apply_rotary", {"x", "cos", "sin", "conjugate"}),
        ("quack.gemm_interface", "gemm", {"A", "B", "cu_seqlens_m", "cu_seqlens_k", "tuned"}),
        ("flashinfer.rope", "apply_rope_with_cos_sin_cache",
         {"positions", "query", "key", "head_size", "cos_sin_cache"}),
        ("flashinfer.page", "append_paged_kv_cache",
         {"append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", "kv_indices", "kv_indptr",
          "kv_last_page_len", "kv_layout"}),
        ("liger_kernel.ops.rope", "rope_forward", {"q", "k", "cos", "sin"}),
        ("liger_kernel.ops.rope", "rope_backward", {"dq", "dk", "cos", "sin"}),
        ("flashinfer.norm.__init__", "rmsnorm", {"input", "weight", "eps"}),
        ("flashinfer.norm.__init__", "gemma_rmsnorm", {"input", "weight", "eps"}),
        ("flashinfer.activation", "silu_and_mul", {"input"}),
        ("flashinfer.decode", "single_decode_with_kv_cache", {"q", "k", "v", "kv_layout", "sm_scale", "return_lse"}),
        ("liger_kernel.ops.fused_linear_cross_entropy", "fused_linear_cross_entropy_forward",
         {"_input", "weight", "target", "ce_weight", "bias", "ignore_index", "reduction", "compute_gradients",
          "weight_requires_grad"}),
        ("liger_kernel.ops.rms_norm", "rms_norm_forward", {"X", "W", "eps", "offset", "casting_mode", "row_mode"}),
        ("liger_kernel.ops.rms_norm", "rms_norm_backward",
         {"dY", "X", "W", "RSTD", "offset", "casting_mode", "BLOCK_SIZE", "num_warps", "in_place", "row_mode"}),
    ],
)  # fmt: skip
def test_function_that_an_adapter_calls_has_these_parameters(module, function, stated):
    tree = ast.parse(file_of(module).read_text())
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
    assert stated <= {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)}


def call(op, arch="sm90", device="cuda:0", phase="train", attributes=None, **operands):
    return TorchCall(
        op, phase, device, arch, {name: made if isinstance(made, Operand) else dense(*made)
                                  for name, made in operands.items()}, attributes or {},
    )  # fmt: skip


def dense(dtype, *shape, alignment=256):
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * size)
    return Operand(dtype, shape, tuple(steps), alignment)


def attention(**change):
    q = change.pop("q", ("bfloat16", 2, 8, 128, 64))
    k = change.pop("k", ("bfloat16", 2, 2, 128, 64))
    attributes = {"causal": change.pop("causal", False), "scale": None}
    return call("attention", q=q, k=k, v=change.pop("v", k), attributes=attributes, **change)


def masked(mask=("bool", 2, 1, 128, 128), **change):
    return attention(mask=mask, **change)


def norm(formula="torch", x=("bfloat16", 4, 4096), weight=("bfloat16", 4096), **change):
    return call("rms_norm", x=x, weight=weight, attributes={"epsilon": 1e-6, "formula": formula}, **change)


def loss(logits=("bfloat16", 8, 1000), target=("int64", 8), **change):
    attributes = {"ignore_index": -100, "reduction": "mean", "upcast": False}
    return call("cross_entropy", logits=logits, target=target, attributes=attributes, **change)


def query(q=("bfloat16", 1, 8, 1, 64), k=("bfloat16", 1, 2, 128, 64), **change):
    return attention(q=q, k=k, phase=change.pop("phase", "decode"), **change)


def unit(gate=("bfloat16", 8, 64), up=("bfloat16", 8, 64), **change):
    return call("swiglu", gate=gate, up=up, **change)


def linear(x=("bfloat16", 8, 16), weight=("bfloat16", 90, 16), target=("int64", 8), reduction="mean"):
    attributes = {"ignore_index": -100, "reduction": reduction}
    return call("linear_cross_entropy", x=x, weight=weight, target=target, attributes=attributes)


def rotation(q=("bfloat16", 2, 8, 16, 64), k=("bfloat16", 2, 2, 16, 64), cos=("bfloat16", 2, 1, 16, 64), **change):
    attributes = {"mirrored": change.pop("mirrored", True)}
    return call("rope", q=q, k=k, cos=cos, sin=cos, attributes=attributes, **change)


def groups(x=("bfloat16", 9, 64), weight=("bfloat16", 4, 64, 32), offsets=("int32", 4), **change):
    return call("grouped_matmul", x=x, weight=weight, offsets=offsets, **change)


def writes(keys=("bfloat16", 2, 8, 64, 128), values=("bfloat16", 2, 8, 64, 128), **change):
    new = {f"new_{name}": (*stated[:3], 3, stated[4]) for name, stated in (("keys", keys), ("values", values))}
    return call("cache_update", keys=keys, values=values, **new, positions=("int64", 3), phase="decode", **change)


@pytest.mark.parametrize(
    ("word", "made", "said"),
    [
        ("fa4", attention(), ""),
        ("fa4", attention(causal=True), ""),
        ("fa4", attention(arch="sm80"), "it runs on sm90 and sm100"),
        ("fa4", attention(q=("float32", 2, 8, 128, 64)), "q is float32"),
        ("fa4", attention(q=("bfloat16", 2, 7, 128, 64)), "7 heads of queries are no multiple of 2"),
        ("fa4", attention(q=("bfloat16", 2, 8, 1, 64), causal=True), "its causal mask begins at the last key"),
        ("fa4", attention(q=("bfloat16", 2, 8, 128, 60), k=("bfloat16", 2, 8, 128, 60)), "do not begin at multiples"),
        ("fa4", attention(mask=("bool", 1, 1, 128, 128)), "it takes no mask tensor"),
        ("torch_masked.cudnn", masked(), ""),
        ("torch_masked.cudnn", masked(("bool", 128, 128)), ""),
        ("torch_masked.cudnn", attention(), "it is for calls with a mask"),
        ("torch_masked.cudnn", masked(("bfloat16", 2, 1, 128, 128)), ""),
        ("torch_masked.cudnn", masked(("float32", 2, 1, 128, 128)), "a boolean mask or one of bfloat16"),
        ("torch_masked.cudnn", masked(dense("bfloat16", 2, 1, 128, 128, alignment=2)), "the rows of mask do not begin"),
        ("torch_masked.cudnn", masked(("bool", 2, 1, 128, 1)), "a column for each key"),
        ("torch_masked.cudnn", masked(arch="sm75"), "it runs on CUDA, sm_80 and later"),
        ("torch_masked.cudnn", masked(q=("float32", 2, 8, 128, 64)), "it computes float16, bfloat16"),
        ("torch_masked.cudnn", masked(q=("bfloat16", 2, 7, 128, 64)), "7 heads of queries are no multiple of 2"),
        ("torch_masked.cudnn", masked(q=("bfloat16", 2, 8, 128, 136), k=("bfloat16", 2, 2, 128, 136)), "8 to 128"),
        ("torch_masked.cudnn", masked(q=("bfloat16", 2, 8, 1, 64)), "may be NaN"),
        ("torch_masked.cudnn", masked(q=("bfloat16", 2, 8, 1, 64), phase="infer"), ""),
        ("torch_masked.cudnn", masked(("bool", 2, 1, 192, 192), k=("bfloat16", 2, 2, 192, 64)), "may be NaN"),
        (
            "torch_masked.cudnn",
            masked(("bool", 2, 1, 100, 100), k=("bfloat16", 2, 2, 100, 64), phase="infer"),
            "in multiples of 8",
        ),
        ("quack.rms_norm", norm(), ""),
        ("quack.rms_norm", norm("gemma"), ""),
        ("quack.rms_norm", norm("llama"), "the formula is llama's"),
        ("quack.rms_norm", norm(x=("bfloat16", 4, 4095), weight=("bfloat16", 4095)), "columns in multiples of 8"),
        ("quack.rms_norm", norm(x=dense("bfloat16", 4, 4096, alignment=2)), "x does not begin at a multiple of 16"),
        ("quack.rms_norm", norm(arch="sm80"), "it runs on sm_90 and later"),
        ("quack.cross_entropy", loss(), ""),
        ("quack.cross_entropy", loss(arch="sm80"), "it runs on sm_90 and later"),
        ("quack.cross_entropy", loss(logits=("bfloat16", 8, 1001)), "columns in multiples of 8"),
        ("quack.cross_entropy", loss(target=("int64", 8, 1)), "one class index, int64"),
        ("quack.cross_entropy", loss(logits=dense("bfloat16", 8, 1000, alignment=4)), "logits does not begin at"),
        ("quack.linear_cross_entropy", linear(weight=("bfloat16", 1000, 16)), ""),
        ("quack.linear_cross_entropy", linear(), ""),
        ("quack.linear_cross_entropy", linear(weight=("bfloat16", 1000, 16), reduction="none"), "the mean or the sum"),
        ("quack.linear_cross_entropy", linear(weight=("float32", 1000, 16)), "have to be of one type"),
        ("flashinfer.rms_norm", norm(phase="infer"), ""),
        ("flashinfer.rms_norm", norm(), "it has no backward"),
        ("flashinfer.rms_norm", norm("llama", phase="infer"), "the formula is llama's"),
        ("flashinfer.swiglu", unit(phase="decode"), ""),
        ("flashinfer.swiglu", unit(up=("bfloat16", 8, 32), phase="decode"), "of one shape and type"),
        ("flashinfer.decode", query(), ""),
        ("flashinfer.decode", query(q=("bfloat16", 2, 8, 1, 64)), "a single query of one sequence"),
        ("flashinfer.decode", query(q=("bfloat16", 1, 10, 1, 64)), "heads of queries for each head of keys"),
        ("flashinfer.decode", query(q=("bfloat16", 1, 8, 1, 96), k=("bfloat16", 1, 2, 128, 96)), "a head_dim of 64"),
        ("triton_raw.decode", query(), ""),
        ("triton_raw.decode", query(q=("float32", 3, 8, 1, 64), k=("float32", 3, 2, 5, 64)), ""),
        ("triton_raw.decode", query(mask=("bool", 1, 1, 1, 128)), ""),
        ("triton_raw.decode", query(mask=("bool", 1, 128)), "a mask of four dimensions"),
        ("triton_raw.decode", query(causal=True), "a causal one sees the first key alone"),
        ("triton_raw.decode", query(phase="train"), "it has no backward"),
        ("triton_raw.decode", query(arch="sm75"), "the operands are on sm75"),
        ("triton_raw.decode", query(device="cpu", arch=""), "the operands are on cpu"),
        ("triton_raw.decode", query(k=("float16", 1, 2, 128, 64)), "these are bfloat16, float16 and float16"),
        ("triton_raw.decode", query(q=("bfloat16", 1, 8, 1, 96), k=("bfloat16", 1, 2, 128, 96)), "this is 96"),
        ("triton_raw.decode", query(q=("bfloat16", 1, 34, 1, 64)), "up to 16 heads of queries"),
        ("quack.softmax", call("softmax", x=("bfloat16", 8, 1000)), ""),
        ("quack.softmax", call("softmax", x=("bfloat16", 8, 1001)), "columns in multiples of 8"),
        ("quack.rope", rotation(), ""),
        ("quack.rope", rotation(cos=("bfloat16", 1, 1, 16, 64)), ""),
        ("quack.rope", rotation(mirrored=False), "the other repeats it is seen in eager code"),
        ("quack.rope", rotation(cos=("float32", 2, 1, 16, 64)), "have to be of one type"),
        ("quack.rope", rotation(cos=("bfloat16", 2, 8, 16, 64)), "for one row a position"),
        ("quack.rope", rotation(*2 * [("bfloat16", 2, 8, 16, 520)], ("bfloat16", 2, 1, 16, 520)), "up to 512"),
        (
            "quack.rope",
            rotation(q=dense("bfloat16", 2, 8, 16, 64)._replace(strides=(8196, 1024, 64, 1))),
            "the rows of q do not begin",
        ),
        (
            "quack.rope",
            rotation(q=dense("bfloat16", 2, 8, 16, 64)._replace(strides=(0, 0, 0, 0)), phase="backward"),
            "",
        ),
        ("quack.grouped_matmul", groups(), ""),
        ("quack.grouped_matmul", groups(weight=dense("bfloat16", 4, 64, 32)._replace(strides=(2048, 1, 64))), ""),
        ("quack.grouped_matmul", groups(x=("float32", 9, 64), weight=("float32", 4, 64, 32)), "computes float16 and"),
        ("quack.grouped_matmul", groups(x=("bfloat16", 9, 60), weight=("bfloat16", 4, 60, 32)), "in multiples of 8"),
        ("quack.grouped_matmul", groups(weight=("bfloat16", 4, 64, 30)), "columns in multiples of 8"),
        ("quack.grouped_matmul", groups(offsets=("int64", 4)), "offsets of int32"),
        ("flashinfer.rope", rotation(phase="decode"), ""),
        ("flashinfer.rope", rotation(), "it has no backward"),
        ("flashinfer.rope", rotation(phase="decode", mirrored=False), "the other repeats it is seen in eager code"),
        ("flashinfer.cache_update", writes(), ""),
        ("flashinfer.cache_update", writes(values=("bfloat16", 2, 8, 64, 64)), "of one shape"),
        ("flashinfer.cache_update", writes(*2 * [("bfloat16", 2, 8, 64, 96)]), "a head_dim of 64"),
        ("flashinfer.cache_update", writes(*2 * [("bfloat16", 2, 96, 64, 128)]), "at most 64 heads"),
        ("flashinfer.cache_update", writes(*2 * [("float32", 2, 8, 64, 128)]), "keys is float32"),
        ("liger.rope", rotation(), ""),
        ("liger.rope", rotation(q=("bfloat16", 2, 8, 15, 64)), "alike but for their heads"),
        ("liger.linear_cross_entropy", linear(), ""),
        ("liger.linear_cross_entropy", linear(reduction="none"), "the mean or the sum"),
        ("liger.linear_cross_entropy", linear(weight=("float32", 90, 16)), "have to be of one type"),
        ("chunked", linear(reduction="none"), ""),
        ("chunked", linear(target=("int64", 8, 90)), "one class index, int64"),
        ("torch_chunked.linear_cross_entropy", linear(), "not in float32"),
        ("liger.rms_norm", norm("llama"), ""),
        ("liger.rms_norm", norm(x=("bfloat16", 4, 131072), weight=("bfloat16", 131072)), "at most 65536 columns"),
        ("liger.rms_norm", norm(weight=("float32", 4096)), "the weight is float32"),
        ("liger.rms_norm", norm(x=("float64", 4, 64), weight=("float64", 64)), "x is float64"),
        ("liger.rms_norm", norm(device="cpu", arch=""), "it runs on CUDA"),
    ],
)
def test_limits_are_sentences(word, made, said):
    fits, why = find_torch_kernel(word, made.op).supports(made)
    assert (fits, said in why) == (not said, True)


def test_liger_refuses_the_variable_that_asks_for_other_kernels(monkeypatch):
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "triton")
    for kernel in find_torch_kernel("liger.rms_norm", "rms_norm"), find_torch_kernel("liger.swiglu", "swiglu"):
        fits, why = kernel.supports(norm("llama") if kernel.op == "rms_norm" else unit())
        assert (fits, why.rpartition(". ")[2]) == (False, "Fix: unset LIGER_KERNEL_IMPL")
    monkeypatch.setenv("LIGER_KERNEL_IMPL", " ")  # which Liger takes for none
    assert find_torch_kernel("liger.rms_norm", "rms_norm").supports(norm("llama")) == (True, "")


def test_a_call_can_be_copied_pickled_and_written_but_not_changed():
    made = call("rms_norm", x=("float32", 2, 8), attributes={"epsilon": 1e-6})
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)):
        assert (again, again.key) == (made, made.key)
        with pytest.raises(TypeError, match=r"a call are frozen"):
            again.attributes["epsilon"] = 1.0
    assert asdict(made)["operands"] == made.operands
