# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Parts of a graph that match a pattern, and edits that put one node in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.graph import normal_domain
from xpuruntime.engines.model_source import ModelSource
from xpuruntime.engines.onnxruntime.rewriting.attention import find_attention
from xpuruntime.engines.onnxruntime.rewriting.graph import Scope, Terms, rewrite, scopes
from xpuruntime.engines.onnxruntime.rewriting.norm import find_norm
from xpuruntime.engines.onnxruntime.rewriting.products import find_conv, find_matmul
from xpuruntime.engines.onnxruntime.rewriting.rules import (
    DOMAIN,
    Form,
    FoundRewrites,
    KernelRequest,
    Rewrite,
    RewriteCandidate,
    RuleQuery,
    UnrewrittenNode,
    kernels_of,
    session_rules,
)
from xpuruntime.errors import EngineError
from xpuruntime.evidence.metadata import OP_OF_NODE

if TYPE_CHECKING:
    import onnx

    from xpuruntime import _core
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.input_binding import ConversionLog
    from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings
    from xpuruntime.engines.onnxruntime.rewriting.loading import Timed
    from xpuruntime.policies import KernelPolicy

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


class Rewriting:
    """A model with xpuruntime operators in it."""

    def __init__(
        self,
        before: ModelSource,
        model: onnx.ModelProto,
        found_rewrites: FoundRewrites,
        policy: KernelPolicy,
        settings: OnnxRuntimeSettings,
    ) -> None:
        self.before = before
        self.matches = found_rewrites
        self.policy = policy
        self._model: onnx.ModelProto | None = model
        self._settings = settings
        self.rewrites: tuple[Rewrite, ...] = ()
        self.timed: tuple[Timed, ...] = ()
        self.rules: _core.OnnxRuntimeRules
        self.use(found_rewrites.rewrites)

    @property
    def model(self) -> onnx.ModelProto:
        """The model before it was rewritten; read again after `release`."""
        if self._model is None:
            self._model = _read(self.before)
        return self._model

    @property
    def source(self) -> ModelSource:
        """The model as it runs, made anew each time."""
        return self.written(self.rewrites) if self.rewrites else self.before

    def release(self) -> None:
        """Give the memory of the model back; `model` reads it again."""
        self._model = None

    @property
    def folder(self) -> str | None:
        """Where external data of the model lies."""
        path = self.before.model
        return self.before.folder if isinstance(path, bytes) else str(Path(path).parent)

    def use(self, rewrites: Sequence[Rewrite]) -> None:
        """Rewrite these, and no others."""
        self.rewrites = tuple(rewrites)
        self.rules = session_rules(self.policy, [rewrite.node for rewrite in rewrites], strict=self._settings.strict)

    def written(self, rewrites: Sequence[Rewrite], outputs: Sequence[str] = ()) -> ModelSource:
        """Return the model with these rewrites, and with further outputs."""
        edited = rewrite(self.model, rewrites, self.rules.key, deterministic=self._settings.deterministic)
        return self.sourced(edited, outputs)

    def watched(self, log: _core.DecisionLog) -> tuple[ModelSource, _core.OnnxRuntimeRules]:
        """Return the model as it runs, for one session whose decisions are recorded in `log` alone.

        Keep the rules until that session is open.
        """
        nodes = [edit.node for edit in self.rewrites]
        rules = session_rules(self.policy, nodes, strict=self._settings.strict, log=log)
        edited = rewrite(self.model, self.rewrites, rules.key, deterministic=self._settings.deterministic)
        return self.sourced(edited), rules

    def sourced(self, model: onnx.ModelProto, outputs: Sequence[str] = ()) -> ModelSource:
        """Return a form of the model as a source, with further outputs."""
        import onnx

        from xpuruntime import _core

        if outputs:
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            known = {value.name for value in copy.graph.output}
            copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs if name not in known)
            model = copy
        before, folder = self.before, self.folder
        rewritten = any(domain.domain == DOMAIN for domain in model.opset_import)
        library = str(_core.__file__) if rewritten else None
        return ModelSource(
            model.SerializeToString(),
            folder,
            before.label,
            keep=before.keep,
            operators=library,
            converted=before.converted,
            info=before.info,
        )


def terms_of(request: Request, settings: OnnxRuntimeSettings) -> Terms:
    """Return what holds for every xpuruntime operator in a session."""
    cuda = request.device.startswith("cuda")
    return Terms(
        device=request.device,
        # As ONNX Runtime itself: TF32 unless it is switched off.
        allow_tf32=cuda and settings.options.get("use_tf32", "1") != "0",
        deterministic=settings.deterministic,
    )


def begin(request: Request, settings: OnnxRuntimeSettings, source: ModelSource, log: ConversionLog) -> Rewriting:
    """Rewrite the model that is about to be opened, as the plan says."""
    model = _read(source)
    found_rewrites = _find(model, request, settings)
    _hold_plan(settings.rewrites, found_rewrites, request, settings, log)
    return Rewriting(source, model, found_rewrites, request.policy.kernels, settings)


def left_alone(request: Request, settings: OnnxRuntimeSettings, source: ModelSource) -> tuple[UnrewrittenNode, ...]:
    """Return why nodes stay with ONNX Runtime in a session that is not rewritten; reads the model again."""
    if not settings.left or request.artifact is not None:
        return ()
    return _find(_read(source), request, settings).left


def _find(model: onnx.ModelProto, request: Request, settings: OnnxRuntimeSettings) -> FoundRewrites:
    asking = RuleQuery(request.policy.kernels, request.device, settings.arch)
    return find_rewrites(model, asking, terms_of(request, settings), settings.capability, tune=settings.tune)


def _read(source: ModelSource) -> Any:
    import onnx

    if isinstance(source.model, bytes):
        return onnx.ModelProto.FromString(source.model)
    return onnx.load(source.model, load_external_data=False)


def _hold_plan(
    planned: Mapping[str, str],
    found_rewrites: FoundRewrites,
    request: Request,
    settings: OnnxRuntimeSettings,
    log: ConversionLog,
) -> None:
    """Tell what the plan, which was made before a conversion, said otherwise."""
    done = {rewrite.node for rewrite in found_rewrites.rewrites}
    reasons = {unrewritten.node: unrewritten.reason for unrewritten in found_rewrites.left}
    missing = {node: reasons.get(node, "the converted graph writes it in another way") for node in planned}
    missing = {node: reason for node, reason in missing.items() if node not in done}
    if missing and settings.strict:
        node, reason = next(iter(missing.items()))
        msg = (
            f"{request.model.path}: {len(missing)} node(s) that the plan gives xpuruntime kernels cannot be given to "
            f"them as the model is loaded, such as {node!r}: {reason}. mode is strict. "
            "Fix: set mode: prefer, or remove the "
            "kernel keys for them"
        )
        raise EngineError(msg, engine="onnxruntime", device=request.device)
    for node, reason in missing.items():
        log.add(f"{node!r} stays with ONNX Runtime, other than planned", reason)
