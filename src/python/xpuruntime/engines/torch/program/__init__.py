# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Programs of PyTorch: ``.pt2`` files, checked before PyTorch unpacks them, and modules, as a `ModelInfo`."""
