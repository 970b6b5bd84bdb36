# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Deprecated name of `xpuruntime.engines.control_builder`, for plug-ins written before 0.2."""

import warnings

from xpuruntime.engines import control_builder
from xpuruntime.engines.control_builder import *  # noqa: F403

Book = control_builder.ControlBuilder

warnings.warn(
    "xpuruntime.engines.book is now xpuruntime.engines.control_builder, and will be removed in 0.3",
    DeprecationWarning,
    stacklevel=2,
)
