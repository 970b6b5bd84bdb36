# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Differences between a lock and what is here: their codes, those of validators, and the error that has them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from xpuruntime.codes import Code
from xpuruntime.errors import LockError

if TYPE_CHECKING:
    from xpuruntime.evidence.difference import Difference


class ValidatorKind(Code):
    """What a validator is of; also the code of the difference where it does not hold."""

    MODEL = "model", "The model file."
    EXTERNAL_DATA = "external_data", "A file of weights beside the model."
    POLICY = "policy", "The policy; as a difference, one key that it states."
    DEVICE = "device", "The device: its name or architecture."
    DRIVER = "driver", "The driver of the device."
    ENGINE = "engine", "The engine: its version or its files."
    LIBRARY = "library", "A native library that the engine or a kernel uses."
    KERNEL_SOURCE = "kernel_source", "The build of xpuruntime's own kernels, or the code of a plugin's."
    ADAPTER = "adapter", "The class that calls a kernel of another package: its name and code."
    CANARY = "canary", "The comparison of a kernel with float64 before its first use: its inputs and its result."
    CPU_ISA = "cpu_isa", "The instruction sets of the processor."
    ENVIRONMENT = "environment", "Environment variables that change what runs."
    PACKAGE = "package", "The version of a Python package."
    COMPILER = "compiler", "A compiler that makes code of the model when it is loaded, or of a step."
    CALIBRATION = "calibration", "The inputs that the model is quantized with."
    ARTIFACT = "artifact", "The compiled artifact that is loaded."
    GENERATION = "generation", "How a model of transformers generates: attention, experts, cache, configuration."
    TOKENIZER = "tokenizer", "The tokenizer and its chat template."


def _of(kind: ValidatorKind) -> tuple[str, str]:
    return str(kind), kind.meaning


class DriftCode(Code):
    """What differs between a lock and what is found; what `xrt lock --accept` takes."""

    MODEL = _of(ValidatorKind.MODEL)
    EXTERNAL_DATA = _of(ValidatorKind.EXTERNAL_DATA)
    POLICY = _of(ValidatorKind.POLICY)
    DEVICE = _of(ValidatorKind.DEVICE)
    DRIVER = _of(ValidatorKind.DRIVER)
    ENGINE = _of(ValidatorKind.ENGINE)
    LIBRARY = _of(ValidatorKind.LIBRARY)
    KERNEL_SOURCE = _of(ValidatorKind.KERNEL_SOURCE)
    ADAPTER = _of(ValidatorKind.ADAPTER)
    CANARY = _of(ValidatorKind.CANARY)
    CPU_ISA = _of(ValidatorKind.CPU_ISA)
    ENVIRONMENT = _of(ValidatorKind.ENVIRONMENT)
    PACKAGE = _of(ValidatorKind.PACKAGE)
    COMPILER = _of(ValidatorKind.COMPILER)
    CALIBRATION = _of(ValidatorKind.CALIBRATION)
    ARTIFACT = _of(ValidatorKind.ARTIFACT)
    GENERATION = _of(ValidatorKind.GENERATION)
    TOKENIZER = _of(ValidatorKind.TOKENIZER)
    PLAN = "plan", "A line of the plan: engine, device, precision, a setting or a control."
    SHAPES = "shapes", "The input shapes that the lock was made for."
    KERNEL = "kernel", "An entry runs by another kernel."
    CONFIGURATION = "configuration", "An entry runs by the same kernel in another configuration."
    PRECISION = "precision", "An entry computes in another precision."
    ACCUMULATE = "accumulate", "An entry accumulates in another precision."
    LAYOUT = "layout", "An entry has another memory layout."
    PLACEMENT = "placement", "An entry runs on another device."
    FUSION = "fusion", "The nodes of an entry are grouped otherwise, or run as another operator."
    GONE = "gone", "An entry of the lock did not run."
    NEW = "new", "Something ran that the lock has no entry for."
    UNOBSERVABLE = "unobservable", "The lock has a kernel for an entry, and none was reported."
    OUTPUT = "output", "An output for the inputs of the lock differs."


#: Stands for what a lock of an earlier release expects of a fact that it does not have.
NOT_IN_LOCK = "not in the lock"

#: Digests are shown by their first digits.
_DIGEST, _DIGITS = re.compile("[0-9a-f]{64}"), 12
#: Differences that a message names; the error has all of them.
_NAMED = 8


def lacking(difference: Difference) -> bool:
    """Whether it is a fact that the lock does not have: nothing that the lock has differs."""
    return bool(difference.validator) and difference.before == NOT_IN_LOCK


def shown(value: Any) -> str:
    """Return a value of a validator as short text; ``nothing`` for one that is missing."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}" for name, item in sorted(value.items())) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(str(item) for item in value) or "none"
    text = str(value)
    return (text[:_DIGITS] if _DIGEST.fullmatch(text) else text) or "''"


def accept_command(model: str, where: str, codes: Iterable[str]) -> str:
    """Return the command that takes differences of these codes into a lock; outputs follow from the model's file."""
    every = dict.fromkeys(codes)
    if every.keys() & {DriftCode.MODEL, DriftCode.EXTERNAL_DATA}:
        every[DriftCode.OUTPUT] = None
    accepted = " ".join(f"--accept {code}" for code in every)
    return f"{relock_command(model, where)} {accepted} --why TEXT"


def relock_command(model: str, where: str) -> str:
    """Return the command that makes a lock; ``MODEL`` stands for a model that is not known."""
    return f"xrt lock {shlex.quote(model or 'MODEL')} -o {shlex.quote(where)}"


def drift_error(
    where: str, drifts: Iterable[Difference], *, take: str = "", model: str = "", accepted: Iterable[str] = ()
) -> LockError:
    """Return the error of a lock that does not hold, with every difference in its attribute `drifts`.

    `accepted` are the codes that the caller accepts already, which the command needs too.
    """
    listed = tuple(drifts)
    lines = [str(difference) for difference in listed[:_NAMED]]
    if len(listed) > _NAMED:
        lines.append(f"and {len(listed) - _NAMED} more differences")
    accept = accept_command(model, where, (*accepted, *(difference.code for difference in listed)))
    tail = f"To take what is here instead: {take or f'`{accept}`, or `{relock_command(model, where)} --upgrade`'}"
    head = f"the lock {where} does not hold{f' for {model}' if model else ''}:"
    text = f"{head} {lines[0]}" if len(lines) == 1 else head + "".join(f"\n  {line}" for line in lines)
    return LockError(f"{text}\n  {tail}" if len(lines) > 1 else f"{text}. {tail}", drifts=listed)
