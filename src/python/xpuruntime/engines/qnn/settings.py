# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`QnnSettings`: what the plan decided, in QNN's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from xpuruntime.engines.base import EngineSettings
from xpuruntime.engines.qnn.targets import Target

__all__ = ["QnnSettings"]


class QnnSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` hands to the provider."""

    target: Target
    options: Mapping[str, str] = {}
    convert: Literal["fp16"] | None = None
    quantise: bool = False
    style: str = "qnn"
    keep_fp32: tuple[str, ...] = ()
    allow_cpu_ops: tuple[str, ...] = ()
    computes: Literal["fp16"] | None = None
    simulated: bool = False
    strict: bool = False

    def with_options(self, options: Mapping[str, str]) -> QnnSettings:
        """Return the same settings with these provider options, which replace others of the same names."""
        return self.replace(options={**self.options, **options})

    @property
    def uncompilable(self) -> str | None:
        """Why a model under these settings is not compiled ahead of time."""
        if not self.allow_cpu_ops:
            return None
        # ONNX Runtime would optimize its own nodes again at every load, and the map that is kept would not be theirs.
        return "a model is compiled as a whole, and execution.allow_cpu_ops leaves parts of it to the CPU"

    def provider_options(self) -> dict[str, str]:
        """Return all options of the provider, the chip's among them."""
        chip = {"soc_model": str(self.target.soc_model), "htp_arch": str(self.target.htp_arch)}
        return {"backend_type": "htp", **self.options, **chip}
