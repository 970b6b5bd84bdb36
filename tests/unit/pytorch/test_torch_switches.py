# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's process-wide switches under a policy: set, read back, given back."""

from __future__ import annotations

import contextlib

import pytest

import xpuruntime as xrt
from xpuruntime.errors import PolicyError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = pytest.mark.torch


def policy(mode="prefer", kernels=None, **execution):
    return {"schema": "xpuruntime.policy/1", "mode": mode, "execution": execution, "kernels": kernels or {}}


@pytest.fixture(autouse=True)
def _switches_are_as_they_were():
    from xpuruntime.pytorch.switches.shared_switches import SWITCHES

    xt.clear_kernel_policy()
    names = [name for name in SWITCHES if name != "blas_library"]
    before = {name: SWITCHES[name].save() for name in names}
    yield
    xt.clear_kernel_policy()
    for name in names:
        SWITCHES[name].restore(before[name], SWITCHES[name].save())


@pytest.mark.parametrize(("precision", "tf32"), [("tf32", True), ("fp32", False)])
def test_precision_says_tf32_too(precision, tf32):
    with xt.kernel_policy(policy(precision=precision)):
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is tf32
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is True


def test_a_policy_without_them_leaves_them():
    before = both_interfaces()
    with xt.kernel_policy(matmul="cpu.blas"):
        assert both_interfaces() == before


@pytest.mark.parametrize(("mode", "warns"), [("prefer", True), ("strict", False)])
def test_determinism(mode, warns):
    torch.backends.cudnn.benchmark = True
    with xt.kernel_policy(policy(mode, determinism="run_to_run")):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
        assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


def _entered(asked):
    block = contextlib.ExitStack()
    block.enter_context(xt.kernel_policy(asked))
    return block


def test_int8_is_for_sessions():
    with (
        pytest.warns(XpuRuntimeWarning, match="int8 quantizes the models of sessions"),
        xt.kernel_policy(policy(precision="int8")),
    ):
        pass
    with (
        pytest.raises(PolicyError, match="quantize the exported model"),
        xt.kernel_policy(policy("strict", precision="int8")),
    ):
        pass


def test_a_grade_of_determinism_above_run_to_run_is_not_promised():
    with pytest.warns(XpuRuntimeWarning, match="batch_invariant is more than run_to_run"):
        block = _entered(policy(determinism="batch_invariant"))
    with block:
        assert torch.are_deterministic_algorithms_enabled()
    with (
        pytest.raises(PolicyError, match="state run_to_run here"),
        xt.kernel_policy(policy("strict", determinism="restart")),
    ):
        pass
    assert not torch.are_deterministic_algorithms_enabled()


def test_blocks_nest():
    with xt.kernel_policy(policy(tf32=True)):
        with xt.kernel_policy(policy(tf32=False)):
            assert torch.backends.cuda.matmul.allow_tf32 is False
        assert torch.backends.cuda.matmul.allow_tf32 is True
        with xt.kernel_policy():
            assert torch.backends.cuda.matmul.allow_tf32 is False
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_what_the_program_sets_in_the_meantime_stays():
    with xt.kernel_policy(policy(tf32=False, determinism="run_to_run")):
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(False)
    assert torch.get_float32_matmul_precision() == "high"
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="what a PyTorch without CUDA cannot do")
@pytest.mark.parametrize("kernel", ["cublas", "cublasLt"])
def test_a_blas_library_needs_a_pytorch_with_cuda(kernel):
    with pytest.warns(XpuRuntimeWarning, match=f"asks for {kernel}, and this PyTorch .* is built without CUDA"):
        xt.set_kernel_policy(matmul=kernel)
    with pytest.raises(PolicyError, match="built without CUDA"):
        xt.set_kernel_policy(policy("strict", {"matmul": kernel}))
    assert xt.get_kernel_policy().matmul == kernel


def test_a_blas_library_with_a_free_second_choice_says_nothing():
    with xt.kernel_policy(matmul=["cublasLt", "auto"]):
        pass


@pytest.mark.parametrize("kernel", ["torch", "torch.mm", "cublasLt", ["cublasLt", "auto"]])
def test_what_a_switch_settles_overrides_nothing(kernel):
    import warnings

    from xpuruntime.pytorch.dispatch.overrides.registry import installed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XpuRuntimeWarning)
        xt.set_kernel_policy(matmul=kernel)
    assert installed() == ()


