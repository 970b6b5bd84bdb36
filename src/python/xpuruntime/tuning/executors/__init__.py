# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Executors: where candidates are opened and measured, in this process, in worker processes or on Ray nodes."""
