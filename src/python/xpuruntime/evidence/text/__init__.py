# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reports and what differs between two in words, figures and tables, as a terminal shows them; pages share the rows."""
