# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Probe of TensorRT and TensorRT-RTX: the installation, and whether it loads."""

from __future__ import annotations

import importlib
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.tensorrt.products import probe_api
from xpuruntime.errors import EngineError, EngineUnavailable
from xpuruntime.runtime.machine import EngineFacts

if TYPE_CHECKING:
    from xpuruntime.engines.tensorrt.products import Flavour

__all__ = ["OLDEST", "bindings", "probe"]

#: The oldest release that has everything this adapter calls: tensors by name, `execute_async_v3`, strong typing.
OLDEST = {"tensorrt": 10, "tensorrt-rtx": 1}


def bindings(flavour: Flavour) -> Any:
    """Return the vendor's module.

    Raises
    ------
    EngineError
        It is not installed, or does not import.
    """
    try:
        return importlib.import_module(flavour.module)
    except Exception as error:  # an import of a vendor package can fail in any way
        msg = f"{flavour.title} does not import: {error}. {flavour.install}"
        raise EngineUnavailable(msg, engine=flavour.name) from error


def probe(flavour: Flavour) -> EngineFacts:
    """Import the bindings, if they are installed, and note what they offer. Touches no device and never raises."""
    wheel = next((name for name in flavour.distributions if _version(name)), None)
    try:
        present = util.find_spec(flavour.module) is not None
    except (ImportError, ValueError):
        present = False
    if not present:
        return EngineFacts(name=flavour.name, reason=f"{flavour.title} is not installed", fix=flavour.install)
    version = _version(wheel) if wheel else None
    try:
        trt = bindings(flavour)
        version = str(trt.__version__)
    except (EngineError, AttributeError) as error:
        return EngineFacts(
            name=flavour.name,
            version=version or "unknown",
            reason=f"the package {flavour.module} is there but does not load: {error.__cause__ or error}",
            fix=f"pip install --force-reinstall {wheel or flavour.distributions[0]}",
        )
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < OLDEST[flavour.name]:
        return EngineFacts(
            name=flavour.name,
            version=version,
            reason=f"{flavour.title} {version} is too old: {OLDEST[flavour.name]}.0 or newer is needed",
            fix=f"pip install --upgrade {wheel or flavour.distributions[0]}",
        )
    return EngineFacts(
        name=flavour.name,
        version=version,
        loadable=True,
        providers=("cuda",),
        detail={**({"wheel": wheel} if wheel else {}), **probe_api(trt, flavour)},
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
