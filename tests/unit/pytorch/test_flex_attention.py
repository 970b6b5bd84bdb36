# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`flex_attention` under a policy: unfused in eager code, and by its option ``BACKEND`` in code that is compiled.

The backends are for CUDA. Here the option is followed into the graph that Dynamo makes for operands on the CPU, which
are taken to be where the backends run.
"""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from attention_calls import rule, sdpa, strict  # noqa: E402 - it needs PyTorch
from torch.nn.attention import flex_attention as torch_flex  # noqa: E402

from xpuruntime.pytorch.attention import flash_impl  # noqa: E402
from xpuruntime.pytorch.attention.flash_impl import FlexChoice  # noqa: E402
from xpuruntime.pytorch.coverage.operation_table import FLEX, uncovered_kernel  # noqa: E402
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy  # noqa: E402
from xpuruntime.pytorch.dispatch.context import thread_policy  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides import flex_options, registry  # noqa: E402
from xpuruntime.pytorch.explanation.attribution import AttributedTime, TimeAttribution, UnattributedCalls  # noqa: E402
from xpuruntime.pytorch.explanation.requested import RequestedKernels  # noqa: E402
from xpuruntime.pytorch.explanation.summary import build_rows  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("no_policy_of_attention_is_left"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch's compiler, on loading
]

TRITON, DECODE, FLASH = "torch.flex_triton", "torch.flex_decode", "torch.flex_flash"


def distance(score, batch, head, q_index, k_index):
    del batch, head
    return score + (q_index - k_index)


def attend(x, **more):
    # Three tensors: before 2.13 Inductor takes none twice on a CPU.
    return torch_flex.flex_attention(x, x.sin(), x.cos(), score_mod=distance, **more)


def expected(x):
    place = torch.arange(x.shape[-2])
    scores = x @ x.sin().transpose(-1, -2) * x.shape[-1] ** -0.5 + (place[:, None] - place)
    return scores.softmax(-1) @ x.cos()


@pytest.fixture
def x():
    return torch.randn(1, 2, 32, 16)


@pytest.fixture
def backends_run_here(monkeypatch):
    monkeypatch.setattr(flex_options, "_KIND", "cpu")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Keeping:
    """A backend that keeps the options of each flex_attention in Dynamo's graphs, and runs these unfused."""

    def __init__(self):
        self.options = []

    def __call__(self, graph, inputs):
        del inputs
        nodes = graph.graph.nodes
        self.options.extend(n.args[6] for n in nodes if getattr(n.target, "__name__", "") == "flex_attention")

        def run(*args):
            with thread_policy(None):  # what is unfused is asked about by other tests
                return graph.forward(*args)

        return run


def options_of(function, *args, **settings):
    keeping = Keeping()
    torch.compile(function, backend=keeping, fullgraph=True, **settings)(*args)
    return keeping.options


def backends_of(function, *args, **settings):
    return [options["BACKEND"] for options in options_of(function, *args, **settings)]


def attention_rows(found):
    return [row for row in found.rows if row.op == "attention"]


def test_eager_code_is_unfused_and_says_so(x):
    said = pytest.warns(XpuRuntimeWarning, match=r"flex_attention of .* runs by torch.math, though .*torch.compile")
    with xt.kernel_policy(attention=TRITON), xt.explain() as report, said:
        out = attend(x)
    torch.testing.assert_close(out, expected(x))
    (row,) = attention_rows(report)
    assert row.operator == "higher_order::flex_attention"
    assert (row.requested, row.source) == ((TRITON,), "kernels.attention")
    assert (row.resolved, row.status) == ("torch.math", "substituted")
    assert "without torch.compile, flex_attention is unfused" in row.reason
    assert not any(name.startswith("xpuruntime") for name in row.observed)


@pytest.mark.parametrize("words", ["torch.math", "math", [TRITON, "torch.math"]])
def test_what_is_unfused_can_be_asked_for(x, words):
    with xt.kernel_policy({**strict(), "kernels": {"attention": words}}), xt.explain() as report:
        attend(x)
    (row,) = attention_rows(report)
    assert (row.resolved, row.status) == ("torch.math", "honoured")


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (TRITON, "without torch.compile"),
        ("torch.flash", "it is a kernel of scaled_dot_product_attention and varlen_attn, and this is flex_attention"),
        ("cpu.reference", "score_mod and mask_mod are compiled into its kernel"),
        ("trt_fused", "flex_attention has no such kernel"),
    ],
)
def test_strict_refuses_what_cannot_serve(x, word, why):
    with xt.kernel_policy(strict(word)), pytest.raises(UnsupportedOperationError, match=why):
        attend(x)
    with xt.kernel_policy(strict(word, "auto")):
        torch.testing.assert_close(attend(x), expected(x))


