# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reports and comparisons as HTML: pages that need nothing but a browser, and a fragment for notebooks."""

from __future__ import annotations

from xpuruntime.evidence.page.document import render_changes, render_comparison, render_serving
from xpuruntime.evidence.page.report import render_fragment, render_page

__all__ = ["render_changes", "render_comparison", "render_fragment", "render_page", "render_serving"]
