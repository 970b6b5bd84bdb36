# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Evidence of kernels: what their names say, how often each ran, and which were considered for a call."""
