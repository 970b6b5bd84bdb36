# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sampled requests run once more after their answer: the canary and the shadow of a model."""
