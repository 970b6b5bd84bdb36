# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A report as HTML: one page that needs nothing but a browser, and a fragment for notebooks."""

from __future__ import annotations

from xpuruntime.evidence.page.document import render_page
from xpuruntime.evidence.page.fragment import render_fragment

__all__ = ["render_fragment", "render_page"]
