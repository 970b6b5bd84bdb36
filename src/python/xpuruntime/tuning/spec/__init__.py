# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tuning specification: the content of a ``tune.yaml``, its parts, their kinds of value, and its JSON Schema."""

from xpuruntime.tuning.spec.parts import (
    Budget,
    Constraints,
    Decide,
    KernelChoices,
    Objective,
    RayPlacement,
    SearchSpace,
)
from xpuruntime.tuning.spec.tune_spec import TuneSpec

__all__ = [
    "Budget",
    "Constraints",
    "Decide",
    "KernelChoices",
    "Objective",
    "RayPlacement",
    "SearchSpace",
    "TuneSpec",
]
