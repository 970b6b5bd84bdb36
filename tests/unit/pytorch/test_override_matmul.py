# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The matmul family under a policy: every operator and form, compared with PyTorch's own on the same arguments."""

from __future__ import annotations

import math
import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = pytest.mark.torch

aten = torch.ops.aten
OURS = ["cpu.reference", "cpu.blas"]
STRICT = {"schema": "xpuruntime.policy/1", "mode": "strict"}


@pytest.fixture(autouse=True)
def _no_policy_is_left():
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    torch.manual_seed(0)
    yield
    xt.clear_kernel_policy()


def strict(kernel):
    return {**STRICT, "kernels": {"matmul": kernel}}


def served() -> set[str]:
    return {decision.chosen for decision in xrt.decisions()}


def same(found, expected) -> None:
    """Equal in value, dtype, shape and strides."""
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    assert found.dtype == expected.dtype


def matrices(dtype=torch.float32):
    return torch.randn(4, 5, dtype=dtype), torch.randn(5, 3, dtype=dtype)


def batches(dtype=torch.float32):
    return torch.randn(2, 4, 5, dtype=dtype), torch.randn(2, 5, 3, dtype=dtype)


FORMS = {
    "mm": lambda: (aten.mm.default, matrices(), {}),
    "bmm": lambda: (aten.bmm.default, batches(), {}),
    "mm_double": lambda: (aten.mm.default, matrices(torch.float64), {}),
    "mm_one_row": lambda: (aten.mm.default, (torch.randn(1, 5), torch.randn(5, 1)), {}),
    "mm_transposed": lambda: (aten.mm.default, (torch.randn(5, 4).t(), torch.randn(3, 5).t()), {}),
    "mm_expanded": lambda: (aten.mm.default, (torch.randn(4, 1).expand(4, 5), torch.randn(()).expand(5, 3)), {}),
    "mm_every_second": lambda: (aten.mm.default, (torch.randn(8, 10)[::2, ::2], torch.randn(5, 6)[:, ::2]), {}),
    "mm_column": lambda: (aten.mm.default, (torch.randn(4, 40)[:, ::8], torch.randn(5, 16)[:, 8:9]), {}),
    "mm_negative_bit": lambda: (
        aten.mm.default,
        (torch.randn(3, 3, dtype=torch.cfloat).conj().imag, torch.randn(3, 3)),
        {},
    ),
    "bmm_transposed": lambda: (aten.bmm.default, (torch.randn(2, 5, 4).mT, torch.randn(5, 2, 3).transpose(0, 1)), {}),
    "bmm_one_matrix": lambda: (aten.bmm.default, (batches()[0], torch.randn(5, 3).expand(2, 5, 3)), {}),
    "addmm_row": lambda: (aten.addmm.default, (torch.randn(3), *matrices()), {}),
    "addmm_row_2d": lambda: (aten.addmm.default, (torch.randn(1, 3), *matrices()), {}),
    "addmm_column": lambda: (aten.addmm.default, (torch.randn(4, 1), *matrices()), {}),
    "addmm_full": lambda: (aten.addmm.default, (torch.randn(4, 3), *matrices()), {}),
    "addmm_number": lambda: (aten.addmm.default, (torch.randn(()), *matrices()), {}),
    "addmm_expanded": lambda: (aten.addmm.default, (torch.randn(1).expand(3), *matrices()), {}),
    "addmm_square": lambda: (aten.addmm.default, (torch.randn(3, 1), torch.randn(3, 5), torch.randn(5, 3)), {}),
    "addmm_scaled": lambda: (aten.addmm.default, (torch.randn(3), *matrices()), {"beta": 0.5, "alpha": -2}),
    "addmm_beta": lambda: (aten.addmm.default, (torch.randn(4, 3), *matrices()), {"beta": 3}),
    "addmm_alpha": lambda: (aten.addmm.default, (torch.randn(3), *matrices()), {"alpha": 2.5}),
    "addmm_no_addend": lambda: (aten.addmm.default, (torch.full((3,), math.nan), *matrices()), {"beta": 0}),
    "baddbmm": lambda: (aten.baddbmm.default, (torch.randn(2, 4, 3), *batches()), {}),
    "baddbmm_row": lambda: (aten.baddbmm.default, (torch.randn(3), *batches()), {}),
    "baddbmm_scores": lambda: (
        aten.baddbmm.default,
        (torch.full((2, 4, 3), math.nan), *batches()),
        {"beta": 0.0, "alpha": 0.125},
    ),
    "baddbmm_scaled": lambda: (aten.baddbmm.default, (torch.randn(1, 4, 3), *batches()), {"beta": 2, "alpha": 0.5}),
    "relu": lambda: (aten._addmm_activation.default, (torch.randn(3), *matrices()), {}),
    "gelu": lambda: (aten._addmm_activation.default, (torch.randn(3), *matrices()), {"use_gelu": True}),
    "gelu_scaled": lambda: (
        aten._addmm_activation.default,
        (torch.randn(4, 3), *matrices()),
        {"use_gelu": True, "alpha": 0.5},
    ),
}


