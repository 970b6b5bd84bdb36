# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Report builder: from the plan and what was observed to the records of one report."""
