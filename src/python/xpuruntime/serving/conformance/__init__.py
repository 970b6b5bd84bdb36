# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conformance of any server of the Open Inference Protocol, as a client sees it."""