@pytest.mark.parametrize("kernel", OURS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_served_and_equals_pytorchs(form, kernel):
    op, args, more = FORMS[form]()
    expected = op(*args, **more)
    with xt.kernel_policy(strict(kernel)):
        same(op(*args, **more), expected)
        same(op(*args, **more), expected)  # by the route that is known now
    assert served() == {kernel}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_passes_through_where_no_rule_matches(form):
    op, args, more = FORMS[form]()
    expected = op(*args, **more)
    with xt.kernel_policy(rules=[{"match": {"op": "matmul", "m": 4096}, "use": "cpu.reference"}]):
        assert torch.equal(op(*args, **more), expected)
    assert served() == set()


@pytest.mark.parametrize("form", FORMS)
def test_out_is_written_and_resized_as_pytorch_does(form):
    op, args, more = FORMS[form]()
    into = getattr(aten, op._schema.name.removeprefix("aten::")).out
    expected = op(*args, **more)
    shape, last = expected.shape, expected.shape[-1]
    wide = {"dtype": expected.dtype}
    with xt.kernel_policy(strict("cpu.reference")):
        for out in (
            torch.empty(shape, **wide),
            torch.empty(0, **wide),
            torch.empty(shape[::-1], **wide).permute(*reversed(range(len(shape)))),
            torch.empty(*shape[:-1], 8, **wide)[..., :last],
        ):
            strides = into(*args, **more, out=out.clone(memory_format=torch.preserve_format)).stride()
            assert into(*args, **more, out=out) is out
            torch.testing.assert_close(out, expected)
            assert out.stride() == (strides if out.is_contiguous() else out.stride())
    assert served() == {"cpu.reference"}


def test_an_out_of_another_shape_warns_as_pytorch_does():
    a, b = matrices()
    with (
        xt.kernel_policy(strict("cpu.reference")),
        pytest.warns(UserWarning, match="was resized since it had shape"),
    ):
        found = torch.mm(a, b, out=torch.empty(2, 2))
    torch.testing.assert_close(found, a @ b)


@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_in_place(name):
    a, b = matrices() if name == "addmm" else batches()
    c = torch.randn(*a.shape[:-1], 3)
    expected = getattr(torch, name)(c, a, b, beta=0.5, alpha=2)
    with xt.kernel_policy(strict("cpu.reference")):
        found = getattr(c, f"{name}_")(a, b, beta=0.5, alpha=2)
    assert found is c
    torch.testing.assert_close(c, expected)
    assert served() == {"cpu.reference"}


def test_out_that_is_an_operand_gets_the_product():
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    expected = a @ b
    with xt.kernel_policy(strict("cpu.reference")):
        torch.mm(a, b, out=a)
    torch.testing.assert_close(a, expected)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)), "cannot be multiplied"),
        (lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2, dtype=torch.float64)), "dtype"),
        (lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=torch.ones(2, 2, dtype=torch.float64)), "dtype"),
        (lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=torch.ones(1, 2).expand(2, 2)), "single memory"),
        (lambda: torch.bmm(torch.ones(2, 2, 3), torch.ones(1, 3, 2)), "batch"),
        (lambda: torch.addmm(torch.ones(5), torch.ones(2, 3), torch.ones(3, 2)), "expanded size"),
        (lambda: torch.addmm(torch.ones(5), torch.ones(2, 3), torch.ones(3, 2), beta=0), "expanded size"),
        (lambda: torch.addmm(torch.ones(2, dtype=torch.float64), torch.ones(2, 3), torch.ones(3, 2)), "dtype"),
        (lambda: torch.addmm(torch.ones(2), torch.ones(2, 3), torch.ones(3, 2), beta=1j), "converted"),
    ],
)
def test_what_pytorch_refuses_is_refused_in_its_words(call, error):
    with pytest.raises(RuntimeError, match=error) as native:
        call()
    with xt.kernel_policy(strict("cpu.reference")), pytest.raises(RuntimeError, match=error) as found:
        call()
    assert str(found.value).splitlines()[0] == str(native.value).splitlines()[0]


