# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of attention that are known to be wrong, on stated machines: none is taken where it was not named."""

from __future__ import annotations

import warnings

import pytest

from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.ops import plugins
from xpuruntime.policies.advisories import Platform, advisories, holding

torch = pytest.importorskip("torch")

import torch_kernels as package  # noqa: E402 - it needs PyTorch
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.policies.advisories import AdvisedCall, Advisory  # noqa: E402
from xpuruntime.pytorch.attention import advised, sdpa_backends, selection  # noqa: E402
from xpuruntime.pytorch.attention.call import AttentionCall, traits  # noqa: E402
from xpuruntime.pytorch.dispatch import tuning  # noqa: E402
from xpuruntime.pytorch.dispatch.context import active_policy  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides.registry import installed  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]

H200 = Platform((2, 11), (9, 19, 0), "sm90")
MASKED = AdvisedCall(gradient=True, mask="same", causal=False, queries=192, keys=192)
TORCH, OURS = "torch.cudnn", "cudnn.sdpa"
attend = torch.nn.functional.scaled_dot_product_attention


def concerned(kernel, call, platform=H200):
    return [row for row in holding(platform) if row.concerns(kernel, call)]


@pytest.mark.parametrize("kernel", [TORCH, OURS])
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, True),
        ({"mask": ""}, True),
        ({"queries": 256}, True),
        ({"keys": 256}, False),
        ({"keys": 200}, False),
        ({"gradient": False}, False),
        ({"mask": "", "causal": True}, False),
        ({"queries": 1, "keys": 200}, True),
        ({"queries": 1, "keys": 200, "gradient": False}, False),
        ({"keys": None}, True),
        ({"queries": None, "keys": 200}, True),
        ({"keys": None, "gradient": False}, False),
    ],
)
def test_calls_that_are_concerned(kernel, changes, wrong):
    assert bool(concerned(kernel, MASKED._replace(**changes))) is wrong


def test_masks_that_only_pytorch_passes_on_wrongly():
    for mask in ("boolean", "other"):
        call = AdvisedCall(gradient=False, mask=mask, causal=False, queries=256, keys=256)
        assert concerned(TORCH, call)
        assert not concerned(OURS, call)
    boolean = call._replace(mask="boolean")
    assert not concerned(TORCH, boolean, H200._replace(torch=(2, 12)))


@pytest.mark.parametrize(
    ("platform", "left"),
    [
        (H200, 4),
        (H200._replace(arch=""), 4),
        (H200._replace(torch=(2, 13), cudnn=(9, 20, 0)), 3),
        (H200._replace(torch=(2, 14), cudnn=(9, 26, 0)), 1),
        (H200._replace(arch="sm80"), 2),
    ],
)
def test_versions_and_devices(platform, left):
    assert len(holding(platform)) == left


@pytest.fixture
def on_an_h200(monkeypatch):
    """The CPU stands for an H200 whose PyTorch chooses cuDNN."""
    monkeypatch.setattr(advised, "rows_on", lambda _: holding(H200))
    monkeypatch.setattr(advised, "own_choice", lambda _: TORCH)
    for module in ("xpuruntime.pytorch.attention.advised", "xpuruntime.pytorch.dispatch.compiled_policy"):
        monkeypatch.setattr(f"{module}.rows_here", lambda: holding(H200))


def operands(length=192):
    x = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
    return *x, torch.zeros(length, length)


