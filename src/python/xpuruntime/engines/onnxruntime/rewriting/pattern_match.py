# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pattern matching: which nodes of a graph become xpuruntime operators under a policy, and which cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.model.graph import normal_domain
from xpuruntime.engines.onnxruntime.rewriting.attention import find_attention
from xpuruntime.engines.onnxruntime.rewriting.graph import Scope, scopes
from xpuruntime.engines.onnxruntime.rewriting.norm import find_norm
from xpuruntime.engines.onnxruntime.rewriting.products import find_conv, find_matmul
from xpuruntime.engines.onnxruntime.rewriting.rules import (
    Form,
    FoundRewrites,
    KernelRequest,
    Rewrite,
    RewriteCandidate,
    UnrewrittenNode,
    kernels_of,
)
from xpuruntime.evidence.metadata import OP_OF_NODE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx

    from xpuruntime.engines.onnxruntime.rewriting.graph import Terms
    from xpuruntime.engines.onnxruntime.rewriting.rules import RuleQuery

__all__ = ["find_rewrites"]

#: Tried for sizes that are not known: a kernel that can serve one of them is worth a rewrite.
_STAND_INS = (16, 1, 256)


def find_rewrites(
    model: onnx.ModelProto,
    asking: RuleQuery,
    terms: Terms,
    capability: tuple[int, int] | None = None,
    *,
    tune: bool = False,
    fp32_as: int = 1,
) -> FoundRewrites:
    """Find the nodes that a policy asks xpuruntime kernels for. Pure: touches no device and opens no library."""
    opset = next((o.version for o in model.opset_import if normal_domain(o.domain) == ""), 1)
    finder = _Finder(asking, terms, capability, opset, tune=tune)
    inside = {(normal_domain(f.domain), f.name): _kinds(f) for f in model.functions}
    for scope in scopes(model, fp32_as):
        finder.search(scope)
        for node in scope.graph.node:
            for kind in inside.get((normal_domain(node.domain), node.op_type), ()):
                reason = "it is inside of a function of the model, whose nodes no key can name; inline it"
                finder.look(scope, RewriteCandidate(node.name, kind, node.op_type, None, {}, refusal=reason))
    return FoundRewrites(tuple(finder.rewrites), tuple(finder.left), tuple(finder.free))


def _kinds(function: onnx.FunctionProto) -> list[str]:
    """Return the operations inside of a function that kernels are chosen for."""
    return sorted({OP_OF_NODE[node.op_type] for node in function.node if node.op_type in OP_OF_NODE})


class _Finder:
    def __init__(
        self, asking: RuleQuery, terms: Terms, capability: tuple[int, int] | None, opset: int, *, tune: bool
    ) -> None:
        self.asking, self.terms, self.capability, self.opset, self.tune = asking, terms, capability, opset, tune
        self.rewrites: list[Rewrite] = []
        self.left: list[UnrewrittenNode] = []
        self.free: list[Rewrite] = []
        self._taken: set[str] = set()
        self._open: list[RewriteCandidate] = []

    def search(self, scope: Scope) -> None:
        """Look at every node of a graph."""
        # Attention and norms first: they are made of what would also be a product alone.
        for node in scope.graph.node:
            self.look(scope, find_attention(scope, node, self.terms, self.opset))
        for node in scope.graph.node:
            self.look(scope, find_norm(scope, node, self.terms))
        for node in scope.graph.node:
            self.look(scope, find_conv(scope, node, self.terms) or find_matmul(scope, node, self.terms))
        # Last: a product that the policy asks a kernel for may be a part of attention whose kernel it leaves open.
        for candidate in self._open:
            self._offer(scope, candidate)
        self._open.clear()

    def look(self, scope: Scope, candidate: RewriteCandidate | None) -> None:
        """Rewrite, leave or offer a node, as the policy says."""
        if candidate is None or candidate.node in self._taken:
            return
        kernel_request = self.asking.requested(candidate)
        if kernel_request is None:
            if self.tune and candidate.forms and self.asking.is_free(candidate):
                self._open.append(candidate)
            return
        reason = candidate.refusal
        for form in candidate.forms:
            if self._taken.intersection(form.nodes):
                reason = reason or "another rewrite stands for a part of it"
                continue
            why = self._why_not(candidate, form, kernel_request)
            if why is None:
                self._taken.update(form.nodes)
                self.rewrites.append(_rewrite(scope, candidate, form, kernel_request))
                return
            reason = why  # the last form folds nothing: what is against it is against the node itself
        if "auto" not in kernel_request.words:
            self.left.append(
                UnrewrittenNode(
                    node=candidate.node,
                    kind=candidate.op,
                    words=kernel_request.words,
                    key=kernel_request.key,
                    keys=kernel_request.keys,
                    reason=reason,
                )
            )

    def _offer(self, scope: Scope, candidate: RewriteCandidate) -> None:
        """List a node whose kernel the policy leaves open, in the form that folds most and some kernel can serve."""
        request = KernelRequest(("auto",), "tuning", ())
        for form in candidate.forms:
            if self._taken.isdisjoint(form.nodes) and self._why_not(candidate, form, request) is None:
                self._taken.update(form.nodes)
                self.free.append(_rewrite(scope, candidate, form, request))
                return

    def _why_not(self, candidate: RewriteCandidate, form: Form, kernel_request: KernelRequest) -> str | None:
        """Return why none of the kernels asked for can serve a form, whatever the sizes; ``None`` where one can."""
        wanted = {id_ for word in kernel_request.words for id_ in kernels_of(candidate.op, word)}
        reasons: dict[str, str] = {}
        for stand_in in _STAND_INS:
            for id_, ok, reason in self._supports(form, stand_in):
                if id_ not in wanted and kernel_request.words != ("auto",):
                    continue
                if ok and (id_ in wanted or id_ not in ("null.null", "cpu.reference")):
                    return None
                reasons.setdefault(id_, reason)
        if not reasons:
            return f"no kernel is called {', '.join(kernel_request.words)}"
        return "; ".join(f"{id_}: {reason}" for id_, reason in list(reasons.items())[:3])

    def _supports(self, form: Form, stand_in: int) -> Iterator[tuple[str, bool, str]]:
        from xpuruntime import _core

        described = form.describe(stand_in)
        yield from _core.KernelRegistry.instance().supports(described, compute_capability=self.capability)


def _rewrite(scope: Scope, candidate: RewriteCandidate, form: Form, kernel_request: KernelRequest) -> Rewrite:
    return Rewrite(
        node=candidate.node,
        graph=scope.path,
        kind=candidate.op,
        op=form.op,
        inputs=form.inputs,
        output=form.output,
        attributes=form.attributes,
        nodes=form.nodes,
        before=form.before,
        words=kernel_request.words,
        key=kernel_request.key,
        keys=kernel_request.keys,
        rest=kernel_request.rest,
    )
