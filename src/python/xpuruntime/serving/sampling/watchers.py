# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`make_watchers`: the canary and the shadow that the settings of a model ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.artifacts.reading import find_artifact
from xpuruntime.errors import PolicyError
from xpuruntime.inference.session import InferenceSession
from xpuruntime.policies import Policy
from xpuruntime.serving.sampling.canary import Canary
from xpuruntime.serving.sampling.shadow import Shadow

if TYPE_CHECKING:
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.models.model_settings import ModelSettings
    from xpuruntime.serving.sampling.watcher import Watcher

__all__ = ["make_watchers"]


def make_watchers(
    path: str,
    settings: ModelSettings,
    session: InferenceSession,
    layout: Layout,
    registry: EngineRegistry | None,
) -> list[Watcher]:
    """Return the canary and the shadow that the settings ask for.

    Raises
    ------
    PolicyError
        The reference of an artifact is asked for: it has no model file to run.
    XpuRuntimeError
        The other session does not open.
    """
    made: list[Watcher] = []
    try:
        if settings.canary is not None:
            reference = None
            if settings.canary.against == "reference":
                reference = _reference(path, settings)
            made.append(Canary(session, layout, settings, settings.canary, reference))
        if settings.shadow is not None:
            other = InferenceSession(
                path, policy=Policy.load(settings.shadow.policy), trust=settings.trust, registry=registry
            )
            made.append(Shadow(session, layout, settings, settings.shadow, other))
    except BaseException:
        for one in made:
            one.close()
        raise
    return made


def _reference(path: str, settings: ModelSettings) -> InferenceSession:
    if not path or find_artifact(path) is not None:
        raise PolicyError(
            "canary.against: 'reference' runs the model file on the CPU, and there is none to run. Fix: state "
            "against: self, or serve the model file"
        )
    engine = "torch" if path.endswith(".pt2") else "onnxruntime"
    return InferenceSession(path, policy=Policy(), engine=engine, device="cpu", trust=settings.trust)