@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_empty_products_are_pytorchs_own(m, k, n):
    a, b = torch.ones(m, k), torch.ones(k, n)
    with xt.kernel_policy(strict("cpu.blas")):
        same(a @ b, torch.zeros(m, n))
        same(torch.addmm(torch.ones(n), a, b), torch.ones(m, n))
        same(torch.bmm(a[None], b[None]), torch.zeros(1, m, n))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.complex64])
def test_products_of_other_than_floats_are_no_matmul_of_a_policy(dtype):
    a = torch.ones(2, 3).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xt.kernel_policy(strict("cpu.blas")):
            assert torch.equal(torch.mm(a, a.t()), torch.full((2, 2), 3).to(dtype))
    assert served() == set()


def test_half_precision_is_rounded_once():
    a, b = torch.randn(16, 512).bfloat16(), torch.randn(512, 16).bfloat16()
    c = torch.randn(16, 16).bfloat16()
    exact = (c.double() + 0.25 * (a.double() @ b.double())).bfloat16()
    with xt.kernel_policy(strict("cpu.reference")):
        found = torch.addmm(c, a, b, alpha=0.25)
    assert found.dtype == torch.bfloat16
    assert (found == exact).double().mean() > 0.98


def test_the_reason_names_only_the_kernel_that_was_asked_for():
    a = torch.ones(2, 2).bfloat16()
    with (
        xt.kernel_policy(matmul="cpu.blas"),
        pytest.warns(
            XpuRuntimeWarning, match=r"asks for cpu\.blas: cpu\.blas: OpenBLAS multiplies fp32 and fp64"
        ) as said,
    ):
        torch.mm(a, a)
    assert len(said) == 1
    assert "cuda_raw" not in str(said[0].message)


def test_strict_refuses_with_that_reason():
    a = torch.ones(2, 2).bfloat16()
    with xt.kernel_policy(strict("cpu.blas")), pytest.raises(UnsupportedOperationError, match="OpenBLAS multiplies"):
        torch.mm(a, a)


def test_the_next_word_serves_what_the_first_cannot():
    with xt.kernel_policy(strict(["cublas.cublasLt", "cpu.blas", "cpu.reference"])):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.mm(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16())
    assert served() == {"cpu.blas", "cpu.reference"}


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: torch.nn.functional.linear(x, w),
        lambda x, w: torch.nn.functional.linear(x, w, w[:, 0]),
        lambda x, w: torch.matmul(x[None, None], w.t()),
        lambda x, w: torch.einsum("ik,jk->ij", x, w),
        lambda x, w: (x @ w.t()).sum(),
        lambda x, w: torch.baddbmm(x[None, :, :3], x[None], w.t()[None], beta=0.5, alpha=2),
        lambda x, w: torch.addmm(x[:, :3], x, w.t(), beta=2.0),
    ],
)
def test_gradients_are_those_of_pytorch(run):
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    expected = torch.autograd.grad(run(x, w).square().sum(), (x, w))
    with xt.kernel_policy(strict("cpu.reference")):
        grad = torch.autograd.grad(run(x, w).square().sum(), (x, w))
    torch.testing.assert_close(grad, expected)
    assert served() == {"cpu.reference"}


