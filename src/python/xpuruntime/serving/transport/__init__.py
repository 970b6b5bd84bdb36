# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Transport: options, admission and gRPC handlers, shared by all ways in."""
