# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Bisection of package versions: finds the version that changed a claim about a model."""
