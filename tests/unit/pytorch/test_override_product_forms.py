# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Products in place, and those with a type for the result, under a policy: rules, gradients, types and refusals."""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]

IN_PLACE = {
    "addmm_": lambda: (torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5)),
    "baddbmm_": lambda: (torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
}


def strict(**kernels):
    return xrt.Policy(mode="strict", kernels=kernels)


def served():
    return [(decision.chosen, decision.phase, decision.count) for decision in xrt.decisions()]


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("numbers", [{}, {"beta": 0.5, "alpha": -2}, {"beta": 0}])
def test_in_place_it_is_the_tensor_itself_that_has_the_result(name, numbers):
    c, a, b = IN_PLACE[name]()
    expected = getattr(c.clone(), name)(a, b, **numbers)
    view = torch.empty(*c.shape[:-1], 2 * c.shape[-1])[..., ::2].copy_(c)  # with gaps
    with xt.kernel_policy(strict(matmul="cpu.reference")):
        for into in (c, view):
            version = into._version
            assert getattr(into, name)(a, b, **numbers) is into
            assert into._version == version + 1
            torch.testing.assert_close(into, expected)
    assert {kernel for kernel, *_ in served()} == {"cpu.reference"}


@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_of_products_in_place(name):
    def gradients():
        c, a, b = (x.clone().requires_grad_() for x in tensors)
        getattr(c * 1, name)(a, b, beta=0.5, alpha=2).square().sum().backward()
        return c.grad, a.grad, b.grad

    tensors = IN_PLACE[name]()
    expected = gradients()
    rules = [{"match": {"op": "matmul", "phase": "backward"}, "use": "cpu.blas"}]
    with xt.kernel_policy(strict(matmul="cpu.reference", rules=rules)):
        found = gradients()
    torch.testing.assert_close(found, expected)
    phases = {(kernel, phase) for kernel, phase, _ in served()}
    assert phases == {("cpu.reference", "train"), ("cpu.blas", "backward")}


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.zeros(5).addmm_(torch.ones(3, 4), torch.ones(4, 5)),  # what addmm would expand
        lambda: torch.zeros(1, 5).addmm_(torch.ones(3, 4), torch.ones(4, 5)),
        lambda: torch.zeros(1, 3, 5).baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5)),
        lambda: torch.zeros(3, 5).addmm_(torch.ones(3, 4), torch.ones(5, 4)),
        lambda: torch.zeros(3, 5, dtype=torch.float64).addmm_(torch.ones(3, 4), torch.ones(4, 5)),
        lambda: torch.zeros(3, 5, requires_grad=True).addmm_(torch.ones(3, 4), torch.ones(4, 5)),
    ],
)
def test_what_pytorch_refuses_in_place_is_refused_in_its_words(call):
    with pytest.raises(RuntimeError) as native:
        call()
    with xt.kernel_policy(strict(matmul="cpu.reference")), pytest.raises(RuntimeError) as found:
        call()
    assert str(found.value).splitlines()[0] == str(native.value).splitlines()[0]


@pytest.fixture
def typed():
    """PyTorch has products with a type for the result on CUDA alone: these stand for its own on the CPU."""
    library = torch.library.Library("aten", "IMPL")

    def product(a, b, dtype):
        return a.to(dtype) @ b.to(dtype)

    def sum_of(c, a, b, dtype, *, beta=1, alpha=1):
        return beta * c.to(dtype) + alpha * product(a, b, dtype)

    for name in ("mm", "bmm"):
        library.impl(f"{name}.dtype", product, "CPU")
    for name in ("addmm", "baddbmm"):
        library.impl(f"{name}.dtype", sum_of, "CPU")
    yield
    xt.clear_kernel_policy()
    library._destroy()


def forms(half):
    a, b = torch.randn(3, 4).to(half), torch.randn(4, 5).to(half)
    c = torch.randn(3, 5)
    return {
        "mm": lambda: torch.mm(a, b, out_dtype=torch.float32),
        "mm of its own type": lambda: torch.mm(a, b, out_dtype=half),
        "bmm": lambda: torch.bmm(a[None], b[None], out_dtype=torch.float32),
        "addmm": lambda: torch.addmm(c, a, b, out_dtype=torch.float32, beta=0.5, alpha=2),
        "addmm of halves": lambda: torch.addmm(c.to(half), a, b, out_dtype=torch.float32),
        "addmm of a row": lambda: torch.addmm(c[0], a, b, out_dtype=torch.float32),
        "baddbmm": lambda: torch.baddbmm(c[None], a[None], b[None], out_dtype=torch.float32, beta=2),
    }


@pytest.mark.usefixtures("typed")
@pytest.mark.parametrize(("half", "word"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_the_result_has_the_type_that_is_stated(half, word):
    calls = forms(half)
    expected = {name: call() for name, call in calls.items()}
    with xt.kernel_policy(strict(matmul="cpu.reference")):
        found = {name: call() for name, call in calls.items()}
    torch.testing.assert_close(found, expected)  # which compares types, too
    assert sum(count for _, _, count in served()) == len(calls)
    rules = [{"match": {"op": "matmul", "dtype": word}, "use": "cpu.reference"}]
    xrt.clear_decisions()
    with xt.kernel_policy(strict(matmul="cpu.blas", rules=rules)):
        calls["mm"]()
    assert [kernel for kernel, *_ in served()] == ["cpu.reference"]
    message = r"aten::mm.dtype of \[3, 4\] and \[4, 5\].* asks for cpu.blas"
    with xt.kernel_policy(strict(matmul="cpu.blas")), pytest.raises(UnsupportedOperationError, match=message):
        calls["mm"]()


@pytest.mark.usefixtures("typed")
def test_pytorch_has_no_gradient_for_them_and_so_it_stays():
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    with xt.kernel_policy(strict(matmul="cpu.reference")):
        out = torch.mm(x, torch.ones(4, 5, dtype=torch.bfloat16), out_dtype=torch.float32)
        with pytest.raises(RuntimeError, match="derivative for aten::mm is not implemented"):
            out.sum().backward()
