# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A language model exported with a kernel policy, and the kernels that this has in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_models import batch, language

import xpuruntime as xrt
import xpuruntime.pytorch as xt

if TYPE_CHECKING:
    from pathlib import Path

RULES = [
    {"match": {"module": "layers.*.attn", "op": "attention"}, "use": "cpu.reference"},
    {"match": {"node": "layers.1.ln2"}, "use": "cpu.reference"},
]
POLICY = xrt.Policy(kernels={"matmul": "cpu.blas", "layer_norm": "cpu.vectorised", "rules": RULES})
KERNELS = {
    **{f"layers.{i}.{part}": "cpu.blas" for i in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")},
    **{f"layers.{i}.attn": "cpu.reference" for i in (0, 1)},
    **dict.fromkeys(("layers.0.ln1", "layers.0.ln2", "layers.1.ln1", "ln"), "cpu.vectorised"),
    "layers.1.ln2": "cpu.reference",
    "head": "cpu.blas",
}


def export_language(folder: Path) -> Any:
    """Return what `xpuruntime.pytorch.export` wrote into a folder."""
    model, ids = language()
    return xt.export(model, ids, folder / "language.pt2", policy=POLICY, dynamic_shapes=({0: batch()},))


def ours(report: xrt.Report) -> dict[str, str]:
    """Return module to the kernel of ours that ran in it."""
    return {u.id.rpartition("/")[0]: u.kernel for u in report.units if u.kernel and u.kernel in KERNELS.values()}
