# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A step under a policy that names Liger's RMS norm, whose Triton kernels are interpreted on the CPU."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import torch
import triton
from triton import language as tl
from triton.runtime import interpreter

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.pytorch.providers.operators import perform

convert = interpreter._implicit_cvt


def as_compiled(value):
    """Return an argument as compiled kernels get it: Triton's interpreter hands floats over as Python's."""
    if type(value) is not float:
        return convert(value)
    return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)


interpreter._implicit_cvt = as_compiled


def rsqrt(x):
    return 1.0 / tl.sqrt(x)


def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


def others(generator):
    """Yield the other operations that Liger serves, each with operands and attributes."""
    gate, up = (torch.randn(3, 40, generator=generator, requires_grad=True) for _ in range(2))
    yield "swiglu", {"gate": gate, "up": up}, {}
    yield "geglu", {"gate": gate, "up": up}, {"approximate": "tanh"}
    for batch, angles in ((2, torch.randn(1, 1, 5, 4, generator=generator)), (2, torch.randn(2, 1, 5, 4))):
        q = torch.randn(batch, 5, 2, 8, generator=generator).transpose(1, 2).requires_grad_()
        k = torch.randn(batch, 1, 5, 8, generator=generator, requires_grad=True)
        turned = {name: f(torch.cat((angles, angles), -1)) for name, f in (("cos", torch.cos), ("sin", torch.sin))}
        yield "rope", {"q": q, "k": k, **turned}, {"mirrored": True}
    q, k = (torch.randn(1, 1, 1, 8, generator=generator, requires_grad=True) for _ in range(2))
    turned = {name: torch.full((1, 1, 1, 8), value) for name, value in (("cos", 0.6), ("sin", 0.8))}
    yield "rope", {"q": q, "k": k, **turned}, {"mirrored": True}  # whose heads and positions are the same in memory
    logits = torch.randn(6, 50, generator=generator, requires_grad=True)
    target = torch.tensor([0, 7, -100, 49, 3, 3])
    for reduction in ("mean", "sum", "none"):
        yield "cross_entropy", {"logits": logits, "target": target}, {"reduction": reduction}
        halves = logits.detach().to(torch.bfloat16).requires_grad_()
        yield "cross_entropy", {"logits": halves, "target": target}, {"reduction": reduction, "upcast": True}
    x, weight, bias = (torch.randn(*s, generator=generator, requires_grad=True) for s in ((6, 8), (50, 8), (50,)))
    for reduction in ("mean", "sum"):
        for operands in ({"bias": bias}, {}):
            operands |= {"x": x, "weight": weight if operands else weight.detach(), "target": target}
            yield "linear_cross_entropy", operands, {"reduction": reduction}


def with_gradients(op, operands, attributes):
    before = [x.detach().clone() for x in operands.values()]
    made = perform(op, operands, attributes)
    outputs = made if isinstance(made, tuple) else (made,)
    wanted = [x for x in operands.values() if x.requires_grad]
    grads = [torch.linspace(0.5, 2, out.numel()).view_as(out) for out in outputs]
    upstream = [grad.clone() for grad in grads]
    gradients = *outputs, *torch.autograd.grad(outputs, wanted, grads)
    assert all(map(torch.equal, grads, upstream))
    assert all(torch.equal(x, y) for x, y in zip(operands.values(), before, strict=True))
    return gradients


def llama() -> None:
    """Take a step of a Llama of transformers by Liger's kernels, and one without."""
    sys.modules["torchvision"] = None
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=64, **sizes))
    ids = torch.randint(0, 64, (2, 9))

    def step():
        loss = model(ids, labels=ids).loss
        return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    expected = step()
    kernels = {op: f"liger.{op}" for op in ("rms_norm", "swiglu", "rope", "linear_cross_entropy")}
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels=kernels)), xt.explain() as report:
        results = step()
    rows = {(row.op, row.resolved, row.phase) for row in report.rows if row.op in kernels}
    assert rows == {(op, kernel, phase) for op, kernel in kernels.items() for phase in ("train", "backward")}, rows
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)
    for result, wanted in zip(step(), expected, strict=True):  # nothing is left of it
        assert torch.equal(result, wanted)


def main() -> None:
    assert "liger_kernel" not in sys.modules
    import liger_kernel.ops.geglu as units
    import liger_kernel.ops.rms_norm as liger

    liger.rsqrt, units.tanh = triton.jit(rsqrt), triton.jit(tanh)  # the interpreter has no libdevice
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 96, generator=generator, requires_grad=True)
    weight = torch.randn(96, generator=generator, requires_grad=True)
    upstream = torch.randn(3, 96, generator=generator)

    def step(formula):
        operands = {"x": x, "weight": weight}
        out = perform("rms_norm", operands, {"epsilon": 1e-6, "formula": formula})
        return out, *torch.autograd.grad(out, (x, weight), upstream)

    policy = xrt.Policy(mode="strict", kernels={"rms_norm": "liger.rms_norm"})
    for formula in ("torch", "llama", "gemma"):
        expected = step(formula)
        with xt.kernel_policy(policy), xt.explain() as report:
            results = step(formula)
        assert {row.resolved for row in report.rows if row.op} == {"liger.rms_norm"}
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted)
    for op, operands, attributes in others(generator):
        expected = with_gradients(op, operands, attributes)
        policy_of_op = xrt.Policy(mode="strict", kernels={op: f"liger.{op}"})
        with xt.kernel_policy(policy_of_op), xt.explain() as report:
            results = with_gradients(op, operands, attributes)
        assert {row.resolved for row in report.rows if row.op == op} == {f"liger.{op}"}, report
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted)
    with xt.kernel_policy(policy):
        torch.testing.assert_close(torch.nn.functional.rms_norm(x, (96,), weight, 1e-6), step("torch")[0])
    if find_spec("transformers") is not None:
        llama()
    print("served")


main()
