# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Install commands for a missing extra, from a checkout or from an index."""

from __future__ import annotations

import functools
import json

__all__ = ["install_command", "reinstall_command"]

_PACKAGE = "xpuruntime"


@functools.cache
def install_command(extra: str) -> str:
    """Return the command that installs what an extra of this package requires on this platform.

    The packages are named themselves, because this package may have been installed from a checkout.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        stated = metadata.requires(_PACKAGE) or ()
    except metadata.PackageNotFoundError:
        stated = ()
    found = [
        f'"{one.name}{one.specifier}"'
        for one in map(Requirement, stated)
        if one.marker is not None and one.marker.evaluate({"extra": extra}) and not one.marker.evaluate({"extra": ""})
    ]
    named = f"{_PACKAGE}[{extra}]"
    return f"pip install {' '.join(found)} (the extra {named})" if found else f'pip install "{named}"'


def reinstall_command(options: str = "") -> str:
    """Return the command that builds and installs this package again, from where it came from."""
    from importlib import metadata

    try:
        text = metadata.distribution(_PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    came = json.loads(text) if text else {}
    url = str(came.get("url", ""))
    if not url:
        return f"python -m pip install --force-reinstall --no-deps {options}{_PACKAGE}"
    editable = "--editable " if came.get("dir_info", {}).get("editable") else ""
    return f"python -m pip install --force-reinstall --no-deps {editable}{url.removeprefix('file://')}"
