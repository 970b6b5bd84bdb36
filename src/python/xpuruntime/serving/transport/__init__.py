# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What HTTP and gRPC share: addresses, TLS, access, bounds, draining, failures, and waiting for a response."""
