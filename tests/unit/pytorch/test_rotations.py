# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rotations of models under a policy: led to a kernel where it can serve their form, or refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from package_kernels import WideKernel, package, rows_of, strict  # noqa: E402, F401 - it needs both

from xpuruntime.pytorch.adapters import rotary  # noqa: E402
from xpuruntime.pytorch.providers import operations  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("nothing_is_watched_afterwards", "own_tuning_cache", "package"),
]


def test_rotations_whose_halves_may_differ_are_not_given_to_kernels_that_read_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(WideKernel, "supports", lambda self, call: (call.attributes["mirrored"], "it reads one half"))
    q, k, angles = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 4)

    def rotate(cos, sin):
        return module.apply_rotary_pos_emb(q, k, cos, sin)

    same, apart = torch.cat((angles, angles), -1), torch.cat((angles, -2 * angles), -1)
    plain = rotate(same.cos(), same.sin())
    with xt.kernel_policy(strict("rope")):
        torch.testing.assert_close(rotate(same.cos(), same.sin()), plain)
        run = torch.compile(rotate, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="it reads one half"):
            run(same.cos(), same.sin())  # traced code knows no numbers
        with pytest.raises(UnsupportedOperationError, match="gradient of its angles"):
            rotate(same.cos().requires_grad_(), same.sin())
    with xt.kernel_policy(strict("rope")), pytest.raises(UnsupportedOperationError, match="it reads one half"):
        rotate(apart.cos(), apart.sin())


def test_no_kernel_that_reads_both_halves_waits_for_a_look(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    looked = []
    halves_repeat = rotary._halves_repeat
    monkeypatch.setattr(rotary, "_halves_repeat", lambda *pair: looked.append(pair) or halves_repeat(*pair))
    angles = torch.randn(1, 3, 8)
    q, k, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), angles.cos(), angles.sin()
    plain = module.apply_rotary_pos_emb(q, k, cos, sin)
    for kernel, looks in (("compiled.rope", 0), ("torch", 0), (["package.rope", "compiled.rope"], 1)):
        with xt.kernel_policy(rope=kernel):
            for _ in range(2):
                torch.testing.assert_close(module.apply_rotary_pos_emb(q, k, cos, sin), plain)
        assert len(looked) == looks, kernel