def test_two_holders_share_a_switch():
    from xpuruntime.pytorch.switches.shared_switches import SwitchTakenError, claim

    first = claim({"matmul.allow_tf32": True})
    second = claim({"matmul.allow_tf32": True, "num_threads": 1})
    with pytest.raises(SwitchTakenError, match=r"matmul\.allow_tf32 is one for the whole process"):
        claim({"cudnn.benchmark": True, "matmul.allow_tf32": False})
    assert not torch.backends.cudnn.benchmark
    first.release()
    assert second.values() == {"matmul.allow_tf32": True, "num_threads": 1}
    second.release()
    second.release()
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_a_switch_that_a_session_holds_is_said_or_refused():
    from xpuruntime.pytorch.switches.shared_switches import claim

    session = claim({"matmul.allow_tf32": True})
    with pytest.warns(XpuRuntimeWarning, match="an open session or a policy holds it at True"):
        xt.set_kernel_policy(policy(tf32=False))
    assert torch.backends.cuda.matmul.allow_tf32 is True
    with pytest.raises(PolicyError, match="Fix: close that session"):
        xt.set_kernel_policy(policy("strict", tf32=False))
    session.release()


def test_a_list_with_another_kernel_is_decided_call_by_call():
    with xt.kernel_policy(matmul=["cublasLt", "cpu.blas"]):
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    assert xrt.decisions()[-1].chosen == "cpu.blas"


def test_the_mode_auto_says_nothing():
    for kernels in ({"matmul": "cublasLt"}, {"matmul": "cublas.cublasLt"}, {"attention": "torch.cudnn"}):
        with xt.kernel_policy({"schema": "xpuruntime.policy/1", "mode": "auto", "kernels": kernels}):
            torch.mm(torch.ones(2, 3), torch.ones(3, 2))


_LEVELS = [("generic", "all")] + [(b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn")]


def told(read):
    try:
        return read()
    except RuntimeError:
        return "PyTorch refuses to read it"


def both_interfaces():
    return (
        *(torch._C._get_fp32_precision_getter(*level) for level in _LEVELS),
        told(torch.get_float32_matmul_precision),
        told(lambda: torch.backends.cuda.matmul.allow_tf32),
        told(lambda: torch.backends.cudnn.allow_tf32),
    )


def _new(*level):
    return lambda value: torch._C._set_fp32_precision_setter(*level, value)


#: What a program may set, in PyTorch's new interface and in its old one.
PROGRAM = {
    **{f"{b}.{o}={v}": (_new(b, o), v) for b, o in _LEVELS[:-1] for v in ("tf32", "ieee")},
    "generic.all=bf16": (_new("generic", "all"), "bf16"),
    "mkldnn.matmul=bf16": (_new("mkldnn", "matmul"), "bf16"),
    **{f"matmul precision {v}": (torch.set_float32_matmul_precision, v) for v in ("highest", "high", "medium")},
    **{f"cudnn.allow_tf32={v}": (torch._C._set_cudnn_allow_tf32, v) for v in (True, False)},
    **{f"matmul.allow_tf32={v}": (torch._C._set_cublas_allow_tf32, v) for v in (True, False)},
}
ASKED = ({"tf32": False}, {"tf32": True}, {"precision": "fp32"})


@pytest.fixture
def stored():
    """Sets every level to what it was."""

    def restore():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
        for backend, op in _LEVELS:
            if backend != "cuda" or op in ("all", "matmul"):
                _new(backend, op)("none")

    restore()
    yield restore
    restore()


@pytest.mark.parametrize("name", PROGRAM)
def test_both_interfaces_are_as_they_were_whatever_the_program_has_set(name, stored):
    setter, value = PROGRAM[name]
    for asked in ASKED:
        stored()
        setter(value)
        before = both_interfaces()
        with xt.kernel_policy(policy(**asked)):
            inside = both_interfaces()
            if "tf32" in asked:
                assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is asked["tf32"]
                assert torch.backends.cudnn.allow_tf32 is asked["tf32"]
            assert "PyTorch refuses to read it" not in inside
        assert both_interfaces() == before
        # What is inherited is inherited again.
        stored()
        setter(value)
        _new("mkldnn", "all")("ieee")
        _new("cuda", "all")("none")
        expected = both_interfaces()
        stored()
        setter(value)
        with xt.kernel_policy(policy(**asked)):
            pass
        _new("mkldnn", "all")("ieee")
        _new("cuda", "all")("none")
        assert both_interfaces()[5:9] == expected[5:9]


@pytest.mark.parametrize("name", PROGRAM)
def test_what_the_program_sets_inside_can_be_read_afterwards(name, stored):
    setter, value = PROGRAM[name]
    for asked in ASKED:
        stored()
        setter(value)
        expected = both_interfaces()
        stored()
        with xt.kernel_policy(policy(**asked)):
            setter(value)
        found = both_interfaces()
        refused = [one == "PyTorch refuses to read it" for one in expected]
        assert not any(
            one == "PyTorch refuses to read it" and not was for one, was in zip(found, refused, strict=True)
        ), (asked, expected, found)
