# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Deprecated name of `xpuruntime.evidence.checkpoints`, for plug-ins written before 0.2."""

import warnings

from xpuruntime.evidence import checkpoints
from xpuruntime.evidence.checkpoints import *  # noqa: F403

moment = checkpoints.checkpoint

warnings.warn(
    "xpuruntime.evidence.moments is now xpuruntime.evidence.checkpoints, and will be removed in 0.3",
    DeprecationWarning,
    stacklevel=2,
)
