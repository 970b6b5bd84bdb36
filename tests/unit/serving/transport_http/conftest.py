# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fixtures of large bodies: a service of its own for a test, and the receivers that were made."""

from __future__ import annotations

import pytest
from served_models import Service

from xpuruntime.serving.http.bodies import BodyReceiver


@pytest.fixture
def own():
    service = Service()
    yield service
    service.close()


@pytest.fixture
def receivers(monkeypatch):
    """Return the receivers that are made: these tests are of them."""
    result: list[BodyReceiver] = []
    begin = BodyReceiver.__init__

    def init(self, *args, **more):
        result.append(self)
        begin(self, *args, **more)

    monkeypatch.setattr(BodyReceiver, "__init__", init)
    return result
