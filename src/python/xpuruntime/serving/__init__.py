# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inference server of the Open Inference Protocol, for planned, locked and verified sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.lazy_names import lazy as _lazy

if TYPE_CHECKING:
    from xpuruntime.serving.http.application import asgi_app
    from xpuruntime.serving.messages import ServingError, Status
    from xpuruntime.serving.models.service import Models
    from xpuruntime.serving.models.settings import ServeSettings
    from xpuruntime.serving.server import Server
    from xpuruntime.serving.transport.gate import Access
    from xpuruntime.serving.transport.options import Tls, TransportOptions

__all__ = [
    "Access", "Models", "ServeSettings", "Server", "ServingError", "Status", "Tls", "TransportOptions", "asgi_app",
]  # fmt: skip

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "Access": "transport.gate",
    "Models": "models.service",
    "ServeSettings": "models.settings",
    "Server": "server",
    "ServingError": "messages",
    "Status": "messages",
    "Tls": "transport.options",
    "TransportOptions": "transport.options",
    "asgi_app": "http.application",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _LAZY)
