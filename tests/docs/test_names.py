# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of the design: each resolves, or does not and has a replacement that does."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import xpuruntime

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "names.md"
HEADERS = ROOT / "src" / "cpp" / "include" / "xpuruntime"
PACKAGES = sorted(xpuruntime._PACKAGES)
TORCH = re.compile(r"xpuruntime\.(pytorch|training)\b")


def rows() -> list[tuple[str, list[str]]]:
    """Return each name with its replacements; none where it is the same."""
    found = re.findall(r"^\| `?([^`|]+?)`? \| ([^|]+) \|[^\n]*\|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [
        (name, [] if here == "the same" else re.findall("`([^`]+)`", here)) for name, here in found if name != "name"
    ]


def resolve(name: str) -> Any:
    """Return what a dotted name is, a parameter of a callable (``f(x=)``), or a header. Raises where there is none."""
    if name.endswith(".h"):
        assert (HEADERS / name).is_file(), name
        return None
    path, _, parameter = name.partition("(")
    parts = path.split(".")
    assert parts[0] == "xpuruntime", name
    value: Any = xpuruntime
    for index, part in enumerate(parts[1:], 2):
        try:
            value = getattr(value, part)
        except AttributeError:
            if part in _set_by_constructor(value):
                return None
            if not inspect.ismodule(value):
                raise
            value = importlib.import_module(".".join(parts[:index]))
    if parameter:
        parameters = inspect.signature(value).parameters if not inspect.isclass(value) else _parameters(value)
        assert parameter.removesuffix("=)") in parameters, name
    return value


def _set_by_constructor(value: Any) -> list[str]:
    if not inspect.isclass(value) or not inspect.isfunction(value.__init__):
        return []
    return re.findall(r"self\.(\w+):? ", inspect.getsource(value.__init__))


def _parameters(kind: type) -> Any:
    try:
        return inspect.signature(kind).parameters
    except ValueError:  # a class of the core
        return re.findall(r"(\w+):", (kind.__new__.__doc__ or "") + (kind.__init__.__doc__ or ""))


def needs_torch(name: str, replacements: list[str]) -> None:
    if any(TORCH.search(one) for one in (name, *replacements)):
        pytest.importorskip("torch", reason="xpuruntime.pytorch requires PyTorch")


def test_the_page_has_rows():
    assert len(rows()) > 120
    assert len({name for name, _ in rows()}) == len(rows())


@pytest.mark.parametrize(("name", "replacements"), rows())
def test_a_name_resolves_or_is_replaced(name: str, replacements: list[str]):
    needs_torch(name, replacements)
    for one in replacements or [name]:
        resolve(one)
    if replacements and name.startswith("xpuruntime."):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            resolve(name)
    elif replacements and name.endswith(".h"):
        assert not (HEADERS / name).exists()


def test_the_korean_page_has_the_same_rows():
    korean = (ROOT / "docs" / "ko" / "names.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", korean, re.M)
    english = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert cells == [(name, "같음" if here == "the same" else here) for name, here in english]


def test_a_replaced_name_says_what_replaced_it():
    for module, replaced in ((xpuruntime, xpuruntime._REPLACED),):
        for name, fix in replaced.items():
            with pytest.raises(AttributeError, match=re.escape(fix)):
                getattr(module, name)


def test_a_replaced_name_of_training_says_what_replaced_it():
    pytest.importorskip("torch", reason="xpuruntime.pytorch requires PyTorch")
    from xpuruntime import pytorch, training

    for module in (pytorch, training):
        for name, fix in pytorch._REPLACED.items():
            with pytest.raises(AttributeError, match=re.escape(fix)):
                getattr(module, name)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_package_is_an_attribute():
    """Every folder with modules that users import."""
    internal = {"artifacts", "cli", "demo", "files", "lockfile", "measuring"}
    folders = {path.parent.name for path in (ROOT / "src" / "python" / "xpuruntime").glob("*/__init__.py")}
    assert folders - internal == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_imported_when_it_is_used(package: str):
    if package in ("pytorch", "training"):
        pytest.importorskip("torch", reason="xpuruntime.pytorch requires PyTorch")
    code = f"import sys, xpuruntime as xrt; before = 'torch' in sys.modules; print(before, xrt.{package}.__name__)"
    assert run_python(code).split() == ["False", f"xpuruntime.{package}"]
    assert package in dir(xpuruntime)


def test_packages_without_torch():
    code = f"""
import sys
sys.modules["torch"] = None
import xpuruntime as xrt
for name in {PACKAGES!r}:
    if name in ("pytorch", "training"):
        assert name not in dir(xrt)
        try:
            getattr(xrt, name)
        except ImportError as error:
            assert "Install with: pip install" in str(error), error
        else:
            raise AssertionError(name)
    else:
        getattr(xrt, name)
import inspect
inspect.getmembers(xrt)
"""
    run_python(code)


def test_names_of_runtime_are_those_of_its_modules():
    from xpuruntime import runtime
    from xpuruntime.runtime import Device

    assert Device is xpuruntime.Device
    for name in runtime.__all__:
        assert inspect.getdoc(getattr(runtime, name)), name
    assert set(runtime.__all__) <= set(dir(runtime))
    with pytest.raises(AttributeError, match="nothing"):
        runtime.nothing  # noqa: B018


def test_preferences_are_frozen():
    policy = xpuruntime.KernelPolicy(matmul="cublasLt")
    changes = (
        lambda held: held.__setitem__("attention", "flash_v2"),
        lambda held: held.__delitem__("matmul"),
        lambda held: held.update(attention="flash_v2"),
        lambda held: held.pop("matmul"),
        lambda held: held.clear(),
        lambda held: held.setdefault("conv", "cudnn"),
    )
    for change in changes:
        with pytest.raises(TypeError, match=r"policy\.set\(op, kernel\)"):
            change(policy.preferences)
    assert policy.preferences == {"matmul": "cublasLt"}
    assert policy.set("attention", "flash_v2").preferences == {"matmul": "cublasLt", "attention": "flash_v2"}
