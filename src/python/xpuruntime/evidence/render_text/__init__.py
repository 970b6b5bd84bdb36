# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Text rendering of reports and their differences for a terminal; HTML pages share the rows."""