def kernels():
    return {route.kernel for route in active_policy().routes.values()}


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize("policy", [{"attention": "auto"}, {"attention": ["cuda_raw.flash_attention_v2", "auto"]}])
def test_auto_takes_another_kernel_of_pytorch(policy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xt.kernel_policy(xrt.Policy(kernels=policy, mode="auto")):
            attend(*operands()).sum().backward()
            assert kernels() == {"torch.flash"}
            attend(*operands(256)).sum().backward()
            assert kernels() == {"torch.flash", "torch.sdpa"}


@pytest.mark.usefixtures("on_an_h200")
def test_what_cannot_serve_is_replaced_by_none_that_is_wrong():
    policy = xrt.Policy(kernels={"rules": [{"match": {"op": "attention"}, "use": "torch.efficient"}]})
    with pytest.warns(XpuRuntimeWarning, match="runs by torch.flash"), xt.kernel_policy(policy):
        attend(*operands())


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize("policy", [{"matmul": "cpu.blas"}, {"attention": "torch", "matmul": "cpu.blas"}])
def test_what_is_left_to_pytorch_is_warned_of_once_and_costs_no_call(policy):
    before = installed()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with xt.kernel_policy(xrt.Policy(kernels=policy)):
            for length in (256, 192, 192, 320):
                attend(*operands(length))
            assert not [name for name in set(installed()) - set(before) if "attention" in name]
            with xt.kernel_policy(None):
                pass
    (found,) = [str(one.message) for one in said if one.category is XpuRuntimeWarning]
    assert "attention is left to PyTorch, which may choose torch.cudnn" in found
    assert "attention: auto" in found


@pytest.mark.usefixtures("on_an_h200")
def test_nothing_is_said_where_pytorch_may_not_choose_it():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with xt.kernel_policy(matmul="cpu.blas"):
                attend(*operands())
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("on_an_h200")
def test_a_gradient_with_dropout_leaves_the_choice_where_it_is():
    """No kernel of PyTorch's computes the gradient of a forward of ours that has dropped weights."""
    q, k, v, _ = operands()
    with xt.kernel_policy(xrt.Policy(kernels={"attention": ["cpu.reference", "auto"]})):
        attend(q, k, v, dropout_p=0.5).sum().backward()
        assert kernels() == {"cpu.reference"}
    assert torch.isfinite(q.grad).all()


@pytest.fixture
def traced():
    """Return a call on CUDA that is traced, with an added mask of another type than the queries."""
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        yield AttentionCall(q, k, v, torch.zeros(192, 192, device="cuda"))


def test_the_choice_for_traced_code_is_that_for_its_device(traced):
    assert advised.own_choice(traced) == "torch.math"  # the others are in no build for the CPU


def test_a_mask_of_another_type_is_not_for_the_efficient_kernel(traced):
    rejected = sdpa_backends.rejection("torch.efficient", *traced[:6], scale=None, enable_gqa=False)
    assert "attn_mask is torch.float32, and this one takes" in rejected


def test_code_for_any_length_is_concerned(monkeypatch):
    monkeypatch.setattr(advised, "rows_on", lambda _: holding(H200))
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env) as mode:
        fixed = torch.empty(1, 2, 256, 64)
    tensor = mode.from_tensor(torch.empty(1, 2, 256, 64), symbolic_context=None)
    assert not isinstance(tensor.shape[2], int)
    assert traits(tensor) != traits(fixed)
    for keys, concerned in ((fixed, False), (tensor, True)):
        call = AttentionCall(fixed, keys, keys, needs_grad=True)
        assert (advised.advisory_of(TORCH, call) is not None) is concerned


@pytest.mark.usefixtures("on_an_h200")
def test_a_rule_that_leaves_it_to_pytorch_is_warned_of():
    policy = xrt.Policy(kernels={"rules": [{"match": {"op": "attention"}, "use": "torch"}]})
    q, k, v, _ = operands(200)
    with pytest.warns(XpuRuntimeWarning, match="issues/1072"), xt.kernel_policy(policy):
        attend(q[:, :, :1], k, v)


def test_without_an_advisory_nothing_is_looked_at():
    with xt.kernel_policy(xrt.Policy(kernels={"attention": "auto", "matmul": "cpu.blas"})):
        attend(*operands())
        assert "attention" not in active_policy().overrides
        assert not active_policy().routes


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize("kernel", [TORCH])
def test_a_named_kernel_cannot_serve_such_a_call(kernel):
    q, k, v, mask = operands()
    call = AttentionCall(q, k, v, mask, needs_grad=True)
    assert "issues/196678" in selection.native_rejection(kernel, call)


@pytest.fixture
def our_reference_is_wrong(monkeypatch):
    row = Advisory(kernels=("cpu.reference",), wrong="it is off", reference="https://tracker/1", gradient=True)
    monkeypatch.setattr(advised, "rows_on", lambda _: (row,))


@pytest.mark.usefixtures("our_reference_is_wrong")
def test_ours_is_refused_by_name_and_the_next_is_taken():
    with xt.kernel_policy(xrt.Policy(kernels={"attention": "cpu.reference"}, mode="strict")):
        with pytest.raises(UnsupportedOperationError, match=r"it is off \(https://tracker/1\)"):
            attend(*operands())
        with torch.no_grad():
            attend(*operands())
    with xt.kernel_policy(xrt.Policy(kernels={"attention": ["cpu.reference", "torch.math"]}, mode="auto")):
        attend(*operands()).sum().backward()
        assert kernels() == {"torch.math"}


