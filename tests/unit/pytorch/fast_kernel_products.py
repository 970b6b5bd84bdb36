# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Products that fast kernels serve, and the count of those that reach Python."""

from __future__ import annotations

import torch

from xpuruntime.pytorch.dispatch.overrides import matmul

#: Of which no call here is.
ELSEWHERE = [{"match": {"op": "matmul", "m": 4096}, "use": "cpu.reference"}]
FORMS = ("mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm.out", "baddbmm", "baddbmm.out")


def call(form, dtype=torch.float32, layout="plain"):
    packet, _, into = form.partition(".")
    torch.manual_seed(0)
    batch = (2,) if packet in ("bmm", "baddbmm") else ()
    a, b = torch.randn(*batch, 3, 4), torch.randn(*batch, 4, 5)
    if layout == "transposed":
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    elif layout == "sliced":
        a, b = torch.randn(*batch, 6, 9)[..., ::2, 1:5], torch.randn(*batch, 4, 11)[..., 1:11:2]
    elif layout == "expanded":
        a, b = torch.randn(*batch, 1, 4).expand(*batch, 3, 4), torch.randn(*batch, 4, 1).expand(*batch, 4, 5)
    elif layout == "empty":
        a, b = a[..., :0], b[..., :0, :]
    elif layout == "nothing":
        a = a[..., :0, :]
    a, b = a.to(dtype), b.to(dtype)
    rows = a.shape[-2]
    operands = (a, b) if packet in ("mm", "bmm") else (torch.randn(5).to(dtype), a, b)
    more = {"out": torch.empty(*batch, rows, 5, dtype=dtype)} if into else {}
    return lambda: getattr(torch, packet)(*operands, **more)


def count_asked(monkeypatch):
    """Return a list that names each call that comes to Python from now on, native or not."""
    seen = []
    real = matmul._run

    def count(native, *args):
        seen.append(native.name)
        return real(native, *args)

    monkeypatch.setattr(matmul, "_run", count)
    return seen
