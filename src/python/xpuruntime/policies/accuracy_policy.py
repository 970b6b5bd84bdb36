# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`AccuracyPolicy`: how close the results must be to a reference."""

from __future__ import annotations

import math
import re
from typing import ClassVar

from xpuruntime.policies.device_spec import check_device
from xpuruntime.policies.kinds import Kind, Number, Text
from xpuruntime.policies.provider_options import check_engine
from xpuruntime.policies.refusal import Refused, did_you_mean, quote
from xpuruntime.policies.value import PolicyValue

__all__ = ["AccuracyPolicy"]

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "model")
_PATTERN = rf"^[A-Za-z][A-Za-z0-9_-]*\.[a-z]+(:[0-9]+)?\.({'|'.join(_PRECISIONS)})$"


def _check_reference(text: str) -> str:
    parts = text.split(".")
    if len(parts) != 3:
        raise Refused(
            f"{quote(text)} is not a reference; expected 'engine.device.precision', such as 'onnxruntime.cpu.fp32'"
        )
    engine, device, precision = parts
    check_engine(engine)
    check_device(device)
    if precision not in _PRECISIONS:
        raise Refused(f"{quote(precision)} is not a precision{did_you_mean(precision, _PRECISIONS, 'precisions')}")
    if re.fullmatch("auto(:.*)?", device):
        raise Refused(f"{quote(text)} is not a reference: its device must be a certain one, not 'auto'")
    return text


class AccuracyPolicy(PolicyValue, frozen=True, kw_only=True):
    """How close results must be to a reference. At least one limit is stated; the others are those of the precision.

    Attributes
    ----------
    reference : str
        ``"engine.device.precision"``: who computes the reference.
    rtol, atol : float or None
        Each output ``y`` must meet ``max(abs(y - r)) <= atol + rtol * max(abs(r))``.
    cosine : float or None
        Least cosine similarity of each output, from 0 to 1.
    """

    KINDS: ClassVar[dict[str, Kind]] = {
        "reference": Text(
            "Who computes the reference: engine.device.precision.",
            what="a reference such as 'onnxruntime.cpu.fp32'",
            parse=_check_reference,
            pattern=_PATTERN,
        ),
        "rtol": Number(0.0, math.inf, "Largest relative error.", optional=True),
        "atol": Number(0.0, math.inf, "Largest absolute error.", optional=True),
        "cosine": Number(0.0, 1.0, "Least cosine similarity of each output.", optional=True),
    }

    reference: str = "onnxruntime.cpu.fp32"
    rtol: float | None = None
    atol: float | None = None
    cosine: float | None = None

    def check_together(self) -> None:
        """Refuse a policy that would accept any result."""
        if self.rtol is None and self.atol is None and self.cosine is None:
            raise Refused("states no limit; state 'rtol', 'atol' or 'cosine'")
