# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The gRPC side of a server: generic handlers, bytes in and bytes out."""
