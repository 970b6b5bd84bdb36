# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Layer parity: a module compared with the session that serves it, layer by layer."""
