# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compiled artifacts: a model compiled once for one engine and one target, in a folder that sessions start from."""
