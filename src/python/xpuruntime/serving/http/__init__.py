# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""HTTP transport of the inference server: an ASGI application without a framework, and its connections."""
