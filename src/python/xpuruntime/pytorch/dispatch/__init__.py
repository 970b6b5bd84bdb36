# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Dispatch of PyTorch's operators under a policy: context, routes, overrides."""
