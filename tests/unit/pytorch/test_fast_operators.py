# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fast kernels of norms and attention on each route: the same results, and no Python on the route of the addon."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from fast_kernel_calls import BY_ADDON, ELSEWHERE, FORMS, OPS, F, call, same  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.errors import UnsupportedOperationError  # noqa: E402
from xpuruntime.pytorch.dispatch import context  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides import attention, norms, registry  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("nothing_is_watched_afterwards", "decisions_of_this_test", "route"),
]
by_addon = pytest.mark.parametrize("route", ["addon"], indirect=True)
on_two_routes = pytest.mark.parametrize("route", ["addon", "python"], indirect=True)

ADDON = "registered by xpuruntime"


@pytest.fixture
def asked(monkeypatch):
    """Calls that came to Python."""
    seen = []

    def count(real):
        def current():
            seen.append(1)
            return real()

        return current

    for module in (norms, attention):
        monkeypatch.setattr(module, "active_policy", count(module.active_policy))
    return seen


@pytest.fixture
def handled(monkeypatch):
    """Calls of PyTorch's kernels by way of their handles, of all overrides that are placed meanwhile."""
    registry.release(registry.require(OPS))  # whose trials, made once in a process, are no such calls
    seen = []
    real = registry.Native.__call__

    def call(self, *args, **kwargs):
        seen.append(self.name)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(registry.Native, "__call__", call)
    return seen


@pytest.mark.parametrize("name", [name for name, _ in BY_ADDON])
@on_two_routes
def test_kernels_of_the_addon_are_placed_on_its_route_alone_and_removed(name, route):
    before = torch._C._dispatch_dump(f"aten::{name}")
    assert ADDON not in before
    with xt.kernel_policy(rules=ELSEWHERE):
        assert (ADDON in torch._C._dispatch_dump(f"aten::{name}")) == (route == "addon")
    assert torch._C._dispatch_dump(f"aten::{name}") == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@by_addon
def test_what_is_known_to_be_native_is_pytorchs_own_and_python_is_asked_once(form, dtype, asked, handled):
    run = call(form, dtype)
    expected = run()
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(4):
            same(run(), expected)
        assert len(asked) == 1
        assert len(handled) == 1
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(asked) == 1  # the route was known
    assert len(handled) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_what_no_rule_speaks_of_is_pytorchs_own_to_the_bit(form, dtype):
    run = call(form, dtype)
    expected = run()
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(3):
            same(run(), expected)


@by_addon
@pytest.mark.parametrize("policy", [{"rules": ELSEWHERE}, {"matmul": "cpu.reference"}])
def test_training_asks_python_only_in_its_first_step(policy, asked):
    net = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 4, 16)
    net(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    # Who needs only products leaves norms and attention to others, here to a session of another policy.
    others = registry.require(OPS)
    try:
        with xt.kernel_policy(**policy):
            for step in range(3):
                net.zero_grad()
                net(x).square().sum().backward()
                if step == 0:
                    first = len(asked)
            assert first > 0
            assert len(asked) == first
    finally:
        registry.release(others)
    for one, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["layer_norm", "layer_norm_backward", "rms_norm"])
def test_a_kernel_of_ours_serves_without_python_once_it_is_known(form, asked, route):
    run = call(form)
    expected = run()
    with xt.kernel_policy(layer_norm="cpu.reference", rms_norm="cpu.reference"):
        for _ in range(4):
            found = run()
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert (one.shape, one.stride()) == (other.shape, other.stride())
                    torch.testing.assert_close(one, other)
    assert len(asked) == (1 if route == "addon" else 4)
    assert sum(decision.count for decision in xrt.decisions()) == 4


def test_gradients_of_both_norms_by_kernels_of_ours_are_right(asked, route):
    x = torch.randn(6, 8, requires_grad=True)
    weight, bias = (torch.randn(8, requires_grad=True) for _ in range(2))

    def gradients():
        normal = torch.autograd.grad(F.layer_norm(x, (8,), weight, bias).square().sum(), (x, weight, bias))
        return *normal, *torch.autograd.grad(F.rms_norm(x, (8,), weight).square().sum(), (x, weight))

    expected = gradients()
    with xt.kernel_policy(layer_norm="cpu.reference", rms_norm="cpu.reference"):
        for _ in range(3):
            for gradient, other in zip(gradients(), expected, strict=True):
                torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)
    if (
        route == "addon"
    ):  # which has no fast kernel for the gradient of the RMS norm on the CPU, as PyTorch has no kernel
        assert len(asked) == 3 + 3
    assert sum(decision.count for decision in xrt.decisions()) == 4 * 3


@pytest.mark.parametrize("form", FORMS[:6])
def test_another_policy_is_obeyed_at_once(form):
    run = call(form)
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(2):
            run(), run(), run()
            assert len(xrt.decisions()) == 0
            with xt.kernel_policy(layer_norm="cpu.reference", rms_norm="cpu.reference"):
                run(), run(), run()
                assert sum(decision.count for decision in xrt.decisions()) == 3
            xrt.clear_decisions()


def test_pytorchs_other_kernels_of_attention_are_obeyed_at_once():
    q = torch.randn(2, 4, 5, 8, requires_grad=True)

    def kernel():
        return type(F.scaled_dot_product_attention(q, q, q).grad_fn).__name__

    flash = kernel()
    assert "FlashAttention" in flash
    math = [{"match": {"op": "attention", "dtype": "fp32"}, "use": "torch.math"}]
    with xt.kernel_policy(rules=ELSEWHERE):
        assert [kernel() for _ in range(3)] == [flash] * 3
        with xt.kernel_policy(rules=math):
            assert all("FlashAttention" not in kernel() for _ in range(3))
        assert [kernel() for _ in range(3)] == [flash] * 3


