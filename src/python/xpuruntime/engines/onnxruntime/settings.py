# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Settings`: what the plan decided, in ONNX Runtime's own terms."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Settings"]


class Settings(msgspec.Struct, kw_only=True):
    """What `load` hands to ONNX Runtime.

    Attributes
    ----------
    provider : str
    options : dict of str to str
        Provider options.
    session : dict of str to str
        Session configuration entries.
    level : str
        Graph optimisation level.
    threads : int or None
        Threads inside one op; ``None`` leaves ONNX Runtime's choice.
    deterministic : bool
    convert : str or None
        ``"fp16"`` or ``"bf16"`` when the graph is converted.
    keep_fp32 : tuple of str
        Node globs that stay in fp32.
    allow_cpu_ops : tuple of str
        Op types that may run on the CPU provider of a CUDA session.
    pool : str
        ``engine``, ``direct``, ``caching`` or ``driver``.
    pool_limit : int or None
        Bytes.
    graph : str
        ``off``, ``prefer`` or ``require``.
    strict : bool
    """

    provider: str
    options: dict[str, str] = {}
    session: dict[str, str] = {}
    level: str = "all"
    threads: int | None = None
    deterministic: bool = False
    convert: Literal["fp16", "bf16"] | None = None
    keep_fp32: tuple[str, ...] = ()
    allow_cpu_ops: tuple[str, ...] = ()
    pool: str = "engine"
    pool_limit: int | None = None
    graph: str = "off"
    strict: bool = False
