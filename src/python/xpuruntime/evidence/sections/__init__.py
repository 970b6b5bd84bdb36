# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sections of a report beside its units: memory over time, CUDA graphs, and the shapes of which it speaks."""
