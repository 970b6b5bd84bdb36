# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Graph edits: the rewrites of one model when it is loaded, and the model that results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model_source import ModelSource
from xpuruntime.engines.onnxruntime.rewriting.graph import Terms, rewrite
from xpuruntime.engines.onnxruntime.rewriting.pattern_match import find_rewrites
from xpuruntime.engines.onnxruntime.rewriting.rules import (
    DOMAIN,
    FoundRewrites,
    Rewrite,
    RuleQuery,
    UnrewrittenNode,
    session_rules,
)
from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx

    from xpuruntime import _core
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.input_binding import ConversionLog
    from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings
    from xpuruntime.engines.onnxruntime.rewriting.loading import Timed
    from xpuruntime.policies import KernelPolicy

__all__ = ["Rewriting", "begin", "left_alone", "terms_of"]


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
