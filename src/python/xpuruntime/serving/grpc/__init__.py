# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""gRPC transport of the inference server: generic handlers that take and return bytes."""
