# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Metadata of a model file: the kernels it asks for, and where and with what it was exported."""
