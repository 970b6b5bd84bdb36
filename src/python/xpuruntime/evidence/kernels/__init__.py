# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is told of kernels: what their names say, how often each ran, and which of ours were considered for a call."""
