# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Products under a policy, in every form, in place and in recurrent layers, compared with PyTorch's own."""

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


@pytest.fixture(autouse=True)
def _no_policy_is_left():
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    torch.manual_seed(0)
    yield
    xt.clear_kernel_policy()


def strict(**kernels):
    return xrt.Policy(mode="strict", kernels=kernels)


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
    with xt.kernel_policy(strict(matmul=kernel)):
        same(op(*args, **more), expected)
        same(op(*args, **more), expected)  # by the route that is known now
    assert served() == {kernel}


def test_an_out_of_another_shape_warns_as_pytorch_does():
    a, b = matrices()
    with (
        xt.kernel_policy(strict(matmul="cpu.reference")),
        pytest.warns(UserWarning, match="was resized since it had shape"),
    ):
        found = torch.mm(a, b, out=torch.empty(2, 2))
    torch.testing.assert_close(found, a @ b)


def test_half_precision_is_rounded_once():
    a, b = torch.randn(16, 512).bfloat16(), torch.randn(512, 16).bfloat16()
    c = torch.randn(16, 16).bfloat16()
    exact = (c.double() + 0.25 * (a.double() @ b.double())).bfloat16()
    with xt.kernel_policy(strict(matmul="cpu.reference")):
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
    with (
        xt.kernel_policy(strict(matmul="cpu.blas")),
        pytest.raises(UnsupportedOperationError, match="OpenBLAS multiplies"),
    ):
        torch.mm(a, a)


def test_the_next_word_serves_what_the_first_cannot():
    with xt.kernel_policy(strict(matmul=["cublas.cublasLt", "cpu.blas", "cpu.reference"])):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.mm(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16())
    assert served() == {"cpu.blas", "cpu.reference"}


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
    with xt.kernel_policy(strict(matmul="cpu.reference")):
        found = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
        into = torch.empty(16, 16, dtype=torch.bfloat16)
        torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, out=into)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    assert torch.equal(found, into)
    assert served() == {"cpu.reference"}


IN_PLACE = {
    "addmm_": lambda: (torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5)),
    "baddbmm_": lambda: (torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
}


def calls():
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
    assert {kernel for kernel, *_ in calls()} == {"cpu.reference"}


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
    phases = {(kernel, phase) for kernel, phase, _ in calls()}
    assert phases == {("cpu.reference", "train"), ("cpu.blas", "backward")}


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
    made = forms(half)
    expected = {name: call() for name, call in made.items()}
    with xt.kernel_policy(strict(matmul="cpu.reference")):
        found = {name: call() for name, call in made.items()}
    torch.testing.assert_close(found, expected)  # which compares types, too
    assert sum(count for _, _, count in calls()) == len(made)
    rules = [{"match": {"op": "matmul", "dtype": word}, "use": "cpu.reference"}]
    xrt.clear_decisions()
    with xt.kernel_policy(strict(matmul="cpu.blas", rules=rules)):
        made["mm"]()
    assert [kernel for kernel, *_ in calls()] == ["cpu.reference"]
    message = r"aten::mm.dtype of \[3, 4\] and \[4, 5\].* asks for cpu.blas"
    with xt.kernel_policy(strict(matmul="cpu.blas")), pytest.raises(UnsupportedOperationError, match=message):
        made["mm"]()


@pytest.mark.usefixtures("typed")
def test_pytorch_has_no_gradient_for_them_and_so_it_stays():
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    with xt.kernel_policy(strict(matmul="cpu.reference")):
        out = torch.mm(x, torch.ones(4, 5, dtype=torch.bfloat16), out_dtype=torch.float32)
        with pytest.raises(RuntimeError, match="derivative for aten::mm is not implemented"):
            out.sum().backward()


def lstm():
    return torch.nn.Sequential(torch.nn.LSTM(8, 8)), torch.randn(3, 2, 8)


def test_it_is_said_once_and_runs_as_ever():
    model, x = lstm()
    expected = model(x)[0]
    with xt.kernel_policy(matmul="cpu.blas"):
        with pytest.warns(XpuRuntimeWarning, match=r"mkldnn_rnn_layer of \[3, 2, 8\] fp32 on cpu runs by torch.rnn"):
            found = model(x)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)[0].sum().backward()
    torch.testing.assert_close(found, expected)


def test_strict_refuses_it_and_a_rule_allows_it():
    model, x = lstm()
    with xt.kernel_policy(strict(matmul="cpu.blas")), pytest.raises(UnsupportedOperationError, match="use: torch"):
        model(x)
    rules = [{"match": {"module": "0"}, "use": "torch"}]
    with xt.kernel_policy(strict(matmul="cpu.blas", rules=rules)):
        model(x)[0].sum().backward()
    assert model[0].weight_ih_l0.grad is not None


