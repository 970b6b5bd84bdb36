# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which kernel ran, who asked for it, how often, and how long: of code of PyTorch's, while it runs."""
