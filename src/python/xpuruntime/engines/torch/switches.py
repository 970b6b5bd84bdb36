# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's process-wide switches, held by the sessions that need them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.base import Request
    from xpuruntime.engines.torch.settings import TorchSettings
    from xpuruntime.pytorch.switches.shared_switches import SwitchClaim

__all__ = ["hold", "read_back"]

_TF32 = ("matmul.allow_tf32", "cudnn.allow_tf32")


def hold(settings: TorchSettings, request: Request) -> SwitchClaim:
    """Set the switches of `settings`, and the switch that keeps attention in a module where a policy reaches it."""
    from xpuruntime.pytorch.switches import shared_switches

    wanted: dict[str, Any] = {}
    if settings.tf32 is not None:
        wanted |= dict.fromkeys(_TF32, settings.tf32)
    if settings.deterministic:
        if "CUBLAS_WORKSPACE_CONFIG" not in os.environ and _cuda_started():
            msg = (
                "execution.determinism on CUDA needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment "
                "before the first CUDA call of the process; set it and start again"
            )
            raise EngineError(msg, engine="torch")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        wanted |= {"deterministic_algorithms": True, "cudnn.benchmark": False}
    if settings.threads is not None:
        wanted["num_threads"] = settings.threads
    if _has_fast_path(request):
        wanted["mha.fastpath"] = False
    try:
        return shared_switches.claim(wanted)
    except shared_switches.SwitchTakenError as error:
        raise EngineError(f"{error}; close that session, or use a process of its own", engine="torch") from None


def read_back(settings: TorchSettings, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the policy keys that switches realise, as these are now."""
    found: dict[str, str] = {}
    tf32 = {name: bool(values[name]) for name in _TF32 if name in values}
    if tf32:
        # One of the two may have been changed behind the session's back: then that one is reported.
        other = next((name for name, value in tf32.items() if value is not settings.tf32), None)
        found["execution.tf32"] = str(settings.tf32).lower() if other is None else f"{other}={str(tf32[other]).lower()}"
    if "deterministic_algorithms" in values:
        on = values["deterministic_algorithms"]
        found["execution.determinism"] = "torch.use_deterministic_algorithms, for the process" if on else "none"
    if "num_threads" in values:
        found["execution.threads"] = str(values["num_threads"])
    return found


def _has_fast_path(request: Request) -> bool:
    """Say whether a policy names kernels for attention, and modules would run one of their own without gradients."""
    import torch

    from xpuruntime.pytorch.attention.sdpa_switch import names_kernels

    if request.model.format != "torch" or not names_kernels(request.policy):
        return False
    has_one = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    source: Any = request.model.source
    return any(isinstance(part, has_one) for part in source.module.modules())


def _cuda_started() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())
