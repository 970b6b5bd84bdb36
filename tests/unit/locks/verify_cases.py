# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Verifications of the demo's model, with an engine that has a fault planted."""

from __future__ import annotations

from planted_engine import PlantedEngine

import xpuruntime as xrt

CPU = {"execution": {"engine": "onnxruntime", "device": "cpu"}}


def planted(digits, around, *, only, verify=None, opening=lambda: None, **more):
    engine = PlantedEngine(around, opening)
    policy = {"execution": {"engine": "planted", "device": "cpu"}, **({"verify": verify} if verify is not None else {})}
    return xrt.verify(digits, policy, only=only, registry=engine.registry(), **more)


def only_claim(result, id):
    [found] = [claim for claim in result.claims if claim.id == id]
    return found


def plain(run, feeds):
    return run(feeds)
