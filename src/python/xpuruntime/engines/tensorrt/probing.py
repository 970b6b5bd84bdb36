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
    from xpuruntime.engines.tensorrt.products import TensorRtProduct

__all__ = ["OLDEST", "bindings", "probe"]

#: The oldest release that has everything this adapter calls: tensors by name, `execute_async_v3`, strong typing.
OLDEST = {"tensorrt": 10, "tensorrt-rtx": 1}


def bindings(product: TensorRtProduct) -> Any:
    """Return the vendor's module."""
    try:
        return importlib.import_module(product.module)
    except Exception as error:  # an import of a vendor package can fail in any way
        msg = f"{product.title} does not import: {error}. {product.install}"
        raise EngineUnavailable(msg, engine=product.name) from error


def probe(product: TensorRtProduct) -> EngineFacts:
    """Import the bindings, if they are installed, and note what they offer. Touches no device and never raises."""
    wheel = next((name for name in product.distributions if _version(name)), None)
    try:
        present = util.find_spec(product.module) is not None
    except (ImportError, ValueError):
        present = False
    if not present:
        return EngineFacts(name=product.name, reason=f"{product.title} is not installed", fix=product.install)
    version = _version(wheel) if wheel else None
    try:
        trt = bindings(product)
        version = str(trt.__version__)
    except (EngineError, AttributeError) as error:
        return EngineFacts(
            name=product.name,
            version=version or "unknown",
            reason=f"the package {product.module} is there but does not load: {error.__cause__ or error}",
            fix=f"pip install --force-reinstall {wheel or product.distributions[0]}",
        )
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < OLDEST[product.name]:
        return EngineFacts(
            name=product.name,
            version=version,
            reason=f"{product.title} {version} is too old: {OLDEST[product.name]}.0 or newer is needed",
            fix=f"pip install --upgrade {wheel or product.distributions[0]}",
        )
    return EngineFacts(
        name=product.name,
        version=version,
        loadable=True,
        providers=("cuda",),
        detail={**({"wheel": wheel} if wheel else {}), **probe_api(trt, product)},
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