def test_a_rule_for_the_backward_alone_is_not_met_either():
    model, x = lstm()
    rules = [{"match": {"op": "matmul", "phase": "backward"}, "use": "cpu.blas"}]
    with xt.kernel_policy(strict(rules=rules)):
        loss = model(x)[0].sum()
        with pytest.raises(UnsupportedOperationError, match=r"mkldnn_rnn_layer_backward .* kernels.rules\[0\]"):
            loss.backward()


def test_compiled_code_that_has_one_is_refused_too():
    model, x = lstm()
    torch._dynamo.reset()
    with xt.kernel_policy(strict(matmul="cpu.blas")), pytest.raises(UnsupportedOperationError, match="recurrent layer"):
        torch.compile(model, backend="eager")(x)
    torch._dynamo.reset()


def test_layers_that_multiply_step_by_step_obey():
    layer, x = torch.nn.GRU(8, 8), torch.randn(3, 2, 8)
    with xt.kernel_policy(strict(matmul="cpu.reference")):
        layer(x)[0].sum().backward()
    assert {decision.chosen for decision in xrt.decisions()} == {"cpu.reference"}
    assert xt.coverage_gaps(strict(matmul="cpu.reference"), module=layer) == ()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")  # by oneDNN, says PyTorch
@pytest.mark.parametrize("kind", ["plain", "projecting", "fp64", "fp16", "bf16"])
def test_what_is_said_before_is_what_runs(kind):
    """An LSTM of a type that oneDNN has no kernel for, or with projections, multiplies step by step."""
    dtype = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)
    layer = torch.nn.LSTM(8, 8, proj_size=4 if kind == "projecting" else 0, dtype=dtype)
    said = [gap.what for gap in xt.coverage_gaps(xrt.KernelPolicy(matmul="cpu.reference"), module=layer)]
    with warnings.catch_warnings(record=True) as seen, torch.no_grad(), xt.kernel_policy(matmul="cpu.reference"):
        warnings.simplefilter("always")
        layer(torch.randn(3, 2, 8, dtype=dtype))
    assert said == ["LSTM"] * sum("recurrent layer" in str(one.message) for one in seen)


def test_dynamo_does_not_follow_what_stands_behind_an_operator():
    """An LSTM breaks the graph, and what it calls in Python is no code of the user's to be compiled."""
    model, x = lstm()
    torch._dynamo.reset()
    with xt.kernel_policy(matmul="cpu.blas"), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=XpuRuntimeWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        torch.compile(model, backend="eager")(x)[0].sum().backward()
    torch._dynamo.reset()


def test_switching_determinism_on_reaches_our_kernels():
    a = torch.randn(4, 4)
    with xt.kernel_policy(strict(matmul="cpu.blas")):
        torch.mm(a, a)
        torch.use_deterministic_algorithms(True)
        try:
            torch.mm(a, a)
        finally:
            torch.use_deterministic_algorithms(False)
    assert served() == {"cpu.blas"}
    assert len(xrt.decisions()) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2, dtype=torch.float64)),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=torch.ones(2, 2, dtype=torch.float64)),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=torch.ones(1, 2).expand(2, 2)),
        lambda: torch.bmm(torch.ones(2, 2, 3), torch.ones(1, 3, 2)),
        lambda: torch.addmm(torch.ones(5), torch.ones(2, 3), torch.ones(3, 2)),
        lambda: torch.addmm(torch.ones(2, dtype=torch.float64), torch.ones(2, 3), torch.ones(3, 2)),
        lambda: torch.addmm(torch.ones(2), torch.ones(2, 3), torch.ones(3, 2), beta=1j),
        lambda: torch.zeros(5).addmm_(torch.ones(3, 4), torch.ones(4, 5)),  # what addmm would expand
        lambda: torch.zeros(1, 3, 5).baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5)),
        lambda: torch.zeros(3, 5, requires_grad=True).addmm_(torch.ones(3, 4), torch.ones(4, 5)),
    ],
)
def test_what_pytorch_refuses_is_refused_in_its_words(call):
    with pytest.raises(RuntimeError) as native:
        call()
    with xt.kernel_policy(strict(matmul="cpu.reference")), pytest.raises(RuntimeError) as found:
        call()
    assert str(found.value).splitlines()[0] == str(native.value).splitlines()[0]
