# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Probe of QNN: the wheel and its libraries, looked at and not loaded."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import installed

_WHEEL = "onnxruntime-qnn"
#: The first wheel that is a plugin, and the ONNX Runtime that it needs.
_OLDEST, _NEEDS = (2, 0), (1, 24, 2)
_PLUGIN, _BACKENDS = "onnxruntime_providers_qnn", ("QnnHtp", "QnnSystem")


def _wide() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def missing(name: str) -> EngineFacts:
    """Return the facts of a machine without the wheel, with the command that installs it."""
    fix = f"`pip install {_WHEEL}` (the extra xpuruntime[qnn])"
    if _wide():
        fix = f"`pip install --no-deps {_WHEEL}` (xpuruntime[qnn] installs it on ARM only: it brings onnxruntime along)"
    return EngineFacts(name=name, reason=f"the wheel {_WHEEL} is not installed", fix=fix)


def probe(name: str) -> EngineFacts:
    """Say what is installed and whether its libraries are whole. Never raises."""
    version = installed(_WHEEL).get(_WHEEL)
    if version is None:
        return missing(name)
    again = f"pip install --force-reinstall --no-deps {_WHEEL}"

    def broken(reason: str, fix: str) -> EngineFacts:
        return EngineFacts(name=name, version=version, reason=reason, fix=fix)

    spec = importlib.util.find_spec("onnxruntime_qnn")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None:
        return broken(f"{_WHEEL} is recorded as installed, but its files are gone", again)
    if _release(version) < _OLDEST:
        return broken(
            f"{_WHEEL} {version} is no plugin for ONNX Runtime: that begins with version 2", f"{again} --upgrade"
        )
    if importlib.util.find_spec("onnxruntime") is None:
        return broken("the QNN provider is a plugin of ONNX Runtime, which is not installed", "xrt doctor")
    for host, host_version in installed("onnxruntime-gpu", "onnxruntime").items():
        if _release(host_version) < _NEEDS:
            needs = ".".join(map(str, _NEEDS))
            return broken(
                f"{_WHEEL} {version} is a plugin for ONNX Runtime {needs} or later, and {host} "
                f"{host_version} is installed",
                f'pip install --upgrade "{host}>={needs}"',
            )
    for problem in _problems(folder):
        return broken(problem, again)
    detail = {"wheel": f"{_WHEEL} {version}", "runs_on": "simulator" if _wide() else "device"}
    sdk = _sdk(folder)
    if sdk:
        detail["sdk"] = sdk
    backends = [path.stem.removeprefix("lib") for path in sorted(folder.iterdir()) if path.suffix in (".so", ".dll")]
    detail["libraries"] = ", ".join(backends)
    return EngineFacts(name=name, version=version, loadable=True, providers=("QNNExecutionProvider",), detail=detail)


def _problems(folder: Path) -> Iterator[str]:
    from xpuruntime.errors import InputError
    from xpuruntime.runtime.libraries.search import read_elf

    for stem in (_PLUGIN, *_BACKENDS):
        file = folder / (f"{stem}.dll" if sys.platform == "win32" else f"lib{stem}.so")
        if not file.is_file():
            yield f"{file.name} is not in {folder}"
        elif sys.platform != "win32":
            try:
                read_elf(file)
            except InputError as error:
                yield str(error)


def _sdk(folder: Path) -> str | None:
    try:
        text = (folder / "build_and_package_info.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "qnn_version":
            return value.strip().strip("'\"")
    return None


def _release(version: str) -> tuple[int, ...]:
    head = version.split("+")[0].split(".")
    return tuple(int(part) for part in head if part.isdigit())
