# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Targets of a compiled engine, and whether one fits the GPU that is here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.refusal import Refusal
from xpuruntime.engines.tensorrt.refusals import capability_of
from xpuruntime.evidence.verdict_codes import VerdictCode

if TYPE_CHECKING:
    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.tensorrt.products import TensorRtProduct
    from xpuruntime.engines.tensorrt.settings import TensorRtSettings
    from xpuruntime.runtime.machine import Machine

__all__ = ["describe_target", "refuse_artifact"]

_AMPERE_PLUS = "8.0 and newer"


def describe_target(
    request: Request, settings: TensorRtSettings, machine: Machine, product: TensorRtProduct
) -> dict[str, str]:
    """Return what an engine made from `settings` is tied to.

    Of an engine for several compute capabilities, the entry names all of them, also when it is loaded on one of them.
    """
    chip = capability_of(request, machine)
    facts = machine.engines[product.name]
    if settings.targets:
        chips = " ".join(settings.targets)
    elif settings.options.get("hardware_compatibility") == "ampere_plus" and _is_ampere(chip):
        chips = _AMPERE_PLUS
    else:
        chips = chip or "unknown"
    windows = settings.options.get("runtime_platform") == "windows_amd64"
    precision = "int8" if settings.quantise else settings.convert or "as in the model"
    return {
        "flavour": product.name,
        "version": facts.version or "unknown",
        "compute_capability": chips,
        "platform": "Windows AMD64" if windows else f"{machine.system} {machine.architecture}",
        "precision": precision,
        "tf32": str(int(settings.tf32)),
    }


def refuse_artifact(request: Request, machine: Machine, artifact: Artifact, product: TensorRtProduct) -> Refusal | None:
    """Refuse an artifact of another product, or one that has no code for the GPU asked for."""
    target = artifact.manifest.target
    made_by = target.get("flavour", artifact.manifest.engine)
    if made_by != product.name:
        reason = f"the artifact is an engine of {made_by}, which {product.title} does not read"
        return Refusal(VerdictCode.ARTIFACT_FOREIGN, reason, f"load it with engine {made_by}, or compile it again")
    chip = capability_of(request, machine)
    chips = target.get("compute_capability", "")
    fits = chip in chips.split() or (chips == _AMPERE_PLUS and _is_ampere(chip))
    if chip is None or fits:
        return None
    return Refusal(
        VerdictCode.ARTIFACT_FOREIGN,
        f"the artifact was built for compute capability {', '.join(chips.split()) if product.jit else chips}, and "
        f"{request.device} is {chip}",
        "load it on such a GPU, or compile it again for this one",
    )


def _is_ampere(chip: str | None) -> bool:
    return chip is not None and int(chip.partition(".")[0]) >= 8
