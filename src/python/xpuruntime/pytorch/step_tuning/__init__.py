# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tuning of training steps: eager, compiled and captured variants raced, with their losses checked."""

from xpuruntime.pytorch.step_tuning.result import StepCandidate, TunedStep
from xpuruntime.pytorch.step_tuning.tune import tune

__all__ = ["StepCandidate", "TunedStep", "tune"]
