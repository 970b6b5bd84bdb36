# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Deprecated name of `xpuruntime.engines.input_binding`, for plug-ins written before 0.2."""

import warnings

from xpuruntime.engines import input_binding
from xpuruntime.engines.input_binding import *  # noqa: F403

FeedCheck = input_binding.InputValidator
room = input_binding.empty_host_array

warnings.warn(
    "xpuruntime.engines.feeds is now xpuruntime.engines.input_binding, and will be removed in 0.3",
    DeprecationWarning,
    stacklevel=2,
)
