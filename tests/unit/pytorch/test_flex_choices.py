# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `explain` tells of compiled kernels of `flex_attention`: what was chosen when they were compiled."""

from __future__ import annotations

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from xpuruntime.pytorch.attention import flash_impl  # noqa: E402 - it needs PyTorch
from xpuruntime.pytorch.attention.flash_impl import FlexChoice  # noqa: E402
from xpuruntime.pytorch.coverage.operation_table import FLEX, uncovered_kernel  # noqa: E402
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy  # noqa: E402
from xpuruntime.pytorch.explanation.attribution import AttributedTime, TimeAttribution, UnattributedCalls  # noqa: E402
from xpuruntime.pytorch.explanation.requested import RequestedKernels  # noqa: E402
from xpuruntime.pytorch.explanation.summary import build_rows  # noqa: E402

pytestmark = pytest.mark.torch

KERNEL = "triton_tem_fused_flex_attention_0"
TRITON = FlexChoice("torch.flex_triton", ("torch.flex_triton",), "kernels.attention", "honoured", "", "layers.0.attn")
DECODE = FlexChoice("torch.flex_decode", ("torch.flex_decode",), "kernels.rules[0]", "honoured", "", "layers.1.attn")
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
    row = row_of("", TRITON)
    assert (row.requested, row.source) == (("torch.flex_triton",), "kernels.attention")
    assert (row.resolved, row.status, row.observed) == ("torch.flex_triton", "honoured", (KERNEL,))
    assert row.reason == "chosen when it was compiled"


def test_the_module_tells_which():
    assert row_of("layers.1", TRITON, DECODE, STATED).resolved == "torch.flex_decode"
    assert row_of("layers.1.attn").resolved == "torch.flex_decode"
    row = row_of("head")
    assert (row.resolved, row.status) == ("torch.flex_flash", "bypassed")
    assert row.reason == "chosen when it was compiled; stated"


def test_several_choices_cannot_be_told_apart():
    row = row_of("", TRITON, DECODE)
    assert (row.requested, row.resolved, row.status) == (("torch.flex_triton",), "", "opaque")
    assert "torch.flex_triton and torch.flex_decode" in row.reason
    same = TRITON._replace(module="layers.1.attn")
    flash_impl.forget()
    assert row_of("", TRITON, same).status == "honoured"


def test_what_was_compiled_without_a_policy_has_escaped():
    row = row_of("")
    assert (row.status, row.resolved, row.reason) == ("bypassed", "", FLEX)


def test_another_policy_forgets():
    flash_impl.note(TRITON)
    with xt.kernel_policy(attention="torch.flash"):
        assert flash_impl.choices("") == ()
