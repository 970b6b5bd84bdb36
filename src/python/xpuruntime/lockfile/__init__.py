# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Lock files: their records, their canonical form on disk, and the validators that their entries depend on."""
