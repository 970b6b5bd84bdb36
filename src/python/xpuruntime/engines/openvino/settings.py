# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpenVinoSettings`: what the plan decided, in OpenVINO's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from xpuruntime.engines.settings import EngineSettings

__all__ = ["OpenVinoSettings"]


class OpenVinoSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` hands to OpenVINO.

    Attributes
    ----------
    device : str
        OpenVINO's name: ``"CPU"``, ``"GPU.0"``, ``"NPU"``.
    hint : str
        ``INFERENCE_PRECISION_HINT``, always stated: ``"f32"``, ``"f16"``, ``"bf16"``, or ``"dynamic"``, which is each
        operation in the type that the model gives it.
    properties : dict of str to str
        The other properties.
    precision : str
        What the policy asks, for the evidence.
    quantise : bool
        Whether the graph is quantised before it is compiled.
    style : str
        The style in which it is quantised.
    keep_fp32 : tuple of str
        Node globs that are not quantised.
    ranges : tuple of str
        Inputs with a dimension that the policy limits.
    strict : bool
    """

    device: str
    hint: str
    properties: Mapping[str, str] = {}
    precision: str = "model"
    quantise: bool = False
    style: Literal["openvino", "openvino-nncf"] = "openvino"
    keep_fp32: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    strict: bool = False

    def with_properties(self, properties: Mapping[str, str]) -> OpenVinoSettings:
        """Return the same settings with these properties, which replace others of the same names."""
        return self.replace(properties={**self.properties, **properties})
