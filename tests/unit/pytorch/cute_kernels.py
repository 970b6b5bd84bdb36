# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Adapters of FlashAttention 4 and quack on tensors without data: kernels are compiled for sm_90, and not launched.

Everything but the launch is the real package: its checks, its compiler, and the tensors that it returns.
"""

from __future__ import annotations

import os

os.environ |= {
    "FLASH_ATTENTION_ARCH": "sm_90", "FLASH_ATTENTION_NUM_SMS": "132", "CUTE_DSL_ARCH": "sm_90a", "QUACK_ARCH": "90",
    "QUACK_CACHE_ENABLED": "0",
}  # fmt: skip

import sys
from types import SimpleNamespace

import quack.gemm
import torch
from cutlass.cutlass_dsl import tvm_ffi_provider
from torch._subclasses.fake_tensor import FakeTensorMode

from xpuruntime.ops.torch_kernels import Operand, Saved, TorchCall, find_torch_kernel
from xpuruntime.pytorch.providers.operations import OPERATIONS

launches = []


def launch(compiled, *args, **kwargs):
    launches.append(compiled)


tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs.__call__ = launch
tvm_ffi_provider.TVMFFIJitCompiledFunction.__call__ = launch
# What it asks the driver for.
quack.gemm.get_max_active_clusters = lambda *_, **__: 132
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132, major=9, minor=0)


def dense(x, **_):
    return x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


torch.Tensor.contiguous = dense  # a PyTorch without CUDA copies not even tensors without data

BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
LOSS = {"ignore_index": -100, "reduction": "mean", "upcast": False}
ATTENTION = {"causal": True, "scale": None}
NORM = {"epsilon": 1e-6, "formula": "torch"}
CASES = [
    ("fa4.attention", {"q": (BF16, 2, 8, 128, 64), "k": (BF16, 2, 2, 128, 64), "v": (BF16, 2, 2, 128, 64)}, ATTENTION),
    ("quack.rms_norm", {"x": (BF16, 5, 4096), "weight": (BF16, 4096)}, NORM),
    ("quack.softmax", {"x": (BF16, 2, 5, 1000)}, {}),
    ("quack.cross_entropy", {"logits": (BF16, 8, 1000), "target": (INT64, 8)}, LOSS),
    ("quack.rope", {"q": (BF16, 2, 8, 16, 64), "k": (BF16, 2, 2, 16, 64), "cos": (BF16, 1, 1, 16, 64),
                    "sin": (BF16, 1, 1, 16, 64)}, {"mirrored": True}),
    ("quack.rope", {"q": (BF16, 2, 8, 16, 64), "k": (BF16, 2, 2, 16, 64), "cos": (BF16, 2, 1, 16, 64),
                    "sin": (BF16, 2, 1, 16, 64)}, {"mirrored": True}),
    ("quack.grouped_matmul", {"x": (BF16, 100, 64), "weight": (BF16, 4, 64, 32), "offsets": (INT32, 4)}, {}),
]  # fmt: skip
#: What adapters refuse that the packages refuse as well.
REFUSED = [
    ("fa4.attention", dict.fromkeys("qkv", (FP32, 2, 8, 128, 64)), ATTENTION),
    ("quack.rms_norm", {"x": (BF16, 5, 4095), "weight": (BF16, 4095)}, NORM),
]


def described(op, phase, tensors, attributes):
    operands = {
        name: Operand(str(x.dtype).removeprefix("torch."), tuple(x.shape), x.stride()) for name, x in tensors.items()
    }
    return TorchCall(op, phase, "cuda:0", "sm90", operands, attributes)


def form(x):
    return tuple(x.shape), x.stride(), x.dtype


def expected(op, tensors, attributes):
    if op == "attention":
        return [form(tensors["q"])]
    row = OPERATIONS[op]
    metas = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors.values()]
    made = row.reference(*metas, **attributes)
    return [form(x.contiguous()) for x in (made if isinstance(made, tuple) else (made,))]


def serve(word, stated, attributes):
    op = word.partition(".")[2]
    kernel = find_torch_kernel(word, op)
    with FakeTensorMode():
        tensors = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (dtype, *shape) in stated.items()}
        call = described(op, "train", tensors, attributes)
        assert kernel.supports(call) == (True, ""), kernel.supports(call)
        outputs, extra = kernel.forward(call, *tensors.values())
        assert [form(x) for x in outputs] == expected(op, tensors, attributes), (word, outputs)
        if op not in ("attention", "rms_norm"):  # whose extra tensors are fixed
            assert [form(x) for x in extra] == [form(x) for x in kernel.saved_like(call, *tensors.values())], word
        assert bool(launches) is (op != "attention"), word  # FlashAttention sees that there is no data to launch for
        forward = len(launches)
        grads = [torch.empty_like(x) for x in outputs]
        for name in OPERATIONS[op].linear if op in OPERATIONS else ():  # no data of theirs is kept
            tensors[name] = torch.empty((), dtype=tensors[name].dtype, device="cuda").expand(tensors[name].shape)
        call = described(op, "backward", tensors, attributes)
        assert kernel.supports(call) == (True, ""), kernel.supports(call)
        found = kernel.backward(call, Saved(tuple(tensors.values()), tuple(outputs), tuple(extra)), grads)
        assert len(found) == len(tensors)
        for (name, x), gradient in zip(tensors.items(), found, strict=True):
            constant = op in OPERATIONS and name in OPERATIONS[op].without_gradient
            kept = x if op == "attention" else dense(x)
            assert constant or form(gradient) == form(kept), (word, name, gradient)
    print(f"{word}: {forward} launches, and {len(launches) - forward} of its gradient", flush=True)
    launches.clear()


def refuse(word, stated, attributes):
    op = word.partition(".")[2]
    kernel = find_torch_kernel(word, op)
    with FakeTensorMode():
        tensors = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (dtype, *shape) in stated.items()}
        call = described(op, "train", tensors, attributes)
        assert not kernel.supports(call)[0]
        try:
            kernel.forward(call, *tensors.values())
        except Exception as error:
            print(word, "refuses as well:", type(error).__name__)
        else:
            sys.exit(f"{word} takes what its adapter refuses: {kernel.supports(call)[1]}")
    launches.clear()


for case in CASES:
    serve(*case)
for case in REFUSED:
    refuse(*case)
print("compiled")