@pytest.fixture
def rotated(monkeypatch):
    """Say by which kernel cos and sin rotate, where that of the package reads one half of them, and what comes out."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(WideKernel, "supports", lambda self, call: (call.attributes["mirrored"], "it reads one half"))

    def rotate(cos, sin):
        q, k = torch.ones(1, 2, cos.shape[1], 8), torch.ones(1, 1, cos.shape[1], 8)
        with xt.explain() as report:
            outputs = module.apply_rotary_pos_emb(q, k, cos, sin)
        return next((row.resolved for row in rows_of(report, "rope") if row.status != "default"), ""), outputs

    return rotate


def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=2):
    if position_ids is not None:
        cos, sin = cos[:, position_ids], sin[:, position_ids]
    return operations.rope(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("shape", "more", "named", "served"),
    [
        ((1, 2, 3, 8), (None, 1), {}, True),
        ((1, 3, 2, 8), (), {}, True),
        ((1, 3, 2, 8), (None,), {"unsqueeze_dim": 2}, True),
        ((1, 2, 3, 8), (torch.tensor([2, 0, 1]), 1), {}, False),
        ((1, 2, 3, 8), (), {"unsqueeze_dim": -3}, False),
        ((1, 3, 8), (), {"unsqueeze_dim": 0}, False),
    ],
)
def test_rotations_are_served_or_refused_however_their_dimension_is_stated(shape, more, named, served, compiled):
    def rotate():
        return sys.modules[__name__].apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), *more, **named)

    q, k, angles = torch.randn(shape), torch.randn(shape), torch.randn(1, 3, 4).repeat(1, 1, 2)
    plain = rotate()
    if compiled:
        torch._dynamo.reset()
    run = torch.compile(rotate, backend="aot_eager", fullgraph=True) if compiled else rotate
    with xt.kernel_policy(strict("rope")), xt.explain() as report:
        if served:
            torch.testing.assert_close(run(), plain)
        else:
            with pytest.raises(Exception, match="for queries and keys of four dimensions"):
                run()
    assert {row.resolved for row in rows_of(report, "rope")} == ({"package.rope"} if served else set())
    with xt.kernel_policy(rope="package.rope"), pytest.raises(TypeError):
        sys.modules[__name__].apply_rotary_pos_emb(q, k, q, q, None, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_rotation_by_one_half_of_cos_and_sin_is_given_both(monkeypatch, compiled, dtype):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    module = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    monkeypatch.setattr(WideKernel, "supports", lambda self, call: (call.attributes["mirrored"], "it reads one half"))
    angles = torch.randn(1, 3, 4).to(dtype)
    q, k = torch.randn(1, 2, 3, 8).to(dtype), torch.randn(1, 1, 3, 8).to(dtype)

    def rotate():
        return module.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())

    torch._dynamo.reset()
    run, plain = torch.compile(rotate, backend="aot_eager", fullgraph=True) if compiled else rotate, rotate()
    with xt.kernel_policy(strict("rope")), xt.explain() as report:
        torch.testing.assert_close(run(), plain, atol=1e-2, rtol=2e-2)
    assert {(row.resolved, row.status) for row in rows_of(report, "rope")} == {("package.rope", "honoured")}


def test_each_function_and_method_of_transformers_that_rotates_is_served_or_refused():
    folder = Path(pytest.importorskip("transformers").models.__file__).parent
    found = set()
    for path in folder.glob("*/modeling_*.py"):
        for name, body in re.findall(
            r"def (_?\w*apply_\w*(?:rotary|rope)\w*)\(((?:.|\n)*?)(?=\n[^\s)]|\n    def )", path.read_text()
        ):
            if not re.search(r"apply_rotary_(pos_)?emb\(", body):  # by which it rotates itself
                found.add(name)
    assert "apply_rotary_pos_emb" in found
    assert found - {*rotary._NAMES, *rotary._METHODS} == {"_apply_rotary_emb"}  # a part of gpt_oss's


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("sam3", "apply_rotary_pos_emb_2d"),
        ("roformer", "RoFormerSelfAttention.apply_rotary_position_embeddings"),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave"),
        ("qwen2_vl", "apply_rotary_pos_emb_vision"),
        ("dinov3_vit", "apply_rotary_pos_emb"),
    ],
)
def test_rotations_of_other_forms_are_refused_and_left(monkeypatch, family, name):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    *kind, name = name.split(".")
    module = getattr(module, kind[0]) if kind else module
    own, angles = getattr(module, name), torch.randn(3, 8)
    q = torch.randn(1, 2, 3, 8) if family != "qwen2_vl" else torch.randn(3, 2, 8)
    operands = (q, q, angles.cos()[None], angles.sin()[None])
    if family != "deepseek_v3":
        operands = (q, q, angles.cos(), angles.sin())
    if family == "roformer":
        operands = (angles, q, q)
    plain = own(*operands)
    with xt.kernel_policy(strict("rope")), pytest.raises(UnsupportedOperationError, match="by none of the formulas"):
        getattr(module, name)(*operands)
    with xt.kernel_policy(rope="package.rope"), pytest.warns(XpuRuntimeWarning, match="by none of the formulas"):
        assert all(map(torch.equal, getattr(module, name)(*operands), plain))
    with xt.kernel_policy(strict("swiglu")):
        assert all(map(torch.equal, getattr(module, name)(*operands), plain))
    assert getattr(module, name) is own


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_the_halves_of_each_pair_of_cos_and_sin_are_looked_at(rotated):
    angles = torch.randn(1, 3, 4)
    same, apart = torch.cat((angles, angles), -1), torch.cat((angles, -2 * angles), -1)
    plain = rotated(apart.cos(), apart.sin())[1]
    with xt.kernel_policy(rope=["package.rope", "torch"]):
        assert rotated(torch.ones(1, 3, 8), torch.zeros(1, 3, 8))[0] == "package.rope"  # position 0
        kernel, outputs = rotated(apart.cos(), apart.sin())
        assert kernel != "package.rope"
        torch.testing.assert_close(outputs, plain)
        for inference in (False, True):
            with torch.inference_mode(inference):
                cos, sin = same.cos(), same.sin()
                assert rotated(cos, sin)[0] == rotated(cos, sin)[0] == "package.rope"
                sin.copy_(apart.sin())
                assert rotated(cos, sin)[0] != "package.rope"  # the same tensors, written to


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_a_captured_rotation_goes_by_eager_ones_of_its_shape_under_its_policy(rotated, monkeypatch):
    def serves(angles, *, captured=False):
        both = torch.cat((angles, angles), -1)
        with monkeypatch.context() as patch:
            patch.setattr(rotary, "capturing", lambda: captured)  # a CPU captures nothing
            return rotated(both.cos(), both.sin())[0] == "package.rope"

    still, turned = torch.zeros(1, 3, 4), torch.randn(1, 3, 4)
    policy = xrt.KernelPolicy(rope=["package.rope", "torch"])
    with xt.kernel_policy(policy):
        assert serves(still)
        assert not serves(turned, captured=True)  # what does not rotate shows nothing
        assert serves(turned)
        assert serves(turned, captured=True)
        assert not serves(torch.randn(1, 5, 4), captured=True)
    with xt.kernel_policy(policy):
        assert not serves(turned, captured=True)
