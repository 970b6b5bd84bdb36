# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Transport code shared by HTTP and gRPC: addresses, TLS, access, limits, draining, failures, waiting for responses."""
