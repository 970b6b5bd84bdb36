# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`profile`: PyTorch's profiler with what a policy decided in the same trace."""
