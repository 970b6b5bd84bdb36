# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Threads take turns with PyTorch's switches for attention: each call is served as it is to be, whatever others do."""

from __future__ import annotations

import os
import threading
import time
import traceback
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.attention import sdpa_backends  # noqa: E402
from xpuruntime.pytorch.attention.sdpa_backends import by_backend  # noqa: E402
from xpuruntime.pytorch.dispatch.fast_path import self_test  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides import attention  # noqa: E402
from xpuruntime.pytorch.ops import fused_attention  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("no_policy_of_attention_is_left", "route"),
    pytest.mark.parametrize("route", ["addon", "python"], indirect=True),
]

sdpa = torch.nn.functional.scaled_dot_product_attention
ONLY_FLASH = (False, True, False, False, False)
ONLY_MATH = (True, False, False, False, False)


def rule(use, **match):
    return {"match": {"op": "attention", **match}, "use": use}


def enabled():
    return tuple(bool(get()) for get in sdpa_backends._GETTERS)


@contextmanager
def another_thread_inside(kernel):
    """Another thread is inside of `by_backend` as long as the block runs, or until it calls what it is given."""
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with by_backend(kernel):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(60)
    try:
        yield leave.set
    finally:
        leave.set()
        thread.join()


@pytest.fixture
def in_python(monkeypatch):
    """What Python is asked of calls of attention."""
    shapes = []

    def attend(held, natively, given, kernel=""):
        shapes.append(given.query.shape)
        return real(held, natively, given, kernel)

    real = attention.attend
    monkeypatch.setattr(attention, "attend", attend)
    return shapes


def test_blocks_inside_each_other():
    before = enabled()
    with by_backend("torch.flash"):
        with by_backend("torch.math"):
            assert enabled() == ONLY_MATH
            with by_backend(None):
                assert enabled() == ONLY_MATH
                with by_backend("torch.flash"):
                    assert enabled() == ONLY_FLASH
                assert enabled() == ONLY_MATH
        assert enabled() == ONLY_FLASH
        with by_backend("torch.flash"), by_backend(None):
            assert enabled() == ONLY_FLASH
        assert enabled() == ONLY_FLASH
    assert enabled() == before


def test_what_the_program_has_switched_off_stays_off_where_that_is_asked_for():
    before = sdpa_backends.read()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        off = enabled()
        with by_backend("torch.flash", only_if_enabled=True):
            assert enabled() == off
        with by_backend("torch.flash"):
            assert enabled() == ONLY_FLASH
        with by_backend("torch.math", only_if_enabled=True):
            assert enabled() == ONLY_MATH
        assert enabled() == off
    finally:
        sdpa_backends.write(before)


def test_an_error_inside_ends_the_turn():
    before = enabled()
    with pytest.raises(ValueError, match="inside"), by_backend("torch.math"):
        raise ValueError("inside")
    assert enabled() == before
    with another_thread_inside("torch.flash"):
        pass


@pytest.mark.parametrize("rules", [[rule("torch.flash", head_dim=64)], [rule("torch.math", phase="train")]])
def test_a_call_that_is_pytorchs_own_waits_for_what_another_thread_has_switched(rules):
    """Dropout is for math alone on the CPU, so that PyTorch would refuse it while nothing but flash is enabled."""
    x = torch.randn(1, 2, 8, 16)
    done = []
    with torch.no_grad(), xt.kernel_policy(rules=rules):
        sdpa(x, x, x, dropout_p=0.1)  # the guard knows it from here on
        sdpa(x, x, x, dropout_p=0.1)
        with another_thread_inside("torch.flash") as let_it_leave:
            call = threading.Thread(target=lambda: done.append(sdpa(x, x, x, dropout_p=0.1)))
            call.start()
            call.join(0.2)
            assert call.is_alive()
            let_it_leave()
            call.join(60)
    assert len(done) == 1


def test_the_switches_are_read_as_the_program_has_them():
    before = sdpa_backends.read()
    seen = []
    with another_thread_inside("torch.flash") as let_it_leave:
        reading = threading.Thread(target=lambda: seen.append(sdpa_backends.read()))
        reading.start()
        reading.join(0.1)
        let_it_leave()
        reading.join(60)
    assert seen == [before]


def test_threads_that_want_the_same_go_on_beside_each_other():
    x = torch.randn(1, 2, 8, 64)
    with torch.no_grad(), xt.kernel_policy(rules=[rule("torch.flash", head_dim=64)]):
        expected = sdpa(x, x, x)
        with another_thread_inside("torch.flash"):
            assert torch.equal(sdpa(x, x, x), expected)


def test_a_guard_calls_the_kernel_that_a_rule_asks_for(in_python, route):
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    before = enabled()
    with xt.kernel_policy(xrt.KernelPolicy(rules=[rule("torch.math")])):
        for _ in range(4):
            found = sdpa(q, k, v)
            assert found.grad_fn.name() == "UnsafeViewBackward0"
        assert len(in_python) == (1 if route == "addon" else 4)
        assert enabled() == before
        found.sum().backward()
        with xt.explain() as explained:
            sdpa(q, k, v)
        assert [row.resolved for row in explained.rows if row.requested] == ["torch.math"]
    assert sdpa(q, k, v).grad_fn.name() != "UnsafeViewBackward0"


