# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The REST side of a server: an ASGI application without a framework, and its connections."""
