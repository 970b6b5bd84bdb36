# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Advisories of kernels of attention in this process: which concern a call, and what `auto` takes instead."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import TYPE_CHECKING

import torch

from xpuruntime import _core
from xpuruntime.errors import XpuRuntimeWarning
from xpuruntime.policies.advisories import AdvisedCall, Advisory, Platform, holding
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.call import sizes_of
from xpuruntime.pytorch.attention.sdpa_backends import BACKENDS, by_backend
from xpuruntime.pytorch.dispatch.call_state import arch_of

if TYPE_CHECKING:
    from xpuruntime.pytorch.attention.call import AttentionCall
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

__all__ = ["advisory_of", "cudnn_version", "own_choice", "rows_on", "some_hold", "warn_of_own_choice"]


def cudnn_version() -> tuple[int, ...]:
    """Return the version of the cuDNN that PyTorch has loaded; empty without one, or without a CUDA device."""
    number = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return () if number is None else (number // 10000, number // 100 % 100, number % 100)


@functools.cache
def _rows(arch: str) -> tuple[Advisory, ...]:
    torch_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    cudnn = cudnn_version()
    return holding(Platform(torch_version, cudnn, arch)) if cudnn else ()


def rows_on(device: torch.device) -> tuple[Advisory, ...]:
    """Return the advisories that hold on a device."""
    return _rows(arch_of(device) or "") if device.type == "cuda" else ()


@functools.cache
def some_hold() -> bool:
    """Say whether an advisory holds on a device of this machine. Starts no CUDA context."""
    if not _rows(""):
        return False
    if not _core.DeviceManager.built_with_cuda():
        return True
    devices = _core.DeviceManager.instance().get_all_devices()[1:]
    return any(_rows("sm{}{}".format(*device.compute_capability)) for device in devices)


def advisory_of(kernel: str, call: AttentionCall) -> Advisory | None:
    """Return the advisory that concerns a call by a kernel, an id; ``None`` where there is none."""
    rows = rows_on(call.q.device)
    if not any(kernel in row.kernels for row in rows):
        return None
    mask = "" if call.mask is None else "boolean" if call.mask.dtype == torch.bool else "same"
    if mask == "same" and call.mask is not None and call.mask.dtype != call.q.dtype:
        mask = "other"
    facts = AdvisedCall(
        gradient=call.needs_grad or call.backward,
        mask=mask,
        causal=call.is_causal,
        queries=sizes_of(call.q)[-2],
        keys=sizes_of(call.k)[-2],
    )
    return next((row for row in rows if row.concerns(kernel, facts)), None)


def own_choice(call: AttentionCall) -> str:
    """Return the id of the kernel that PyTorch chooses for a call by itself; empty for one that has none here."""
    with by_backend(None), contextlib.suppress(RuntimeError):  # which the call itself raises when it is made
        number = _private_api.sdp_choice(
            call.q, call.k, call.v, call.mask, call.dropout_p, call.is_causal, scale=call.scale,
            enable_gqa=call.enable_gqa,
        )  # fmt: skip
        return next((id_ for id_, own in BACKENDS.items() if own == number), "")
    return ""


def warn_of_own_choice(active: CompiledPolicy, call: AttentionCall) -> None:
    """Warn, once for each policy and advisory, where PyTorch's own choice for a call is a kernel that one concerns."""
    if not some_hold() or not rows_on(call.q.device):
        return
    kernel = own_choice(call)
    found = advisory_of(kernel, call)
    if found is not None and active.is_first((kernel, found)):
        msg = (
            f"{call} runs by {kernel}, which PyTorch chooses and which is known to be wrong: {found}. Fix: state "
            "attention: auto among the kernels of the policy, which takes another one for such calls"
        )
        warnings.warn(msg, XpuRuntimeWarning, stacklevel=2)