def test_second_derivatives():
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with xt.kernel_policy(strict("cpu.reference")):
        assert torch.autograd.gradgradcheck(torch.addmm, (bias, x, w))


def test_switching_determinism_on_reaches_our_kernels():
    a = torch.randn(4, 4)
    with xt.kernel_policy(strict("cpu.blas")):
        torch.mm(a, a)
        torch.use_deterministic_algorithms(True)
        try:
            torch.mm(a, a)
        finally:
            torch.use_deterministic_algorithms(False)
    assert served() == {"cpu.blas"}
    assert len(xrt.decisions()) == 2


@pytest.mark.parametrize("case", ["scalar", "rows"])
def test_scaled_mm(case):
    a = torch.randn(16, 32).to(torch.float8_e4m3fn)
    b = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    scales = (
        (torch.tensor(0.5), torch.tensor(2.0))
        if case == "scalar"
        else (torch.rand(16, 1) + 0.5, torch.rand(1, 16) + 0.5)
    )
    try:
        expected = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        assert case == "rows"  # which this PyTorch has not on the CPU
        return
    if case == "rows":
        with (
            xt.kernel_policy(matmul="cpu.reference"),
            pytest.warns(XpuRuntimeWarning, match="one scale for each matrix"),
        ):
            assert torch.equal(torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16), expected)
        return
    with xt.kernel_policy(strict("cpu.reference")):
        found = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
        into = torch.empty(16, 16, dtype=torch.bfloat16)
        torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, out=into)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    assert torch.equal(found, into)
    assert served() == {"cpu.reference"}


@pytest.mark.parametrize("form", ["mm", "mm.out", "addmm", "addmm.out", "bmm", "in place"])
def test_known_native_calls_do_not_come_to_python(form, monkeypatch):
    from xpuruntime.pytorch.dispatch import compiled_policy, context
    from xpuruntime.pytorch.dispatch.context import CONTEXT
    from xpuruntime.pytorch.dispatch.overrides import matmul

    a, b, c, out = torch.randn(3, 4), torch.randn(4, 2), torch.randn(2), torch.empty(3, 2)
    run = {
        "mm": lambda: torch.mm(a, b),
        "mm.out": lambda: torch.mm(a, b, out=out),
        "addmm": lambda: torch.addmm(c, a, b),
        "addmm.out": lambda: torch.addmm(c, a, b, out=out),
        "bmm": lambda: torch.bmm(a[None], b[None]),
        "in place": lambda: torch.zeros(3, 2).addmm_(a, b),
    }[form]
    asked = []
    real = matmul._run

    def count(*args):
        asked.append(1)
        return real(*args)

    monkeypatch.setattr(matmul, "_run", count)
    with xt.kernel_policy(rules=[{"match": {"op": "matmul", "m": 4096}, "use": "cpu.reference"}]):
        expected = run().clone()
        assert len(asked) == 1
        for _ in range(3):
            assert torch.equal(run(), expected)
        assert len(asked) == 1
        with context.thread_policy(compiled_policy.CompiledPolicy(context.active_policy().policy)):
            run()
        assert len(asked) == 2  # a thread's own policy has routes of its own
        run()
        assert len(asked) == 2

        class Watching:
            def call(self, name, op, route, run, args, kwargs):
                assert route is not None
                return run(*args, **kwargs)

        before = CONTEXT.watch(Watching())
        try:
            assert torch.equal(run(), expected)
        finally:
            CONTEXT.watch(before)
        assert len(asked) == 3
        run()
        assert len(asked) == 3
