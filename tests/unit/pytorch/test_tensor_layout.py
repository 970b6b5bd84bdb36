# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What gates read of a tensor where it lies is what PyTorch's functions say of it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from xpuruntime import _core  # noqa: E402
from xpuruntime.pytorch.overriding import gates  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


class Subclass(torch.Tensor):
    pass


KINDS = {
    "as it is": lambda x: x,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "subclass": lambda x: x.as_subclass(Subclass),
    "detached": lambda x: x.detach(),
    "resized": lambda x: x.clone().resize_(2, 3, 2, 1, 2, 1).resize_(3),
}


def test_this_pytorch_has_what_gates_need():
    assert gates.why_no_layout() == ""


def agree(x):
    asked, read = _core.tensor_traits(x, True), _core.tensor_traits(x, False)
    assert asked[:5] == read[:5]
    assert asked[5] == read[5] or x.numel() == 0  # of which PyTorch says no address
    assert asked[:2] == (list(x.shape), list(x.stride()))


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), max_size=7),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(["cpu", "meta"]),
    kind=st.sampled_from(list(KINDS)),
    data=st.data(),
)
def test_a_tensor_has_the_same_traits_either_way(sizes, dtype, device, kind, data):
    gates.why_no_layout()
    x = torch.empty(sizes, dtype=dtype, device=device)
    if x.dim() > 0:
        x = x.permute(data.draw(st.permutations(range(x.dim()))))
        at = data.draw(st.integers(0, x.dim() - 1))
        start = data.draw(st.integers(0, x.shape[at]))
        x = x[(slice(None),) * at + (slice(start, None, data.draw(st.integers(1, 2))),)]
    agree(KINDS[kind](x))


def test_tensors_that_are_more_than_tensors_are_asked():
    gates.why_no_layout()
    from torch._subclasses import FakeTensorMode

    matrix = torch.ones(2, 3)
    agree(matrix.to(torch.complex64).conj())
    agree(matrix._neg_view())
    with torch.inference_mode():
        agree(torch.ones(4))
    with FakeTensorMode():
        fake = torch.ones(2, 3)
    for odd in (matrix.to_sparse(), fake):
        asked, read = (_core.tensor_traits(odd, ask) for ask in (True, False))
        assert asked == read