def test_a_policy_that_leaves_attention_alone_says_nothing(x):
    for kernels in ({"matmul": "cpu.blas"}, {"attention": "auto"}, {"attention": "torch"}):
        with xt.kernel_policy(**kernels):
            assert not any("flex" in name for name in registry.installed())
            attend(x)


def test_without_a_policy_it_is_the_default(x):
    native = torch_flex._apply_kernel_options
    with xt.explain() as report:
        assert torch_flex._apply_kernel_options is native, "watching would have code compiled again"
        attend(x)
    (row,) = attention_rows(report)
    assert (row.requested, row.resolved, row.status) == ((), "torch.math", "default")


def test_words_for_one_function_are_passed_over_by_the_other(x):
    with xt.kernel_policy(attention=[TRITON, "torch.flash", "cpu.reference"]), xt.explain() as report:
        sdpa(x, x, x)
        with pytest.warns(XpuRuntimeWarning, match="torch.flash: it is a kernel of scaled_dot_product_attention"):
            attend(x)
    kernels = {row.operator: (row.resolved, row.reason) for row in attention_rows(report)}
    kernel, reason = kernels["aten::scaled_dot_product_attention"]
    assert kernel == "torch.flash"
    assert reason == f"{TRITON}: it is a kernel of flex_attention, and this is scaled_dot_product_attention"
    with xt.kernel_policy(strict(TRITON)), pytest.raises(UnsupportedOperationError, match="a kernel of flex_attention"):
        sdpa(x, x, x)


def test_rules_hold_in_eager_code_by_module_and_phase(x):
    class Block(torch.nn.Module):
        def forward(self, x):
            return attend(x)

    model = torch.nn.Sequential(Block(), Block())
    rules = [rule("torch.math", module="1", phase="infer"), rule("torch", phase="train")]
    with xt.kernel_policy(xrt.KernelPolicy(rules=rules)), xt.explain() as report, torch.no_grad():
        model(x)
    rows = {row.module: (row.source, row.status) for row in attention_rows(report)}
    assert rows == {"0": ("default", "default"), "1": ("kernels.rules[0]", "honoured")}


@pytest.mark.usefixtures("backends_run_here")
@pytest.mark.parametrize(("word", "backend"), [(TRITON, "TRITON"), (DECODE, "TRITON_DECODE"), ("torch", "AUTO")])
def test_compiled_calls_are_given_the_backend(x, word, backend):
    assert backends_of(attend, x) == ["AUTO"]
    with xt.kernel_policy(strict(word, rules=[rule("torch.math", dtype="fp64")])):
        assert backends_of(attend, x) == [backend]
    assert backends_of(attend, x) == ["AUTO"]


@pytest.mark.usefixtures("backends_run_here")
def test_other_options_of_the_call_stay(x):
    given = {"BLOCK_M": 32}
    with xt.kernel_policy(attention=TRITON):
        (options,) = options_of(lambda x: attend(x, kernel_options=given), x)
    assert (options["BACKEND"], options["BLOCK_M"]) == ("TRITON", 32)
    assert given == {"BLOCK_M": 32}


@pytest.mark.usefixtures("backends_run_here")
@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"BACKEND": "TRITON_DECODE"}, "bypassed"),
        ({"BACKEND": "TRITON"}, "honoured"),
        ({"FORCE_USE_FLEX_ATTENTION": True}, "honoured"),
    ],
)
def test_a_call_keeps_the_backend_that_it_states(x, options, status):
    flash_impl.forget()
    with xt.kernel_policy(strict(TRITON)):
        (found,) = options_of(lambda x: attend(x, kernel_options=options), x)
        (choice,) = flash_impl.choices("")
    assert found["BACKEND"] == options.get("BACKEND", "AUTO")
    assert (choice.asked, choice.source, choice.status) == ((TRITON,), "kernels.attention", status)
    assert "the call states its own backend" in choice.reason


@pytest.mark.usefixtures("backends_run_here")
def test_each_policy_has_code_of_its_own(x):
    flash_impl.forget()
    keeping = Keeping()
    compiled = torch.compile(attend, backend=keeping, fullgraph=True)
    compiled(x)
    for word in (TRITON, DECODE, TRITON):
        with xt.kernel_policy(attention=word):
            compiled(x)
            compiled(x)
            assert {choice.kernel for choice in flash_impl.choices("")} == {word}
    compiled(x)
    assert [options["BACKEND"] for options in keeping.options] == ["AUTO", "TRITON", "TRITON_DECODE"]


@pytest.mark.usefixtures("backends_run_here")
@pytest.mark.parametrize("reset", [torch.compiler.reset, lambda: torch._dynamo.reset()])
def test_code_that_a_reset_drops_is_forgotten(x, reset):
    for stated, expected in (({}, TRITON), ({"BACKEND": "TRITON_DECODE"}, DECODE)):
        reset()
        with xt.kernel_policy(attention=TRITON):
            options_of(lambda x, stated=stated: attend(x, kernel_options=stated), x)
            assert {choice.kernel for choice in flash_impl.choices("")} == {expected}


