# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Machines that are not here, and requests to judge on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import machines

from xpuruntime.engines.base import Judgement, Request
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.tensorrt import TensorRtEngine, TensorRtRtxEngine
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import EngineFacts, Machine
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

#: What the bindings of each version offer: RTX as probed, the others as their bindings' names say.
RTX_FACTS = EngineFacts(
    name="tensorrt-rtx",
    version="1.7.1.116",
    loadable=True,
    providers=("cuda",),
    detail={
        "capabilities": "targets runtime_cache graph_strategy kernel_specialization validity weight_streaming refit "
        "tiling runtime_platform async_allocator capturability",
        "compute_capabilities": "7.5 8.0 8.6 8.9 12.0 12.1",
    },
)
TRT10_FACTS = EngineFacts(
    name="tensorrt",
    version="10.9.0.34",
    loadable=True,
    providers=("cuda",),
    detail={
        "capabilities": "weak_typing timing_cache tactic_pinning weight_streaming refit hardware_compatibility tiling "
        "runtime_platform async_allocator",
        "compute_capabilities": "",
    },
)
NO_GPU = "no NVIDIA driver was found (libcuda.so.1)"


def machine(*chips: tuple[int, int], core_cuda: bool = True, engines: tuple[EngineFacts, ...] = ()) -> Machine:
    """Return a machine with GPUs of these compute capabilities."""
    facts = engines or (RTX_FACTS, TRT10_FACTS)
    return machines.machine(
        cuda=tuple(
            machines.gpu(index, name=f"GPU of {chip}", compute_capability=chip, total_memory=1 << 34, sm_count=80)
            for index, chip in enumerate(chips)
        ),
        cuda_reason=None if chips else NO_GPU,
        core_cuda=core_cuda,
        engines={fact.name: fact for fact in facts},
    )


def ask(folder: Path, model: Any = None, execution: dict[str, Any] | None = None, **more: Any) -> Request:
    """Return a request for ``cuda:0``; by default for an MLP of batch 2, to run it."""
    info = inspect_model(models.save(model if model is not None else models.mlp(batch=2), folder))
    more.setdefault("device", "cuda:0")
    more.setdefault("policy", Policy.coerce({"execution": execution or {}}))
    return Request(model=info, **more)


def judge(request: Request, where: Machine, engine: str = "tensorrt-rtx") -> Judgement:
    """Return what an engine says."""
    chosen = TensorRtRtxEngine() if engine == "tensorrt-rtx" else TensorRtEngine()
    return chosen.judge(request, where)
