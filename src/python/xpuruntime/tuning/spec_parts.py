# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Deprecated name of `xpuruntime.tuning.spec`, for scripts written before 0.2."""

import warnings

from xpuruntime.tuning.spec import *  # noqa: F403

warnings.warn(
    "xpuruntime.tuning.spec_parts is now xpuruntime.tuning.spec, and will be removed in 0.3",
    DeprecationWarning,
    stacklevel=2,
)
