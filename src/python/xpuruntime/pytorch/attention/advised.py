# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Advisories of kernels of attention in this process: which concern a call, and what `auto` takes instead."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch

from xpuruntime import _core
from xpuruntime.errors import warn
from xpuruntime.policies.advisories import AdvisedCall, Advisory, Platform, advisories, holding
from xpuruntime.pytorch.attention.call import sizes_of
from xpuruntime.pytorch.attention.sdpa_backends import BACKENDS, by_backend, choice, is_enabled
from xpuruntime.pytorch.dispatch.context import arch_of

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.pytorch.attention.call import AttentionCall
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy


def cudnn_version() -> tuple[int, ...]:
    """Return the version of the cuDNN that PyTorch has loaded; empty without one, or without a CUDA device."""
    number = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return () if number is None else (number // 10000, number // 100 % 100, number % 100)


def _rows(arch: str) -> tuple[Advisory, ...]:
    return _rows_of(arch, advisories())


@functools.lru_cache(maxsize=64)
def _rows_of(arch: str, rows: tuple[Advisory, ...]) -> tuple[Advisory, ...]:
    torch_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return holding(Platform(torch_version, cudnn_version(), arch), rows)


def rows_on(device: torch.device) -> tuple[Advisory, ...]:
    """Return the advisories of attention that hold on a device."""
    rows = _rows(arch_of(device) or "") if device.type == "cuda" else _rows(device.type)
    return tuple(row for row in rows if row.op == "attention")


def rows_here() -> tuple[Advisory, ...]:
    """Return the advisories of attention that hold on a device of this machine. Starts no CUDA context."""
    archs = ["cpu"]
    if _rows("") and _core.DeviceManager.built_with_cuda():
        devices = _core.DeviceManager.instance().get_all_devices()[1:]
        archs += ["sm{}{}".format(*device.compute_capability) for device in devices]
    return tuple(dict.fromkeys(row for arch in archs for row in _rows(arch) if row.op == "attention"))


def advisory_of(kernel: str, call: AttentionCall) -> Advisory | None:
    """Return the advisory that concerns a call by a kernel, an id; ``None`` where there is none."""
    rows = [row for row in rows_on(call.q.device) if kernel in row.kernels]
    facts = _facts_of(call) if rows else None
    return next((row for row in rows if facts is not None and row.concerns(kernel, facts)), None)


def may_concern(call: AttentionCall) -> bool:
    """Say whether an advisory concerns calls that differ from this one in lengths alone, by some kernel."""
    rows = rows_on(call.q.device)
    facts = _facts_of(call)._replace(keys=None) if rows else None
    return any(facts is not None and row.concerns(kernel, facts) for row in rows for kernel in row.kernels)


def _facts_of(call: AttentionCall) -> AdvisedCall:
    mask = "" if call.mask is None else "boolean" if call.mask.dtype == torch.bool else "same"
    if mask == "same" and call.mask is not None and call.mask.dtype != call.q.dtype:
        mask = "other"
    return AdvisedCall(
        gradient=call.needs_grad or call.backward,
        mask=mask,
        causal=call.is_causal,
        queries=_length(call.q),
        keys=_length(call.k),
    )


def _length(x: Tensor) -> int | None:
    """Return the length of an operand, or ``None`` where code is traced for any."""
    return sizes_of(x)[-2] if x.is_nested or isinstance(x.shape[-2], int) else None


def own_choice(call: AttentionCall) -> str:
    """Return the id of the kernel that PyTorch chooses for a call by itself; empty for one that has none here."""
    with by_backend(None), contextlib.suppress(RuntimeError):  # which the call itself raises when it is made
        number = choice(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
        return next((id_ for id_, own in BACKENDS.items() if own == number), "")
    return ""


def warn_of_any_choice(active: CompiledPolicy) -> None:
    """Warn where a policy looks at no call of attention, and one that PyTorch may choose is known to be wrong here."""
    concerned = {id_ for row in rows_here() for id_ in row.kernels if id_ in BACKENDS}
    kernels = sorted(filter(is_enabled, concerned))
    if kernels and "attention" not in active.overrides:
        msg = (
            f"attention is left to PyTorch, which may choose {' or '.join(kernels)}: for some calls that is known to "
            "be wrong with these versions on a device of this machine; `xrt doctor` names them. Fix: state attention: "
            "auto among the kernels of the policy, which takes another one for such calls"
        )
        warn(msg)


def warn_of_own_choice(active: CompiledPolicy, call: AttentionCall, kernel_names: tuple[str, ...]) -> None:
    """Warn, once for each policy and advisory, where PyTorch's own choice for a call is a kernel that one concerns.

    `asked` is what the policy asks for.
    """
    if not rows_on(call.q.device):
        return
    kernel = own_choice(call)
    advisory = advisory_of(kernel, call)
    if advisory is not None and active.is_first((kernel, advisory)):
        fix = "name torch.math for such calls: no other kernel of PyTorch's can serve them"
        if "auto" not in kernel_names:
            fix = "state attention: auto among the kernels of the policy, which takes another one for such calls"
        msg = f"{call} runs by {kernel}, which PyTorch chooses and which is known to be wrong: {advisory}. Fix: {fix}"
        warn(msg)
