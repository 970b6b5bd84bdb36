# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Judgement of int8: whether a request can be met with this model and its calibration, and what it is tied to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.base import Refusal
from xpuruntime.evidence.records import VerdictCode

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.policies import Policy

#: Precisions whose sessions are probed, which a calibration gives the input for.
CONVERTED = ("fp16", "bf16")
_PASS = (
    "pass calibration= (on the command line: --calibration PATH), an .npz file, a folder, or an iterable of inputs "
    "like those the model will get, some tens to some hundreds; or load a model that is quantized already"
)


def quantizes(request: Request) -> bool:
    """Whether the model of a request is to be quantized here: int8 asked, float given, and no artifact made of it."""
    return (
        request.policy.execution.precision == "int8"
        and request.model.quantization.scheme == "none"
        and request.artifact is None
    )


def uses_calibration(policy: Policy, model: ModelInfo) -> bool:
    """Whether a session of a model quantizes with calibration inputs, or is probed with the first of them."""
    precision = policy.execution.precision
    if precision in CONVERTED or policy.accuracy is not None:
        return True
    return precision == "int8" and model.quantization.scheme == "none"


def refuse_int8(request: Request) -> Refusal | None:
    """Return why int8 cannot go on, or ``None`` where it can.

    Every engine that has int8 calls it from `judge`. Pure.

    * int8 is asked for, the model is in floats and there is no calibration: ``calibration_missing``.
    * There is a calibration, and nothing to use it for: nothing is converted and no accuracy is stated, or the model is
      quantized already: ``calibration_unused``. Nothing that was given is ignored: where nothing is quantized, the
      first input is that of the accuracy probe.
    """
    precision = request.policy.execution.precision
    scheme = request.model.quantization.scheme
    if request.calibration is None:
        if quantizes(request):
            return Refusal(
                VerdictCode.CALIBRATION_MISSING,
                "precision int8 was asked for, and the model computes in floating point",
                _PASS,
            )
        return None
    if request.artifact is not None:  # the artifact is tied to the calibration by its digest
        return None
    if request.purpose == "search" or uses_calibration(request.policy, request.model):
        return None
    if precision != "int8":
        return Refusal(
            VerdictCode.CALIBRATION_UNUSED,
            f"a calibration was given, and precision is {precision}: nothing is quantized or probed",
            "state precision int8, fp16 or bf16, or an accuracy, or leave calibration= out",
        )
    return Refusal(
        VerdictCode.CALIBRATION_UNUSED,
        f"a calibration was given, and the model is quantized already ({scheme})",
        "leave calibration= out, or give the float model",
    )


def calibration_digest(request: Request) -> str | None:
    """Return a digest of the inputs that a request quantizes with, or ``None`` where it has none."""
    if request.calibration is None or request.policy.execution.precision != "int8":  # else it is for the probe alone
        return None
    return str(request.calibration.digest)
