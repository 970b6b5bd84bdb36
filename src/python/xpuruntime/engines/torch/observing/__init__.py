# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Instrumented pass of a PyTorch program: its operators as units, and the kernels that served them."""
