# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Switches of PyTorch, set process-wide for a policy and restored after it."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from xpuruntime.errors import PolicyError, XpuRuntimeWarning, warn
from xpuruntime.pytorch.attention.sdpa_switch import attention_decided_by_switch, attention_switch, serves_nothing
from xpuruntime.pytorch.switches.shared_switches import SWITCHES, SwitchTakenError, claim

if TYPE_CHECKING:
    from xpuruntime.policies import Policy

#: Families of matmul to PyTorch's preferred BLAS library.
_BLAS = {"cublas": "cublas", "cublasLt": "cublaslt"}
#: Words for attention that serve every call, and the one that is PyTorch's flash once it is active.
_WHOLE = frozenset(("math", "torch.math", "flash_v3", "fa3"))
_NATIVE = frozenset(("torch", "inductor", "torch.mm"))
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def decided_by_switches(policy: Policy, op: str) -> bool:
    """Say whether the short form of `op` is done by a switch for all calls, so that no call is looked at."""
    kernel_names = _kernel_names(policy, op)
    if op == "attention" and attention_decided_by_switch(policy):
        # Where a kernel may be unable to serve a call, each is looked at. Of what serves none, that has been said.
        return kernel_names[0] in _WHOLE or serves_nothing(policy)
    if policy.kernels.auto_strategy == "best_performance" and "auto" in kernel_names:
        return False
    if op == "matmul" and policy.mode != "strict" and _only_libraries(kernel_names):
        return True
    return bool(kernel_names) and kernel_names[0] in (
        "torch",
        f"torch.{op}",
        "auto",
        *(_NATIVE if op == "matmul" else ()),
    )


class Switches:
    """Switches that are set, each with what gives it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def add(self, undo: Callable[[], Any] | None) -> None:
        """Take what gives a switch back."""
        if undo is not None:
            self._undo.append(undo)

    def release(self) -> None:
        """Give them back, last first. Idempotent."""
        while self._undo:
            self._undo.pop()()


def set_switches(policy: Policy, *, quiet: bool) -> Switches:
    """Set what `policy` settles by switches.

    These are the BLAS library and the SDPA backends of the short forms (see `decided_by_switches`); of ``execution``,
    ``tf32`` and ``precision: tf32`` or ``fp32``, for products and convolutions on CUDA; ``precision: fp32`` also keeps
    the sums of 16-bit products in float32; ``determinism: run_to_run`` turns deterministic algorithms on and cuDNN's
    benchmark off, where a mode of ``prefer`` warns of an operation that has no such algorithm and ``strict`` refuses.
    """
    switches = Switches()
    try:
        with warnings.catch_warnings() if quiet else contextlib.nullcontext():
            if quiet:
                warnings.simplefilter("ignore", XpuRuntimeWarning)
            switches.add(_hold(policy, {"blas_library": _blas_library(policy)}))
            switches.add(_hold(policy, _precision(policy)))
            switches.add(_hold(policy, _determinism(policy)))
            switches.add(attention_switch(policy))
    except BaseException:
        switches.release()
        raise
    return switches


def _kernel_names(policy: Policy, op: str) -> tuple[str, ...]:
    kernel_names = policy.kernels.get(op)
    return () if kernel_names is None else (kernel_names,) if isinstance(kernel_names, str) else kernel_names


def _hold(policy: Policy, wanted: dict[str, Any]) -> Callable[[], Any] | None:
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if not wanted:
        return None
    try:
        held = claim(wanted)
    except (SwitchTakenError, RuntimeError) as error:
        _cannot(policy, str(error), "close that session, or leave this out of the policy")
        return None
    wrong = {name: value for name, value in held.values().items() if value != wanted[name]}
    if wrong:
        held.release()
        shown = ", ".join(f"{name} reads {value}, not {wanted[name]}" for name, value in wrong.items())
        _cannot(policy, f"PyTorch does not take its switches: {shown}", "leave this out of the policy")
        return None
    return held.release


def _cannot(policy: Policy, reason: str, fix: str) -> None:
    if policy.mode == "strict":
        raise PolicyError(f"{reason}. Fix: {fix}, or use mode: prefer")
    if policy.mode != "auto":
        warn(f"{reason}; that part of the policy is not done. Fix: {fix}")


def _only_libraries(kernel_names: tuple[str, ...]) -> bool:
    """Say whether nothing but PyTorch's BLAS libraries and its own choice is named, so that a switch does it."""
    return bool(kernel_names) and all(
        kernel_name in _BLAS or kernel_name in _NATIVE or kernel_name == "auto" for kernel_name in kernel_names
    )


