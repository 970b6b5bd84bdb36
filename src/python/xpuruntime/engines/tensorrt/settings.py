# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TensorRtSettings`: what the plan decided, in TensorRT's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from xpuruntime.engines.settings import EngineSettings

__all__ = ["Profile", "TensorRtSettings"]

#: Least, best and largest shape of one input.
Profile = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class TensorRtSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` and `compile` hand to TensorRT.

    Attributes
    ----------
    targets : tuple of str
        Compute capabilities to build for; empty where the product builds for the GPU it runs on.
    convert : {"fp16", "bf16"} or None
        The type that the graph is converted to. Networks are strongly typed: the graph's types are what runs.
    quantise : bool
        Whether the model is quantised with the calibration inputs of the request.
    keep_fp32 : tuple of str
        Node globs that are neither converted nor quantised.
    tf32 : bool
    profiles : dict of str to Profile
        For each input with a dimension that stays open.
    workspace : int or None
        Bytes of scratch memory that a kernel may be chosen with.
    options : dict of str to str
        As `checked_options` gives them.
    graph : {"off", "prefer", "require"}
        Whether bindings capture CUDA graphs.
    pool : str
        ``engine``, ``direct``, ``caching`` or ``driver``.
    pool_limit : int or None
        Bytes.
    strict : bool
    """

    targets: tuple[str, ...] = ()
    convert: Literal["fp16", "bf16"] | None = None
    quantise: bool = False
    keep_fp32: tuple[str, ...] = ()
    tf32: bool = True
    profiles: Mapping[str, Profile] = {}
    workspace: int | None = None
    options: Mapping[str, str] = {}
    graph: Literal["off", "prefer", "require"] = "off"
    pool: Literal["engine", "direct", "caching", "driver"] = "engine"
    pool_limit: int | None = None
    strict: bool = False
