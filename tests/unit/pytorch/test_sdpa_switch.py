# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What of a policy for attention is done by PyTorch's own switches, and that they are as before afterwards."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import PolicyError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from torch.nn import attention as torch_attention  # noqa: E402 - it needs PyTorch
from torch.nn.attention import _registry  # noqa: E402

from xpuruntime.pytorch.attention import sdpa_backends  # noqa: E402
from xpuruntime.pytorch.attention.sdpa_switch import attention_decided_by_switch  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides.registry import installed  # noqa: E402

pytestmark = pytest.mark.torch

MATH, FLASH, EFFICIENT, CUDNN = range(4)
sdpa = torch.nn.functional.scaled_dot_product_attention
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without CUDA")


@pytest.fixture(autouse=True)
def _everything_is_as_before():
    xt.clear_kernel_policy()
    before = sdpa_backends.read(), torch.backends.mha.get_fastpath_enabled()
    yield
    xt.clear_kernel_policy()
    assert (sdpa_backends.read(), torch.backends.mha.get_fastpath_enabled()) == before
    assert installed() == ()


def ran() -> str:
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    return sdpa(q, q, q).grad_fn.name()


def is_flash() -> bool:
    return ran() == "ScaledDotProductFlashAttentionForCpuBackward0"


def strict(kernel):
    return {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"attention": kernel}}


def test_the_default_is_flash():
    assert is_flash()


@pytest.mark.parametrize("word", ["torch.math", "math"])
@pytest.mark.parametrize("mode", ["prefer", "strict"])
def test_math_is_really_math(word, mode):
    with xt.kernel_policy({**strict(word), "mode": mode}):
        assert not is_flash()
        assert not any("scaled_dot_product" in name for name in installed())
        assert sdpa_backends.read().order[0] == MATH
    assert is_flash()


def test_what_the_program_sets_meanwhile_stays():
    before = sdpa_backends.read()
    try:
        with xt.kernel_policy(strict("torch.math")):
            assert not is_flash()
            torch.backends.cuda.enable_cudnn_sdp(True)  # which the policy has off
            other = [FLASH, *(number for number in before.order if number != FLASH)][::-1]
            torch._C._set_sdp_priority_order(other)
        after = sdpa_backends.read()
        assert after.enabled == (*before.enabled[:3], True, before.enabled[4])
        assert list(after.order) == other
    finally:
        sdpa_backends.write(before)


def test_only_what_a_policy_changed_goes_back():
    before = sdpa_backends.read()
    try:
        with xt.kernel_policy(attention="torch.math"):
            torch.backends.cuda.enable_math_sdp(False)  # on before, and under the policy
        assert sdpa_backends.read().enabled[MATH] is False
    finally:
        sdpa_backends.write(before)


@pytest.mark.parametrize("word", ["torch.flash", "flash_v2"])
def test_flash_is_first(word):
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert not is_flash()
        with xt.kernel_policy(attention=word):
            assert is_flash()
            assert sdpa_backends.read().order[0] == FLASH
            assert sdpa_backends.read().enabled[:4] == (True, True, True, True)
        assert not is_flash()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_strict_flash_refuses_what_it_cannot_serve():
    q = torch.randn(1, 2, 3, 8)
    with xt.kernel_policy(strict("torch.flash")):
        assert is_flash()
        assert sdpa_backends.read().enabled == (False, True, False, False, False)
        with pytest.raises(xrt.UnsupportedOperationError, match=r"with dropout .* asks for torch.flash.* Fix: "):
            sdpa(q, q, q, dropout_p=0.5)


