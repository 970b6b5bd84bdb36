# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sections of a report other than its units: memory over time, CUDA graphs, shapes and determinism."""
