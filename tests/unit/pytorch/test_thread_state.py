# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a policy leaves with a thread of PyTorch's: nothing that every node of autograd would copy from then on."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

#: PyTorch makes a stack of transforms for a thread that asks for it, and keeps it. Whether it has is told by the
#: pointer behind at::functorch::functorchTLSAccessor().
SCRIPT = """
import ctypes, pathlib, torch
import xpuruntime.pytorch as xt

library = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
stack = library._ZN2at9functorch20functorchTLSAccessorEv
stack.restype = ctypes.POINTER(ctypes.c_void_p)

x, q = torch.randn(4, 8, requires_grad=True), torch.randn(1, 2, 8, 16, requires_grad=True)
def work():
    torch.nn.functional.layer_norm(x @ x.T @ x, (8,)).sum().backward()
    torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    with torch.no_grad():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

def made():
    return stack()[0] is not None

work()
assert not made(), "PyTorch makes it by itself"
nowhere = [{"match": {"op": op, "dtype": "fp64"}, "use": "cpu.reference"} for op in ("matmul", "layer_norm")]
for policy in (
    {"rules": nowhere},
    {"matmul": "cpu.blas", "layer_norm": "cpu.reference", "attention": "cpu.reference"},
    {"rules": [{"match": {"op": "attention", "phase": "train"}, "use": "cpu.reference"}]},
):
    with xt.kernel_policy(**policy):
        work(), work()
    assert not made(), policy
with xt.kernel_policy(matmul="cpu.blas"), xt.explain():
    work()
assert not made(), "explain"
torch._C._functorch.get_interpreter_stack()
assert made(), "this test does not see it"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the name of the function is that of Linux's compilers")
def test_no_stack_of_transforms_is_made_for_a_thread():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