@pytest.mark.parametrize("words", ["flash_v2", ["flash_v2"], ["torch.flash", "torch.cudnn"]])
@pytest.mark.parametrize("what", ["mask with a gradient", "dropout", "double"])
def test_a_kernel_that_does_not_serve_a_call_is_said_once(words, what):
    q = torch.rand(1, 2, 4, 8)
    mask = torch.zeros(1, 2, 4, 4, requires_grad=True) if what == "mask with a gradient" else None
    p = 0.5 if what == "dropout" else 0.0
    values = q[..., :4] if what == "double" else q  # another head_dim

    def attend():
        torch.manual_seed(0)
        return sdpa(q, q, values, attn_mask=mask, dropout_p=p)

    expected = attend()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with xt.kernel_policy(attention=words), xt.explain() as report:
            for _ in range(2):
                torch.testing.assert_close(attend(), expected)
    refused = [
        one for one in said if issubclass(one.category, XpuRuntimeWarning) and "attention of" in str(one.message)
    ]
    assert len(refused) == 1
    row = next(row for row in report.rows if row.op == "attention")
    assert row.resolved != "torch.flash"
    assert row.status == "substituted"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with xt.kernel_policy(strict(words)), pytest.raises(xrt.UnsupportedOperationError, match="Fix: "):
            attend()


def test_several_in_order():
    with xt.kernel_policy(attention=["torch.flash", "torch.math"]):
        assert is_flash()
        assert sdpa_backends.read().order[:2] == (FLASH, MATH)
        assert sdpa_backends.read().enabled == (True, True, False, False, False)
    with xt.kernel_policy(attention=["torch.math", "torch.flash"]):
        assert not is_flash()
    with xt.kernel_policy(strict(["torch.flash", "auto"])):
        sdpa(*torch.randn(3, 1, 2, 3, 8), dropout_p=0.5)


@no_cuda
@pytest.mark.parametrize("word", ["torch.cudnn", "torch.efficient", "cudnn", "efficient"])
def test_what_needs_cuda_is_refused_or_said(word):
    with pytest.raises(PolicyError, match=r"there is no CUDA device. Fix: ask for torch.flash"):
        xt.set_kernel_policy(strict(word))
    assert xt.get_kernel_policy() is None
    with pytest.warns(XpuRuntimeWarning, match="there is no CUDA device. PyTorch chooses for itself"):
        xt.set_kernel_policy(attention=word)
    assert is_flash()


@no_cuda
def test_the_next_serves_where_the_first_cannot():
    with pytest.warns(XpuRuntimeWarning, match=r"cudnn: torch.cudnn runs on CUDA"):
        xt.set_kernel_policy(attention=["cudnn", "math"])
    assert not is_flash()


def test_what_is_free_sets_nothing():
    before = sdpa_backends.read()
    for word in ("auto", "torch", ["torch", "auto"]):
        with xt.kernel_policy(attention=word):
            assert sdpa_backends.read() == before
            assert torch.backends.mha.get_fastpath_enabled()


def test_rules_and_kernels_of_ours_are_not_settled():
    def settled(**kernels):
        return attention_decided_by_switch(xrt.Policy(kernels=xrt.KernelPolicy(**kernels)))

    assert settled(attention="torch.math")
    assert settled(attention=["flash_v2", "torch"])
    assert not settled(attention="cpu.reference")
    assert not settled(attention=["torch.flash", "cpu.reference"])
    assert not settled(attention="torch.math", rules=[{"match": {"head_dim": 64}, "use": "torch"}])
    assert settled(attention="torch.math", rules=[{"match": {"op": "matmul"}, "use": "torch"}])
    assert not settled(attention=["torch.flash", "auto"], auto_strategy="best_performance")
    assert not settled(matmul="torch")


def test_the_fast_path_of_multi_head_attention_is_off_while_a_kernel_is_named():
    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        expected = encoder(x)
        with xt.kernel_policy(attention="cpu.reference"):
            xrt.clear_decisions()
            torch.testing.assert_close(encoder(x), expected)
            assert [decision.op for decision in xrt.decisions()] == ["attention"]
            assert not torch.backends.mha.get_fastpath_enabled()


def test_flash_v3_says_what_to_install():
    with pytest.raises(PolicyError, match="Install it so that flash_attn_interface can be imported"):
        xt.set_kernel_policy(strict("flash_v3"))
    with pytest.warns(XpuRuntimeWarning, match="flash_v3: FlashAttention 3 cannot be activated"):
        xt.set_kernel_policy(attention=["flash_v3", "torch.math"])
    assert not is_flash()


