# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Provider options of the torch engine, with the values each accepts."""

from __future__ import annotations

from xpuruntime.engines.options import BOOL, Option

__all__ = ["NAMES", "OPTIONS"]

#: What a policy may call this engine.
NAMES = ("torch", "pytorch")

OPTIONS: dict[str, Option] = {
    "mode": Option(
        meaning="run operators one by one, or compile the whole",
        values=("eager", "compile"),
        search=("compile",),
        search_first=True,
    ),
    "compile_mode": Option(
        meaning="the mode of torch.compile",
        values=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        search=("reduce-overhead", "max-autotune"),
        needs={"mode": ("compile",)},
    ),
    "fullgraph": Option(meaning="refuse what torch.compile cannot take as one graph", values=BOOL),
    "dynamic": Option(meaning="compile once for all sizes", values=BOOL),
}
