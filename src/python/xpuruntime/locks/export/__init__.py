# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Export of locks to native engine configuration, with proof that it runs the same."""
