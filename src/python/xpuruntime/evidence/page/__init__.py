# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reports and comparisons as HTML: pages that need nothing but a browser, and a fragment for notebooks."""

from __future__ import annotations

from xpuruntime.evidence.page.changes import render_changes
from xpuruntime.evidence.page.comparison import render_comparison
from xpuruntime.evidence.page.document import render_page
from xpuruntime.evidence.page.fragment import render_fragment
from xpuruntime.evidence.page.serving import render_serving

__all__ = ["render_changes", "render_comparison", "render_fragment", "render_page", "render_serving"]
