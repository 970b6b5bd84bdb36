# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overrides: kernels of PyTorch's dispatcher, replaced while a policy asks for it."""