def _blas_library(policy: Policy) -> str | None:
    kernel_names = _kernel_names(policy, "matmul")
    if not kernel_names or kernel_names[0] not in _BLAS or not _only_libraries(kernel_names):
        return None
    if not torch.backends.cuda.is_built():
        if "auto" not in kernel_names and not _NATIVE & set(kernel_names):
            reason = (
                f"kernels.matmul asks for {kernel_names[0]}, and this PyTorch {torch.__version__} is built without CUDA"
            )
            _cannot(policy, reason, "install a PyTorch with CUDA, or ask for a kernel of the CPU such as cpu.blas")
        return None
    return None if policy.mode == "strict" else _BLAS[kernel_names[0]]


def _precision(policy: Policy) -> dict[str, Any]:
    execution = policy.execution
    if execution.precision == "int8":
        _cannot(
            policy,
            "execution.precision: int8 quantizes the models of sessions, and nothing in PyTorch",
            "leave it out of the policy here, and quantize the exported model",
        )
    return _precision_switches(policy)


def _precision_switches(policy: Policy) -> dict[str, Any]:
    execution = policy.execution
    tf32 = execution.tf32
    if tf32 is None and execution.precision in ("tf32", "fp32"):
        tf32 = execution.precision == "tf32"
    wanted: dict[str, Any] = {"matmul.allow_tf32": tf32, "cudnn.allow_tf32": tf32}
    if execution.precision == "fp32":
        wanted |= {"matmul.fp16_reduction": False, "matmul.bf16_reduction": False, "matmul.fp16_accumulation": False}
    return wanted


def _determinism(policy: Policy) -> dict[str, Any]:
    if not policy.execution.deterministic:
        return {}
    grade = policy.execution.determinism
    if grade != "run_to_run":
        _cannot(
            policy,
            f"execution.determinism: {grade} is more than run_to_run, which PyTorch's deterministic algorithms promise",
            "state run_to_run here, and test the exported model with `xrt determinism`",
        )
    if torch.backends.cuda.is_built() and _WORKSPACE not in os.environ:
        if torch.cuda.is_initialized():
            _cannot(
                policy,
                f"execution.determinism on CUDA needs {_WORKSPACE}=:4096:8 in the environment before the "
                "first CUDA call of the process, so that products repeat",
                "set it and start again",
            )
        else:
            os.environ[_WORKSPACE] = ":4096:8"
    return _determinism_switches(policy)


def _determinism_switches(policy: Policy) -> dict[str, Any]:
    return {"deterministic_algorithms": True if policy.mode == "strict" else "warn", "cudnn.benchmark": False}


class Setting(msgspec.Struct, frozen=True):
    """What a policy states of PyTorch's switches, and how they read back."""

    key: str
    requested: str
    observed: str
    status: Literal["honoured", "substituted"]

    def __str__(self) -> str:
        return f"{self.key} {self.requested}: {self.status} ({self.observed})"


def read_settings(policy: Policy) -> tuple[Setting, ...]:
    """Read back the switches that ``tf32``, ``precision`` and ``determinism`` of ``execution`` settle."""
    execution = policy.execution
    parts: list[tuple[str, str, dict[str, Any], str]] = []
    if wanted := {name: value for name, value in _precision_switches(policy).items() if value is not None}:
        key = "tf32" if execution.tf32 is not None else "precision"
        parts.append((f"execution.{key}", str(getattr(execution, key)).lower(), wanted, ""))
    if execution.deterministic:
        grade = execution.determinism
        missing = "no more than run_to_run" if grade != "run_to_run" else ""
        if torch.cuda.is_initialized() and _WORKSPACE not in os.environ:
            missing = f"{_WORKSPACE} is not set"
        parts.append(("execution.determinism", str(grade), _determinism_switches(policy), missing))
    settings: list[Setting] = []
    for name, requested, wanted, missing in parts:
        values = {switch: SWITCHES[switch].read() for switch in wanted}
        observed = ", ".join([*(f"{switch} {value}" for switch, value in values.items()), *filter(None, [missing])])
        settings.append(
            Setting(name, requested, observed, "substituted" if missing or values != wanted else "honoured")
        )
    return tuple(settings)
