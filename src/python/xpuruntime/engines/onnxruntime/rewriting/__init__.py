# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""xpuruntime kernels inside ONNX Runtime: nodes that a policy asks them for become xpuruntime operators."""

from __future__ import annotations

from xpuruntime.engines.onnxruntime.rewriting.editing import rewrite
from xpuruntime.engines.onnxruntime.rewriting.operands import Terms
from xpuruntime.engines.onnxruntime.rewriting.pattern_match import find_rewrites
from xpuruntime.engines.onnxruntime.rewriting.records import DOMAIN, FoundRewrites, Rewrite, UnrewrittenNode
from xpuruntime.engines.onnxruntime.rewriting.rule_query import RuleQuery

__all__ = ["DOMAIN", "FoundRewrites", "Rewrite", "RuleQuery", "Terms", "UnrewrittenNode", "find_rewrites", "rewrite"]