@pytest.mark.usefixtures("backends_run_here")
def test_rules_hold_in_compiled_code():
    class Block(torch.nn.Module):
        def forward(self, x):
            return attend(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Block(), Block(), Block()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    rules = [rule(TRITON, module="layers.1"), rule(DECODE, module="layers.2", phase="infer"), rule("torch")]
    with xt.kernel_policy(strict(rules=rules)):
        assert backends_of(model, torch.randn(1, 2, 32, 16)) == ["AUTO", "TRITON", "AUTO"]
        with torch.no_grad():
            assert backends_of(model, torch.randn(1, 2, 32, 16)) == ["AUTO", "TRITON", "TRITON_DECODE"]
    rules = [rule(TRITON, head_dim=16), rule(DECODE, dtype="fp64")]
    with xt.kernel_policy(strict(rules=rules)):
        assert backends_of(attend, torch.randn(1, 2, 32, 16)) == ["TRITON"]
        assert backends_of(attend, torch.randn(1, 2, 32, 32)) == ["AUTO"]
        assert backends_of(attend, torch.randn(1, 2, 32, 32, dtype=torch.float64)) == ["TRITON_DECODE"]


@pytest.mark.usefixtures("backends_run_here")
def test_decoding_is_for_few_queries_of_any_length():
    with xt.kernel_policy(attention=[DECODE, TRITON]):
        assert backends_of(attend, torch.randn(1, 2, 127, 16)) == ["TRITON_DECODE"]
        assert backends_of(attend, torch.randn(1, 2, 128, 16)) == ["TRITON"]
        assert backends_of(attend, torch.randn(2, 2, 64, 16), dynamic=True) == ["TRITON_DECODE"]
        assert backends_of(attend, torch.randn(2, 2, 256, 16), dynamic=True) == ["TRITON"]
    shared = torch.randn(1, 6, 8, 16), torch.randn(1, 2, 8, 16)
    with (
        xt.kernel_policy(strict(DECODE)),
        pytest.raises(Exception, match="6 heads share 2, and it takes powers of two"),
    ):
        backends_of(lambda q, k: torch_flex.flex_attention(q, k, k, enable_gqa=True), *shared)


@pytest.mark.usefixtures("backends_run_here")
def test_flash_attention_4_has_to_be_installed(x, monkeypatch):
    with xt.kernel_policy(strict(FLASH)), pytest.raises(Exception, match="FlashAttention 4 is not installed"):
        backends_of(attend, x)
    monkeypatch.setattr(flex_options, "_has_flash", lambda: True)
    with xt.kernel_policy(strict(FLASH)):
        assert backends_of(attend, x) == ["FLASH"]


@pytest.mark.usefixtures("backends_run_here")
def test_strict_refuses_a_gradient_by_another_backend(x):
    rules = [rule(TRITON, phase=["train", "infer"]), rule(DECODE, phase="backward")]
    with xt.kernel_policy(strict(rules=rules)):
        with torch.no_grad():
            assert backends_of(attend, x) == ["TRITON"]
        with pytest.raises(Exception, match="the gradient of flex_attention runs by the backend of its forward"):
            backends_of(attend, x)


def test_on_the_cpu_no_backend_runs(x):
    torch._dynamo.reset()
    said = pytest.warns(XpuRuntimeWarning, match=r"the backends of flex_attention are for CUDA, .* on cpu")
    with xt.kernel_policy(attention=TRITON), said:
        assert backends_of(attend, x) == ["AUTO"]
    with (
        xt.kernel_policy(strict("torch.math")),
        pytest.raises(Exception, match="compiled code has no unfused form of flex_attention"),
    ):
        backends_of(attend, x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_for_debugging_are_unfused(x, backend):
    torch._dynamo.reset()
    with xt.kernel_policy(strict("torch.math")), xt.explain() as report:
        torch.testing.assert_close(torch.compile(attend, backend=backend)(x), expected(x))
    (row,) = attention_rows(report)
    assert (row.resolved, row.status) == ("torch.math", "honoured")
    with xt.kernel_policy(strict(TRITON)), pytest.raises(UnsupportedOperationError, match="flex_attention is unfused"):
        torch.compile(attend, backend=backend)(x)


@pytest.mark.usefixtures("backends_run_here", "compiled_anew")
def test_inductor_is_given_the_backend(x, monkeypatch):
    from torch._inductor.kernel.flex import flex_attention as lowering

    seen = []
    real = lowering.lower_cpu
    monkeypatch.setattr(lowering, "lower_cpu", lambda *args: (seen.append(args[6]["BACKEND"]), real(*args))[1])
    with xt.kernel_policy(strict(TRITON)), torch.no_grad():
        torch.testing.assert_close(torch.compile(attend)(x), expected(x))
    assert seen == ["TRITON"]


def test_an_export_stays_free(x):
    class Model(torch.nn.Module):
        def forward(self, x):
            return attend(x)

    with xt.kernel_policy(attention=TRITON), torch.no_grad():
        program = torch.export.export(Model(), (x,), strict=True)
    (node,) = [n for n in program.graph.nodes if "flex_attention" in str(n.target)]
    assert node.args[6]["BACKEND"] == "AUTO"


def test_everything_is_given_back(x):
    op = torch.ops.higher_order.flex_attention
    before = torch_flex._apply_kernel_options, dict(op.py_kernels)
    with xt.kernel_policy(attention=TRITON):
        assert torch_flex._apply_kernel_options is not before[0]
        with pytest.warns(XpuRuntimeWarning):
            attend(x)
    assert (torch_flex._apply_kernel_options, dict(op.py_kernels)) == before


def test_a_pytorch_without_the_place_for_options_is_said(x, monkeypatch):
    torch._dynamo.reset()
    (override,) = flex_options.OVERRIDES
    monkeypatch.setattr(flex_options, "OVERRIDES", (override._replace(name="_of_another_pytorch"),))
    assert not registry.is_there(flex_options.OVERRIDES[0], "Python")

    def compile_it():
        with torch.no_grad():
            return torch.compile(attend)(x)

    with xt.kernel_policy(attention=TRITON), pytest.warns(XpuRuntimeWarning, match="where no policy can reach them"):
        torch.testing.assert_close(compile_it(), expected(x))
    with (
        xt.kernel_policy(strict(TRITON)),
        pytest.raises(Exception, match=r"would bypass it.*Fix: state"),
    ):
        compile_it()


KERNEL = "triton_tem_fused_flex_attention_0"


BUILT_TRITON = FlexChoice(
    "torch.flex_triton", ("torch.flex_triton",), "kernels.attention", "honoured", "", "layers.0.attn"
)


BUILT_DECODE = FlexChoice(
    "torch.flex_decode", ("torch.flex_decode",), "kernels.rules[0]", "honoured", "", "layers.1.attn"
)


STATED = FlexChoice("torch.flex_flash", ("torch.flex_triton",), "kernels.attention", "bypassed", "stated", "head")


@pytest.fixture(autouse=True)
def _nothing_is_chosen():
    xt.clear_kernel_policy()
    flash_impl.forget()
    yield
    flash_impl.forget()


def row_of(module, *chosen):
    for choice in chosen:
        flash_impl.note(choice)
    share = AttributedTime()
    share.add(KERNEL, 2000)
    escape = uncovered_kernel(KERNEL)
    assert escape is not None
    key = UnattributedCalls("uncovered", escape.op, KERNEL, module, "", (), (), escape.reason)
    asking = RequestedKernels()
    asking.note(CompiledPolicy(xrt.Policy(kernels=xrt.KernelPolicy(attention="torch.flex_triton"))))
    (row,) = build_rows([], TimeAttribution("device", {}, {key: share}, 0, {}), [], asking)
    return row


def test_one_choice_is_what_ran():
    row = row_of("", BUILT_TRITON)
    assert (row.requested, row.source) == (("torch.flex_triton",), "kernels.attention")
    assert (row.resolved, row.status, row.observed) == ("torch.flex_triton", "honoured", (KERNEL,))
    assert row.reason == "chosen when it was compiled"


def test_the_module_tells_which():
    assert row_of("layers.1", BUILT_TRITON, BUILT_DECODE, STATED).resolved == "torch.flex_decode"
    assert row_of("layers.1.attn").resolved == "torch.flex_decode"
    row = row_of("head")
    assert (row.resolved, row.status) == ("torch.flex_flash", "bypassed")
    assert row.reason == "chosen when it was compiled; stated"


def test_several_choices_cannot_be_told_apart():
    row = row_of("", BUILT_TRITON, BUILT_DECODE)
    assert (row.requested, row.resolved, row.status) == (("torch.flex_triton",), "", "opaque")
    assert "torch.flex_triton and torch.flex_decode" in row.reason
    same = BUILT_TRITON._replace(module="layers.1.attn")
    flash_impl.forget()
    assert row_of("", BUILT_TRITON, same).status == "honoured"


def test_what_was_compiled_without_a_policy_has_escaped():
    row = row_of("")
    assert (row.status, row.resolved, row.reason) == ("bypassed", "", FLEX)


def test_another_policy_forgets():
    flash_impl.note(BUILT_TRITON)
    with xt.kernel_policy(attention="torch.flash"):
        assert flash_impl.choices("") == ()
