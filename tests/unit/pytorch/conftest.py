# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What tests of policies in PyTorch have to leave behind as it was."""

from __future__ import annotations

import os
import uuid

import pytest


@pytest.fixture
def no_policy_is_left():
    import torch

    import xpuruntime as xrt
    import xpuruntime.pytorch as xt
    from xpuruntime.pytorch.dispatch.overrides.registry import installed

    torch.manual_seed(0)
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    yield
    xt.clear_kernel_policy()
    assert installed() == ()


@pytest.fixture
def compiled_anew():
    """Inductor takes nothing from disk: what an earlier run left there may be of another state of these sources."""
    import torch

    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        yield


@pytest.fixture
def inductor_is_new(tmp_path, monkeypatch):
    """Nothing is compiled yet, and what is will be kept in a folder of this test's, for other processes of it too."""
    import torch

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def nothing_is_watched_afterwards():
    import torch
    from torch.nn.modules import module as torch_module

    import xpuruntime.pytorch as xt
    from xpuruntime.pytorch.dispatch.context import CONTEXT
    from xpuruntime.pytorch.dispatch.overrides.registry import installed

    xt.clear_kernel_policy()
    hooks = len(torch_module._global_forward_pre_hooks)
    yield
    xt.clear_kernel_policy()
    assert installed() == ()
    assert CONTEXT.observer is None
    assert len(torch_module._global_forward_pre_hooks) == hooks
    assert not torch._C._autograd._profiler_enabled()


@pytest.fixture
def no_policy_of_attention_is_left():
    import torch

    import xpuruntime as xrt
    import xpuruntime.pytorch as xt
    from xpuruntime.pytorch.attention import sdpa_backends
    from xpuruntime.pytorch.dispatch.overrides.registry import installed

    xt.clear_kernel_policy()
    xrt.clear_decisions()
    before = sdpa_backends.read()
    torch.manual_seed(0)
    yield
    xt.clear_kernel_policy()
    assert installed() == ()
    assert sdpa_backends.read() == before


@pytest.fixture
def decisions_of_this_test():
    import xpuruntime as xrt

    xrt.clear_decisions()


@pytest.fixture(autouse=True, scope="module")
def by_the_addon(request):
    """The addon is built once, and in use where the environment states no other route."""
    if request.module.__name__.endswith("test_private_api"):  # which runs against any PyTorch, without a compiler
        return
    from xpuruntime.pytorch import build_addon
    from xpuruntime.pytorch.dispatch import fast_path

    if not os.environ.get(fast_path.VARIABLE):
        build_addon.build()
        fast_path.load_addon.cache_clear()
        fast_path.why_no_addon.cache_clear()
        assert fast_path.choose("addon").route == "addon"


@pytest.fixture(params=["addon", "stable", "python"])
def route(request):
    """Each route by which PyTorch's dispatcher reaches a policy, for one test. The addon is built where it is not."""
    from xpuruntime.pytorch import build_addon
    from xpuruntime.pytorch.dispatch import fast_path

    if request.param == "addon":
        build_addon.build()
        fast_path.load_addon.cache_clear()
        fast_path.why_no_addon.cache_clear()
    before = fast_path.fast_path().route
    assert fast_path.choose(request.param).route == request.param
    yield request.param
    fast_path.choose(before)


@pytest.fixture
def asked(monkeypatch):
    """The phase of each call that came to Python, or of which Python was asked for its call_context."""
    from xpuruntime.pytorch.dispatch import compiled_policy, context
    from xpuruntime.pytorch.dispatch.overrides import attention, norms

    seen = []
    real = compiled_policy.CompiledPolicy.call_context

    def call_context(self):
        seen.append(context.phase())
        return real(self)

    def looks(current):
        def look():
            seen.append(context.phase())
            return current()

        return look

    monkeypatch.setattr(compiled_policy.CompiledPolicy, "call_context", call_context)
    for module in (norms, attention):  # products ask for their call_context
        monkeypatch.setattr(module, "active_policy", looks(module.active_policy))
    return seen
