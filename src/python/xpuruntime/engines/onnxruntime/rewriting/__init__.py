# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""xpuruntime kernels inside ONNX Runtime: nodes that a policy asks them for become xpuruntime operators."""
