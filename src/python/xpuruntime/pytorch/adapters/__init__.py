# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Adapters: classes and functions of models that compute an operation by others, led to its kernels under a policy."""
