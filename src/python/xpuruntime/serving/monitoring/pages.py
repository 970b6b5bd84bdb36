# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pages beside the protocol: metrics for Prometheus, and the state of a server for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from xpuruntime.serving.models.service import Models

if TYPE_CHECKING:
    from xpuruntime.serving.messages import ModelService

__all__ = ["Pages", "pages_of"]

#: Path to a function of the header ``Accept``, which returns the body and its content type.
Pages: TypeAlias = Mapping[str, Callable[[str], tuple[bytes, str]]]


def pages_of(service: ModelService) -> Pages:
    """Return the pages of the models of this package, and none of another service."""
    if not isinstance(service, Models):
        return {}
    models = service

    def metrics(accept: str) -> tuple[bytes, str]:
        from xpuruntime.serving.monitoring.metrics import exposition

        return exposition(models, accept)

    def status(accept: str) -> tuple[bytes, str]:
        from xpuruntime.serving.monitoring.status_page import status_page

        del accept
        return status_page(models).encode(), "text/html; charset=utf-8"

    return {models.settings.metrics.path: metrics, "/status": status}
