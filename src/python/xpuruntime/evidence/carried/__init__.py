# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a model file carries of its own: the kernels it asks for, and where and with what it was exported."""
