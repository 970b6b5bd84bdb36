# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpenVinoSettings`: what the plan decided, in OpenVINO's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from xpuruntime.engines.base import EngineSettings

__all__ = ["OpenVinoSettings"]


class OpenVinoSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` hands to OpenVINO."""

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