@pytest.mark.usefixtures("our_reference_is_wrong", "nothing_is_tuned")
def test_measured_times_never_choose_it(monkeypatch):
    seen = []

    def pick(op, key, candidates, device, **more):
        del op, key, device, more
        seen.extend(name for name, _ in candidates)
        return candidates[-1][0]

    monkeypatch.setattr(tuning, "pick", pick)
    with xt.kernel_policy(auto_strategy="best_performance"):
        attend(*operands())
        with torch.no_grad():
            before = len(seen)
            attend(*operands())
    assert "cpu.reference" not in seen[:before]
    assert "cpu.reference" in seen[before:]


ROW = """
advisories:
  - id: foreign-wrong-gradient
    date: 2026-10-01
    op: rms_norm
    kernels: [foreign.rms_norm]
    wrong: its gradient is off
    reference: https://tracker/7
    gradient: true
    packages: {foreign-norms: "<1.5"}
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package.install(tmp_path)
    plugins.register(plugins.KernelBackend("foreign", "cpu", "1"), package.ForeignNorm())
    (tmp_path / "advisories.yaml").write_text(ROW)
    monkeypatch.setenv("XPURUNTIME_ADVISORIES", str(tmp_path / "advisories.yaml"))
    yield tmp_path
    package.forget()


def norm(*, gradient):
    with torch.set_grad_enabled(gradient):
        return torch.nn.functional.rms_norm(torch.ones(2, 8, requires_grad=gradient), (8,), torch.ones(8))


@pytest.mark.usefixtures("site")
def test_named_kernel_is_refused_or_passed_over_where_it_is_wrong():
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"rms_norm": "foreign.rms_norm"})):
        with pytest.raises(UnsupportedOperationError, match=r"its gradient is off \(https://tracker/7, 2026-10-01\)"):
            norm(gradient=True)
        norm(gradient=False)
    with xt.kernel_policy(rms_norm="foreign.rms_norm"), pytest.warns(XpuRuntimeWarning, match="its gradient is off"):
        norm(gradient=True)


def test_version_without_the_error_serves(site):
    package.install(site, "1.5")
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"rms_norm": "foreign.rms_norm"})), xt.explain() as report:
        norm(gradient=True)
    assert {row.resolved for row in report.rows if row.op} == {"foreign.rms_norm"}


def test_kernel_of_pytorch_is_left_by_auto(tmp_path, monkeypatch):
    file = tmp_path / "rows.yaml"
    file.write_text(
        "advisories: [{id: cpu-flash, kernels: [torch.flash], wrong: it is off, reference: https://tracker/8,"
        " archs: [cpu]}]\n"
    )
    monkeypatch.setenv("XPURUNTIME_ADVISORIES", str(file))
    q = torch.ones(1, 2, 8, 16)
    with xt.kernel_policy(attention="auto"), xt.explain() as report:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert not {row.resolved for row in report.rows if row.op == "attention"} & {"torch.flash", "torch.sdpa"}
    assert "cpu-flash" in {row.id for row in holding(Platform((2, 13), (), "cpu"))}
    assert "cpu-flash" not in {row.id for row in holding(Platform((2, 13), (), "sm90"))}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rows: []", "KeyError"), ("advisories: [{id: a}]", "a has no kernels"), ("advisories: 1", "Expected `array`"),
        (ROW.replace("gradient:", "gradeint:"), "unknown gradeint"), (ROW.replace('"<1.5"', '"1.5?"'), "1.5"),
    ],
)  # fmt: skip
def test_file_that_is_none_is_refused_with_a_fix(tmp_path, monkeypatch, text, said):
    (tmp_path / "rows.yaml").write_text(text)
    monkeypatch.setenv("XPURUNTIME_ADVISORIES", str(tmp_path / "rows.yaml"))
    with pytest.raises(InputError, match=f"{said}.*Fix: write"):
        advisories()
    monkeypatch.setenv("XPURUNTIME_ADVISORIES", str(tmp_path / "missing.yaml"))
    with pytest.raises(InputError, match="FileNotFoundError"):
        advisories()


def test_every_advisory_of_this_release_has_an_id_and_a_place_to_read():
    assert len({row.id for row in advisories()}) == len(advisories())
    assert all(row.id and row.reference.startswith("https://") for row in advisories())
