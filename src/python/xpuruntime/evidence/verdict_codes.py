# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`VerdictCode`: why a candidate of a plan is accepted or rejected."""

from __future__ import annotations

from xpuruntime.codes import Code

__all__ = ["VerdictCode"]


class VerdictCode(Code):
    """Why a candidate of a plan is accepted or rejected."""

    ACCEPTED = "accepted", "It runs the model."
    NOT_TRIED = "not_tried", "One before it was accepted."
    NOT_NAMED = "not_named", "An engine or device that runs only when a policy names it: null, a simulator."
    ENGINE_UNKNOWN = "engine_unknown", "No engine has that name; the nearest is named."
    ENGINE_MISSING = "engine_missing", "The engine is not installed; the fix is the command."
    ENGINE_BROKEN = "engine_broken", "It is installed and cannot be loaded, or is too old for the request."
    LIBRARY_MISSING = (
        "library_missing",
        "A library that it needs is not here, or was built without what the request needs.",
    )
    DEVICE_MISSING = "device_missing", "The device is not in this machine."
    DEVICE_UNSUPPORTED = "device_unsupported", "The engine has no such device, or no kernels for it."
    FORMAT_UNSUPPORTED = "format_unsupported", "The engine does not read models of that format."
    OP_UNSUPPORTED = "op_unsupported", "An operator, type or construct of the model is not supported."
    PRECISION_UNSUPPORTED = "precision_unsupported", "The precision asked for is not supported."
    CALIBRATION_MISSING = "calibration_missing", "Int8 of a model in floats, without inputs to quantise with."
    CALIBRATION_UNUSED = "calibration_unused", "Inputs to quantise with that nothing would use."
    SHAPE_UNSUPPORTED = "shape_unsupported", "A shape that the engine cannot run, such as one without elements on QNN."
    SHAPES_OPEN = "shapes_open", "Sizes that the engine has to know are not stated."
    TARGET_MISSING = "target_missing", "The chip to compile for is not stated."
    OPTION_INVALID = "option_invalid", "A provider option is unknown or out of range."
    NOT_ENFORCEABLE = "not_enforceable", "Under mode strict, a key that the engine does not enforce."
    COMPILE_UNSUPPORTED = "compile_unsupported", "The engine compiles nothing, or not this."
    ARTIFACT_STALE = "artifact_stale", "The artifact was made for another version, chip, policy or calibration."
    ARTIFACT_FOREIGN = "artifact_foreign", "The artifact was made by another engine or for another kind of device."