class Active:
    """What an implementation of flash attention gives PyTorch's registry, which calls `remove` in the end."""

    def __init__(self, log, name):
        self.log, self.name = log, name
        log.append(f"+{name}")

    def remove(self):
        self.log.append(f"-{self.name}")


@pytest.fixture
def implementations(monkeypatch):
    log: list[str] = []
    table = dict(_registry._FLASH_ATTENTION_IMPLS)
    for name in ("FA3", "FA4"):
        table[name] = lambda name=name: Active(log, name)
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", table)
    yield log
    xt.clear_kernel_policy()
    torch_attention.restore_flash_attention_impl(_raise_warn=False)


def test_flash_v3_is_activated_and_given_back(implementations):
    with xt.kernel_policy(attention="flash_v3"):
        assert torch_attention.current_flash_attention_impl() == "FA3"
        assert sdpa_backends.read().order[0] == FLASH
    assert torch_attention.current_flash_attention_impl() is None
    assert implementations == ["+FA3", "-FA3"]


def test_what_another_library_has_activated_survives(implementations):
    torch_attention.activate_flash_attention_impl("FA4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel in ("torch.math", "cpu.reference"):
            with xt.kernel_policy(attention=kernel):
                assert torch_attention.current_flash_attention_impl() == "FA4"
    assert implementations == ["+FA4"]
    with xt.kernel_policy(attention="flash_v3"):
        assert torch_attention.current_flash_attention_impl() == "FA3"
    assert torch_attention.current_flash_attention_impl() == "FA4"


def test_one_that_is_activated_meanwhile_survives(implementations):
    with xt.kernel_policy(attention="flash_v3"):
        torch_attention.activate_flash_attention_impl("FA4")
    assert torch_attention.current_flash_attention_impl() == "FA4"
    assert implementations == ["+FA3", "-FA3", "+FA4"]


def test_an_interrupt_while_a_call_waits_leaves_no_turn_open():
    program = (
        "import os, signal, threading, torch, xpuruntime.pytorch as xt\n"
        "from xpuruntime import _core\n"
        "from xpuruntime.pytorch.attention.sdpa_backends import by_backend\n"
        "entered, leave = threading.Event(), threading.Event()\n"
        "def stay():\n"
        "    with by_backend('torch.flash'):\n"
        "        entered.set()\n"
        "        leave.wait(60)\n"
        "thread = threading.Thread(target=stay)\n"
        "thread.start()\n"
        "entered.wait(60)\n"
        "threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "threading.Timer(0.6, leave.set).start()\n"
        "try:\n"
        "    with by_backend('torch.math'):\n"
        "        print('not interrupted')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', _core.in_sdp_backend_scope())\n"
        "thread.join()\n"
        "again = threading.Thread(target=stay)\n"
        "again.start()\n"
        "again.join(60)\n"
        "print('goes on', not again.is_alive())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["interrupted False", "goes on True"], done.stderr


def test_threads_wait_also_once_there_was_another_interpreter():
    """Python's own question whether a thread has the GIL is answered with yes from then on."""
    program = (
        "import threading, torch, xpuruntime.pytorch as xt\n"
        "try:\n"
        "    import _interpreters as interpreters\n"
        "except ImportError:\n"
        "    import _xxsubinterpreters as interpreters\n"
        "interpreters.destroy(interpreters.create())\n"
        "sdpa = torch.nn.functional.scaled_dot_product_attention\n"
        "sizes = [(300, 64), (100, 16)] * 2\n"
        "pairs = ((64, 'torch.flash'), (16, 'torch.math'))\n"
        "rules = [{'match': {'op': 'attention', 'head_dim': size}, 'use': use} for size, use in pairs]\n"
        "def run(length, head_dim):\n"
        "    x = torch.randn(1, 2, length, head_dim)\n"
        "    for _ in range(60):\n"
        "        sdpa(x, x, x)\n"
        "with xt.kernel_policy(rules=rules):\n"
        "    threads = [threading.Thread(target=run, args=one) for one in sizes]\n"
        "    [thread.start() for thread in threads]\n"
        "    [thread.join() for thread in threads]\n"
        "print('fine')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "fine\n", done.stderr