def test_rules_of_a_phase_and_of_a_module(in_python, route):
    class Block(torch.nn.Module):
        def forward(self, x):
            return sdpa(x, x, x)

    model = torch.nn.Sequential(Block(), Block())
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    rules = [rule("torch.math", module="1", phase="train")]
    with xt.kernel_policy(xrt.KernelPolicy(rules=rules)):
        for _ in range(3):
            assert model[0](x).grad_fn.name() != "UnsafeViewBackward0"  # "0" alone is no such module
            assert model(x).grad_fn.name() == "UnsafeViewBackward0"
        count = len(in_python)
        model(x)
        assert len(in_python) == (count if route == "addon" else count + 2)


def test_sixteen_threads_of_three_settings():
    x, y, z = (torch.randn(1, 2, 8, size, requires_grad=True) for size in (16, 24, 32))
    wrong = []

    def run(turn):
        try:
            for number in range(60):
                if (turn + number) % 3 == 0:
                    assert sdpa(x, x, x).grad_fn.name() == "UnsafeViewBackward0"
                elif (turn + number) % 3 == 1:
                    assert "Flash" in sdpa(y, y, y).grad_fn.name()
                else:
                    sdpa(z, z, z, dropout_p=0.5)
        except Exception:
            wrong.append(traceback.format_exc())

    before = enabled()
    with xt.kernel_policy(xrt.KernelPolicy(rules=[rule("torch.math", head_dim=16), rule("torch.flash", head_dim=24)])):
        threads = [threading.Thread(target=run, args=(turn,)) for turn in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not wrong
    assert enabled() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Python, that a process with threads forks
def test_a_child_of_a_fork_is_not_left_waiting():
    before = enabled()
    with another_thread_inside("torch.flash"):
        child = os.fork()
        if child == 0:
            right = enabled() == before
            with by_backend("torch.math"):
                right = right and enabled() == ONLY_MATH
            os._exit(0 if right and enabled() == before else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert enabled() == before


def test_what_is_found_out_inside_of_a_transform(monkeypatch):
    """PyTorch sets no state of tracing in kernels that a transform has called."""
    found = []
    real = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args: (found.append(self_test(lambda: "")), real(*args))[1])
    x = torch.randn(3, 1, 2, 8, 16)
    with xt.kernel_policy(rules=[rule("torch.math", head_dim=16)]):
        torch.testing.assert_close(torch.vmap(lambda one: sdpa(one, one, one))(x), sdpa(x, x, x))
    assert found[0] == ""


def test_policies_change_while_threads_compute():
    """Each call is served by what some policy says, and none is refused."""
    x, y = torch.randn(1, 2, 8, 64, requires_grad=True), torch.randn(1, 2, 8, 32)
    policies = [
        xrt.KernelPolicy(rules=[rule("torch.flash", head_dim=64)]),
        xrt.KernelPolicy(attention="torch.math", rules=[rule("torch.flash", head_dim=64)]),
        xrt.KernelPolicy(rules=[rule("torch.math", phase="train")]),
    ]
    stop = threading.Event()
    wrong, calls = [], [0, 0]

    def run(turn, *args, **options):
        while not stop.is_set():
            try:
                sdpa(*args, **options).sum()
                calls[turn] += 1
            except RuntimeError:
                wrong.append(traceback.format_exc())

    before = enabled()
    with xt.kernel_policy(policies[0]):
        threads = [
            threading.Thread(target=run, args=(0, x, x, x)),
            threading.Thread(target=run, args=(1, y, y, y), kwargs={"dropout_p": 0.1}),
        ]
        for thread in threads:
            thread.start()
        for number in range(120):
            xt.set_kernel_policy(policies[number % 3])
            time.sleep(0.005)
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert min(calls) > 0
    assert enabled() == before


def test_what_is_switched_while_a_turn_lasts_stays_so():
    before = sdpa_backends.read()
    try:
        with by_backend("torch.flash"):
            torch.backends.cuda.enable_mem_efficient_sdp(True)
            torch.backends.cuda.enable_flash_sdp(False)
        assert enabled() == (True, False, True, True, True)
    finally:
        sdpa_backends.write(before)


def test_our_operator_by_pytorchs_choice_waits_too():
    x = torch.randn(1, 2, 8, 16)
    done = []
    with torch.no_grad(), another_thread_inside("torch.flash") as let_it_leave:
        call = threading.Thread(target=lambda: done.append(fused_attention(x, x, x, dropout_p=0.1, kernel="torch")))
        call.start()
        call.join(0.2)
        assert call.is_alive()
        let_it_leave()
        call.join(60)
    assert len(done) == 1
