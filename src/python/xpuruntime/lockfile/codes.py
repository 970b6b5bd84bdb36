# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ValidatorKind` and `DriftCode`: the kinds of facts that a lock depends on, and of differences from a lock."""

from __future__ import annotations

from xpuruntime.codes import Code

__all__ = ["DriftCode", "ValidatorKind"]


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
    CPU_ISA = "cpu_isa", "The instruction sets of the processor."
    ENVIRONMENT = "environment", "Environment variables that change what runs."
    PACKAGE = "package", "The version of a Python package."
    COMPILER = "compiler", "A compiler that makes code of the model when it is loaded, or of a step."
    CALIBRATION = "calibration", "The inputs that the model is quantised with."
    ARTIFACT = "artifact", "The compiled artifact that is loaded."


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
    CPU_ISA = _of(ValidatorKind.CPU_ISA)
    ENVIRONMENT = _of(ValidatorKind.ENVIRONMENT)
    PACKAGE = _of(ValidatorKind.PACKAGE)
    COMPILER = _of(ValidatorKind.COMPILER)
    CALIBRATION = _of(ValidatorKind.CALIBRATION)
    ARTIFACT = _of(ValidatorKind.ARTIFACT)
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
