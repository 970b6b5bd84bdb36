# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What engines that generate have in common: folders with a configuration, and models with a cache of their own."""
