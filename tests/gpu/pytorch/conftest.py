# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What tests have to leave behind as it was."""

from __future__ import annotations

import pytest


@pytest.fixture
def cuda_is_usable_afterwards():
    from captured_training import assert_usable

    import xpuruntime.pytorch as xrt_torch

    xrt_torch.clear_kernel_policy()
    yield
    xrt_torch.clear_kernel_policy()
    assert_usable()


@pytest.fixture
def no_policy_is_left():
    import torch

    import xpuruntime as xrt
    import xpuruntime.pytorch as xrt_torch
    from xpuruntime.pytorch.dispatch.overrides.registry import installed

    torch.manual_seed(0)
    xrt_torch.clear_kernel_policy()
    xrt.clear_decisions()
    yield
    xrt_torch.clear_kernel_policy()
    assert installed() == ()