def test_normalized_shape_is_part_of_the_route_key_and_a_wrong_one_is_refused(capfd):
    x = torch.randn(4, 8)
    words = r"Given normalized_shape=\[5\], expected input with shape \[\*, 5\]"
    for policy in ({"rules": ELSEWHERE}, {"layer_norm": "cpu.reference"}):
        with xt.kernel_policy(**policy):
            for _ in range(3):
                F.layer_norm(x, (8,))
                F.layer_norm(x, (4, 8))
                with pytest.raises(RuntimeError, match=words):
                    F.layer_norm(x, (5,))
    assert capfd.readouterr().err == ""


def test_a_strict_refusal_and_an_interrupt_come_through_as_they_are(monkeypatch):
    x = torch.randn(4, 8, requires_grad=True)
    policy = {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"layer_norm": "cuda_raw.layer_norm"}}
    with xt.kernel_policy(policy):
        for _ in range(2):
            with pytest.raises(UnsupportedOperationError, match="layer_norm"):
                F.layer_norm(x, (8,))
    total = F.layer_norm(x, (8,)).sum()
    with xt.kernel_policy(policy), pytest.raises(UnsupportedOperationError, match="layer_norm"):
        total.backward()

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(norms, "active_policy", interrupt)
    with xt.kernel_policy(rules=ELSEWHERE), pytest.raises(KeyboardInterrupt):
        F.layer_norm(x, (8,))


@by_addon
def test_determinism_is_part_of_the_route_key_of_attention(asked):
    run = call("sdpa")
    with xt.kernel_policy(rules=ELSEWHERE):
        run(), run()
        assert len(asked) == 1
        torch.use_deterministic_algorithms(True)
        try:
            run(), run()
            assert len(asked) == 2
        finally:
            torch.use_deterministic_algorithms(False)
        run()
    assert len(asked) == 2


@by_addon
def test_a_route_that_changes_is_taken_note_of(asked):
    run = call("layer_norm")
    with xt.kernel_policy(rules=ELSEWHERE):
        run(), run()
        now = context.active_policy()
        ((key, _),) = now.routes.items()
        now.keep(key, None)
        run(), run()
    assert len(asked) == 2


def test_native_kernels_are_back_afterwards():
    def tables():
        return {name: torch._C._dispatch_dump(f"aten::{name}") for name, _ in BY_ADDON}

    run, before = call("sdpa"), tables()
    with xt.kernel_policy(rules=ELSEWHERE):
        run()
        assert set(registry.installed()) >= {f"aten::{name} [{key}]" for name, key in BY_ADDON}
        assert all(table != before[name] for name, table in tables().items())
    assert registry.installed() == ()
    assert tables() == before


def test_over_another_librarys_override_the_kernel_below_is_called():
    seen = []
    native = torch.library.get_kernel("aten::native_layer_norm", "CPU")

    def other(keyset, *args):
        seen.append(1)
        return native.call_boxed(keyset, *args)

    registry.quiet_override_warning()
    library = torch.library.Library("aten", "IMPL")
    library.impl("native_layer_norm", other, "CPU", with_keyset=True, allow_override=True)
    run = call("layer_norm")
    try:
        with xt.kernel_policy(rules=ELSEWHERE):
            for _ in range(3):
                run()
            dump = torch._C._dispatch_dump("aten::native_layer_norm").splitlines()
            cpu = [line for line in dump if line.startswith("CPU")]  # a build for CUDA has a kernel of the addon there
            assert cpu
            assert not any(ADDON in line for line in cpu)
        assert len(seen) == 3
    finally:
        library._destroy()


@by_addon
@pytest.mark.parametrize("form", ["sdpa", "sdpa masked", "sdpa causal", "sdpa grouped"])
def test_attention_by_an_xpuruntime_kernel_skips_python_without_gradients(form, asked):
    run = call(form)
    expected = run()
    with xt.kernel_policy(attention="cpu.reference"):
        for _ in range(4):
            found = run()
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride()
            assert found.grad_fn is None
        assert len(asked) == 1
        assert sum(decision.count for decision in xrt.decisions()) == 4
        q = torch.randn(2, 4, 5, 8, requires_grad=True)
        for _ in range(2):
            assert F.scaled_dot_product_attention(q, q, q).grad_fn is not None
        with torch.inference_mode():
            for _ in range(3):
                assert F.scaled_dot_product_attention(q, q, q).is_inference()
    assert len(asked) > 1


def test_what_pytorch_refuses_is_refused_in_its_words_each_time(capfd):
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 6)
    x = torch.randn(4, 8)
    runs = (
        lambda: F.scaled_dot_product_attention(q, k, k),
        lambda: torch.native_layer_norm(x, [8], torch.ones(3), None, 1e-5),
        lambda: torch.ops.aten._fused_rms_norm(x, [8], torch.ones(3), None),
    )
    said = []
    for run in runs:
        with pytest.raises(RuntimeError) as refused:
            run()
        said.append(str(refused.value))
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(3):
            for run, words in zip(runs, said, strict=True):
                with pytest.raises(RuntimeError) as refused:
                    run()
                assert str(refused.value) == words
    assert capfd.readouterr().err == ""
