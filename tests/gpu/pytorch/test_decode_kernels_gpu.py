# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The Triton kernels of a decode step against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch
from xpuruntime.pytorch.generation import decode_kernels

pytestmark = pytest.mark.usefixtures("cuda_is_usable_afterwards")

LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def on_the_device():
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


def off(found, want):
    return float((found.double() - want.double()).abs().max() / want.double().abs().max())


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("rows", [1, 3, 20, 64])
@pytest.mark.parametrize("way", ["a kernel of its own", "a kernel that loads by TMA", "cuBLAS"])
@pytest.mark.parametrize(
    ("columns", "count", "norm", "bias", "kind"),
    [
        (2048, 3072, True, False, ""),
        (2816, 512, False, True, "residual"),
        (5632, 2048, False, False, "residual"),
        (520, 1000, True, False, "gated"),
        (512, 5632, True, False, "gated"),
    ],
)
def test_product(dtype, rows, columns, count, norm, bias, kind, way):
    if way not in decode_kernels.ways(rows, torch.empty(0, dtype=dtype)):
        pytest.skip(f"{rows} rows of {dtype} are not computed by {way} here")
    gated = kind == "gated"
    x = torch.randn(rows, columns, dtype=dtype)
    weight = torch.randn(count * (1 + gated), columns, dtype=dtype) / columns**0.5
    scale = (torch.rand(columns, dtype=dtype) + 0.5, 1e-5) if norm else None
    added = torch.randn(weight.shape[0], dtype=dtype) if bias else None
    out = torch.randn(rows, count, dtype=dtype)
    want = x.double()
    if norm:
        want = want * torch.rsqrt(want.pow(2).mean(-1, keepdim=True) + 1e-5) * scale[0].double()
    want = F.linear(want, weight.double(), added.double() if bias else None)
    if gated:
        want = F.silu(want[:, :count]) * want[:, count:]
    residual = out if kind == "residual" else None
    if residual is not None:
        want = want + out.double()
    arrived = torch.zeros(len(weight), dtype=torch.int32)
    following = torch.rand(count, dtype=dtype) + 0.5
    options = {"norm": scale, "bias": added, "gated": gated, "way": way, "arrived": arrived}
    scales = following if kind == "residual" else None
    made = decode_kernels.product(x, weight, out, residual=residual, **options, scales=scales)
    assert off(out, want) < LIMITS[dtype]
    if made is not None:
        assert off(made.rows, out.double() * following.double()) < LIMITS[dtype]
        assert off(made.squares.sum(0)[:rows], out.double().pow(2).sum(1)) < 1e-4
    if norm:
        squares = x.float().pow(2).view(rows, 8, -1).sum(2).t()
        padded = F.pad(squares, (0, max(8, 1 << (rows - 1).bit_length()) - rows)).contiguous()
        scaled = decode_kernels.Scaled((x.float() * scale[0].float()).to(dtype), padded)
        decode_kernels.product(x, weight, out, **options, scaled=scaled)
        assert off(out, want) < LIMITS[dtype]
    assert not arrived.any()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "size", "most", "filled", "normed"),
    [
        (1, 8, 4, 64, 1024, 700, False),
        (3, 2, 3, 128, 300, 70, True),
        (2, 1, 1, 32, 64, 0, False),
        (8, 8, 4, 64, 500, 480, False),
        (32, 8, 4, 64, 384, 256, False),
        (5, 2, 12, 64, 200, 129, True),
        (1, 1, 1, 64, 64, 0, False),
    ],
)
def test_attention(dtype, rows, kv_heads, group, size, most, filled, normed):
    qkv = torch.randn(rows, (group + 2) * kv_heads * size, dtype=dtype)
    keys, values = (torch.randn(rows, kv_heads, most, size, dtype=dtype) for _ in range(2))
    turns = tuple(torch.randn(most, size, dtype=dtype) for _ in range(2))
    padding = min(filled, 66)
    mask, position = torch.ones(rows, most, dtype=torch.long), torch.full((rows, 1), filled)
    mask[0, :padding], position[0] = 0, filled - padding
    norms = (torch.rand(size, dtype=dtype), torch.rand(size, dtype=dtype), 1e-6) if normed else None
    q, k, v = qkv.double().view(rows, -1, size).split([group * kv_heads, kv_heads, kv_heads], 1)
    if normed:
        q, k = (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w.double()
            for x, w in zip((q, k), norms[:2], strict=True)
        )
    cos, sin = (table.double()[position] for table in turns)
    q, k = (x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin for x in (q, k))
    wide = [
        cache.double().index_copy(2, torch.tensor([filled]), new[:, :, None]) for cache, new in ((keys, k), (values, v))
    ]
    wide = [cache[:, :, : filled + 1] for cache in wide]
    # What lies beyond the text is not looked at.
    keys[:, :, filled:], values[:, :, filled:] = torch.nan, torch.nan
    seen = mask[:, : filled + 1] != 0
    scores = torch.einsum("bhd,bhtd->bht", q, wide[0].repeat_interleave(group, 1)) * size**-0.5
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    want = torch.einsum("bht,bhtd->bhd", weights, wide[1].repeat_interleave(group, 1)).reshape(rows, -1)
    arrived = torch.zeros(rows * kv_heads, dtype=torch.int32)
    bits = []
    for _ in range(20):
        out = torch.full_like(want, torch.nan, dtype=dtype)
        decode_kernels.attend(
            qkv, keys, values, turns, mask, torch.tensor([filled + 1]), position, out, arrived,
            scale=size**-0.5, norms=norms, extent=most,
        )  # fmt: skip
        bits.append(out)
    assert all(torch.equal(out, bits[0]) for out in bits), "pieces are put together in one order"
    assert not arrived.any()
    for found, right in ((bits[0], want), (keys[:, :, : filled + 1], wide[0]), (values[:, :, : filled + 1], wide[1])):
        assert off(found, right) < LIMITS[dtype]
    assert keys[:, :, filled + 1 :].isnan().all()
    assert values[:, :, filled + 1 :].isnan().all()


@pytest.mark.parametrize("dtype", [*LIMITS, torch.float16])
@pytest.mark.parametrize("kind", ["", "seen", "added"])
@pytest.mark.parametrize(("rows", "kv_heads", "group", "size", "length"), [(1, 8, 4, 64, 700), (3, 2, 3, 128, 70)])
def test_a_policy_names_attention_of_one_query(dtype, kind, rows, kv_heads, group, size, length):
    q = torch.randn(rows, 1, kv_heads * group, size, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(rows, kv_heads, length + 8, size, dtype=dtype)[:, :, :length] for _ in range(2))
    mask = torch.rand(rows, 1, 1, length) > 0.3
    if kind == "added":
        mask = torch.where(mask, torch.randn(mask.shape), -torch.inf).to(dtype)
    mask = mask if kind else None
    wide = None if mask is None else mask if kind == "seen" else mask.double()
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, enable_gqa=True)
    policy = xrt.Policy(mode="strict", kernels={"attention": "triton_raw.decode"})
    with torch.no_grad(), xrt_torch.kernel_policy(policy), xrt_torch.explain() as found:
        made = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert off(made, want) < {**LIMITS, torch.float16: 4e-3}[dtype]
    assert {(row.resolved, row.status) for row in found.rows if row.op == "attention"} == {
        ("triton_raw.decode", "honoured")
    }
