# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of another package for the operations of models, for the tests of these."""

from __future__ import annotations

import pytest
import torch

import xpuruntime as xrt
from xpuruntime.ops import plugins
from xpuruntime.ops.torch_kernels import forget_torch_kernels
from xpuruntime.pytorch.providers import operations

REFERENCES = {
    op: operations.OPERATIONS[op].reference for op in ("swiglu", "geglu", "rope", "cross_entropy", "grouped_matmul")
}


class WideKernel(plugins.TorchKernel):
    """A kernel of another package: the definition in float64, rounded at the end."""

    def __init__(self, op):
        self.id, self.op = f"package.{op}", op

    def supports(self, call):
        return True, ""

    def _compute(self, call, tensors):
        options = {name: value for name, value in call.attributes.items() if name != "paired"}
        wide = [x.double() if x.is_floating_point() else x for x in tensors]
        out = REFERENCES[self.op](*wide, **options)
        outputs = (out,) if isinstance(out, torch.Tensor) else out
        dtype = torch.float32 if call.attributes.get("upcast") else tensors[0].dtype
        return tuple(x.to(dtype) for x in outputs)

    def forward(self, call, *tensors):
        outputs = self._compute(call, tensors)
        if self.op == "rope":
            return tuple(map(operations.laid_out, outputs, tensors)), ()
        return tuple(x.contiguous() for x in outputs), ()

    def backward(self, call, saved, grads):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in saved.inputs]
            made = self._compute(call, inputs)
            wanted = [x for x in inputs if x.requires_grad]
            grad = iter(torch.autograd.grad(made, wanted, tuple(grads)))
        if self.op == "rope":
            return [*map(operations.laid_out, grad, grads), None, None]
        return [next(grad) if x.requires_grad else None for x in inputs]


@pytest.fixture
def package():
    """Register the kernels, and forget them afterwards."""
    plugins.register(plugins.KernelBackend("package", "cpu", "1"), *map(WideKernel, REFERENCES))
    yield
    forget_torch_kernels("package")
    plugins._sources.pop("package", None)


def strict(*ops):
    return xrt.Policy(mode="strict", kernels={op: f"package.{op}" for op in ops})


def rows_of(found, op):
    return [row for row in found.rows if row.op == op]
