# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`parity`: a module held against the session that serves it, layer by layer."""
