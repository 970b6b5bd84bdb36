# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Observation of ONNX Runtime: instrumented runs, and the attribution of what ran to the nodes of the source graph."""
