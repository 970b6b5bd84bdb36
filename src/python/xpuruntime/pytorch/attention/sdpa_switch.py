# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SDPA backends of the whole process, set for what a policy states of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import attention as torch_attention

from xpuruntime.errors import PolicyError, warn
from xpuruntime.pytorch.attention import sdpa_backends
from xpuruntime.pytorch.attention.sdpa_backends import BACKENDS, SdpaBackends
from xpuruntime.pytorch.dispatch.route import NATIVE_NAMES
from xpuruntime.pytorch.switches import shared_switches

if TYPE_CHECKING:
    from xpuruntime.policies import Policy

_FREE = ("auto", "torch", "inductor", "torch.sdpa")
_OVERRIDEABLE = 4
#: What PyTorch's registry calls FlashAttention 3, and what has to be installed for it.
_FLASH_V3 = "FA3"
_FLASH_V3_MODULE = "flash_attn_interface"
_FLASH_V3_NAMES = ("flash_v3", "fa3")


def attention_decided_by_switch(policy: Policy) -> bool:
    """Say whether the short form of attention is done by `attention_switch` for all calls, at no cost for each.

    That is so where it names nothing but PyTorch's own kernels and no rule chooses a kernel for attention. Calls that
    the one that was asked for may be unable to serve are looked at all the same, so that it is said where it is not.
    """
    kernel_names = _kernel_names(policy)
    if not kernel_names or all(kernel_name in _FREE for kernel_name in kernel_names):
        return False
    if any(rule.use is not None and rule.match.op in (None, "attention") for rule in policy.kernels.rules):
        return False
    if policy.kernels.auto_strategy == "best_performance" and "auto" in kernel_names:
        return False
    return all(
        kernel_name in _FREE or kernel_name in _FLASH_V3_NAMES or kernel_name in NATIVE_NAMES["attention"]
        for kernel_name in kernel_names
    )


def serves_nothing(policy: Policy) -> bool:
    """Say whether no kernel of PyTorch's that the short form of attention names can serve any call here."""
    kernel_names = [kernel_name for kernel_name in _kernel_names(policy) if kernel_name not in _FREE]
    return all(kernel_name in NATIVE_NAMES["attention"] and bool(_cannot(kernel_name)) for kernel_name in kernel_names)


def attention_switch(policy: Policy) -> Callable[[], Any] | None:
    """Set PyTorch's switches for what `attention_decided_by_switch` says. Returns what gives them back, or ``None``."""
    undo: list[Callable[[], Any]] = []

    def release() -> None:
        while undo:
            undo.pop()()

    try:
        if attention_decided_by_switch(policy):
            _settle(policy, undo)
        if names_kernels(policy):
            undo.append(shared_switches.claim({"mha.fastpath": False}).release)
    except BaseException:
        release()
        raise
    return release if undo else None


def _kernel_names(policy: Policy) -> tuple[str, ...]:
    kernel_names = policy.kernels.get("attention")
    if kernel_names is None:
        return ()
    return (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)


def names_kernels(policy: Policy) -> bool:
    """Say whether a policy asks for any kernel of attention by name, in its short form or in a rule."""
    kernel_names = list(_kernel_names(policy))
    for rule in policy.kernels.rules:
        if rule.use is not None and rule.match.op in (None, "attention"):
            kernel_names.extend((rule.use,) if isinstance(rule.use, str) else rule.use)
    return any(kernel_name not in _FREE for kernel_name in kernel_names)


def _settle(policy: Policy, undo: list[Callable[[], Any]]) -> None:
    strict = policy.mode == "strict"
    wanted: list[int] = []
    refused: list[str] = []
    free = False
    for kernel_name in _kernel_names(policy):
        if kernel_name in _FREE:
            free = True
            break
        reason = _activate_flash_v3(undo) if kernel_name in _FLASH_V3_NAMES else _cannot(kernel_name)
        if reason:
            refused.append(f"{kernel_name}: {reason}")
            continue
        number = BACKENDS["torch.flash" if kernel_name in _FLASH_V3_NAMES else NATIVE_NAMES["attention"][kernel_name]]
        if number not in wanted:
            wanted.append(number)
        if number == BACKENDS["torch.math"]:
            break  # it can serve whatever is asked of it
    if refused and not wanted and not free:
        msg = f"kernels.attention asks for {', '.join(_kernel_names(policy))}, which this PyTorch cannot do: "
        msg += "; ".join(refused)
        if strict:
            raise PolicyError(f"{msg}. Fix: ask for torch.flash or torch.math, put 'auto' last, or use mode: prefer")
        if policy.mode != "auto":
            warn(f"{msg}. PyTorch chooses for itself")
    elif refused and policy.mode == "prefer":
        warn(f"kernels.attention: {'; '.join(refused)}")
    if not wanted:
        return
    sdpa_backends.fix_backend_order()
    before = sdpa_backends.read()
    applied = _settings(before, wanted, only=strict and not free)
    sdpa_backends.write(applied)
    undo.append(lambda: sdpa_backends.restore(before, applied))


def _settings(before: SdpaBackends, wanted: list[int], *, only: bool) -> SdpaBackends:
    order = (*wanted, *(number for number in before.order if number not in wanted))
    if only or BACKENDS["torch.math"] in wanted:
        return SdpaBackends(tuple(number in wanted for number in range(_OVERRIDEABLE + 1)), order)
    return SdpaBackends(tuple(was or number in wanted for number, was in enumerate(before.enabled)), order)


def _cannot(kernel_name: str) -> str:
    kernel = NATIVE_NAMES["attention"][kernel_name]
    if kernel in ("torch.cudnn", "torch.efficient") and not torch.cuda.is_available():
        return f"{kernel} runs on CUDA, and there is no CUDA device"
    active = torch_attention.current_flash_attention_impl()
    if kernel == "torch.flash" and active is not None and torch.cuda.is_available():
        return (
            f"{active} is active in its place; call torch.nn.attention.restore_flash_attention_impl() before, or ask"
            " for what is active"
        )
    return ""


def _activate_flash_v3(undo: list[Callable[[], Any]]) -> str:
    """Activate FlashAttention 3 in PyTorch's registry. Returns why that cannot be, or nothing."""
    if torch_attention.current_flash_attention_impl() == _FLASH_V3:
        return ""
    before = torch_attention.current_flash_attention_impl()
    if _FLASH_V3 not in torch_attention.list_flash_attention_impls():
        return "this PyTorch has no registry entry for FlashAttention 3; it needs PyTorch 2.11 or newer"
    try:
        torch_attention.activate_flash_attention_impl(_FLASH_V3)
    except (ImportError, RuntimeError) as error:
        if before is not None:
            torch_attention.activate_flash_attention_impl(before)
        return f"FlashAttention 3 cannot be activated: {error}. Install it so that {_FLASH_V3_MODULE} can be imported"

    def restore() -> None:
        if torch_attention.current_flash_attention_impl() != _FLASH_V3:
            return  # somebody else has activated another one since
        torch_attention.restore_flash_attention_impl()
        if before is not None:
            torch_attention.activate_flash_attention_impl(before)

    undo.append(restore)
    return ""
