# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Doing it: `InferenceSession` plans, loads, runs and explains."""

from __future__ import annotations

from xpuruntime.inference.session import InferenceSession, plan

__all__ = ["InferenceSession", "plan"]
