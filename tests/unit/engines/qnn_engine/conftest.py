# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The chip of the process that runs the tests: the one of most tests, whichever of them runs first in a worker."""

from __future__ import annotations

from qnn_models import SOC

from xpuruntime.engines.qnn.opening import claim
from xpuruntime.engines.qnn.options import resolve_target

_target = resolve_target({"soc": SOC})
assert _target is not None
claim(_target)
