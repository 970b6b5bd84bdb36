# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of the design: each resolves, or does not and has a replacement that does."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import xpuruntime
from xpuruntime import lazy_names
from xpuruntime.inference.session_arguments import PolicyAliases

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "names.md"
HEADERS = ROOT / "src" / "cpp" / "include" / "xpuruntime"
PACKAGES = sorted(xpuruntime._PACKAGES)
TORCH = re.compile(r"xpuruntime\.(pytorch|training)\b")


def rows() -> list[tuple[str, list[str]]]:
    """Return each name with its replacements; none where it is the same."""
    matches = re.findall(r"^\| `?([^`|]+?)`? \| ([^|]+) \|[^\n]*\|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [
        (name, [] if here == "the same" else re.findall("`([^`]+)`", here)) for name, here in matches if name != "name"
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
    for part in parts[1:]:
        try:
            value = getattr(value, part)
        except AttributeError:
            if part in _set_by_constructor(value):
                return None
            raise
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
        parameters = inspect.signature(kind).parameters
        return {*parameters, *PolicyAliases.__annotations__} if "aliases" in parameters else parameters
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
    for replacement in replacements or [name]:
        resolve(replacement)
    if replacements and name.startswith("xpuruntime."):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            resolve(name)
    elif replacements and name.endswith(".h"):
        assert not (HEADERS / name).exists()


def test_the_headers_have_the_types_that_the_page_names():
    """`X` is `Y` says that the headers have Y; so does a row of a header that says nothing but types."""
    section = PAGE.read_text(encoding="utf-8").partition("## C++")[2]
    named = re.findall(r"`\w+` is `([\w:]+)`", section.partition("Sources that")[0])
    for here, notes in re.findall(r"^\| `[^`]+` \| (`[^|]+`) \| ([^|]*)\|$", section, re.M):
        if ".h`" in here and " is " not in notes:
            named += re.findall(r"`(\w+)`", notes)
    text = "".join(path.read_text(encoding="utf-8") for path in HEADERS.rglob("*.h"))
    assert {"Event", "TensorDesc", "DeviceId", "OpDesc"} <= set(named)
    for name in named:
        assert re.search(rf"\b{name.rpartition(':')[2]}\b", text), name


def test_the_korean_page_has_the_same_rows():
    korean = (ROOT / "docs" / "ko" / "names.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", korean, re.M)
    english = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert cells == [(name, "같음" if here == "the same" else here) for name, here in english]


def resolve_in_forks(names: list[str]) -> dict[str, str]:
    """Return the names that do not resolve, each with the error, where each is the first that the process looks up."""
    failed = {}
    for name in names:
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                resolve(name)
                text = ""
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(there, text.encode()[:4000])
            os._exit(0)
        os.close(there)
        with os.fdopen(here) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        if text:
            failed[name] = text
    return failed


def failures_in_a_new_interpreter(names: list[str]) -> dict[str, str]:
    code = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
{"import torch" if any(TORCH.search(name) for name in names) else ""}
import test_names
assert not [name for name in sys.modules if name.startswith(("xpuruntime.pytorch", "xpuruntime.runtime."))]
print(json.dumps(test_names.resolve_in_forks({names!r})))
"""
    return json.loads(run_python(code, warnings="ignore"))


def dotted(*, torch: bool) -> list[str]:
    """Return the names that are the same, and what replaces the others."""
    found = [
        replacement
        for name, replacements in rows()
        for replacement in replacements or [name]
        if replacement.startswith("xpuruntime.")
    ]
    return [one for one in dict.fromkeys(found) if bool(TORCH.search(one)) == torch]


@pytest.mark.parametrize("torch", [False, True])
def test_each_name_resolves_as_the_first_thing_a_process_does(torch: bool):
    if torch:
        pytest.importorskip("torch", reason="xpuruntime.pytorch requires PyTorch")
    names = dotted(torch=torch)
    assert len(names) > 30
    assert failures_in_a_new_interpreter(names) == {}


def named_in(hint: str) -> list[str]:
    return re.findall(r"\bxpuruntime\.[\w.]*\w", hint)


def test_every_hint_names_what_works():
    hints = [name for hint in lazy_names.REPLACED.values() for name in named_in(hint)]
    assert len(hints) >= len(lazy_names.REPLACED)
    if importlib.util.find_spec("torch") is None:
        hints = [name for name in hints if not TORCH.search(name)]
    assert failures_in_a_new_interpreter(list(dict.fromkeys(hints))) == {}


def test_every_replaced_name_of_a_module_has_a_hint():
    """Names in a class have none: its attributes are looked up without this package."""
    for name, replacements in rows():
        if replacements and re.fullmatch(r"xpuruntime(\.[a-z_]+)*\.\w+", name):
            assert name in lazy_names.REPLACED, name


@pytest.mark.parametrize("name", lazy_names.REPLACED)
def test_a_replaced_name_says_what_replaced_it(name: str):
    needs_torch(name, [])
    module, _, last = name.rpartition(".")
    hint = re.escape(lazy_names.REPLACED[name])
    with pytest.raises(AttributeError, match=hint):
        resolve(name)
    with pytest.raises(ImportError, match=hint):
        exec(f"from {module} import {last}")
    assert not hasattr(sys.modules[module], last)


def test_a_replaced_name_of_training_says_what_replaced_it():
    pytest.importorskip("torch", reason="xpuruntime.pytorch requires PyTorch")
    hint = re.escape(lazy_names.REPLACED["xpuruntime.pytorch.CUDAGraphWrapper"])
    for module in ("training", "training.pytorch_ext"):
        with pytest.raises(AttributeError, match=hint):
            resolve(f"xpuruntime.{module}.CUDAGraphWrapper")
        with pytest.raises(ImportError, match=hint):
            exec(f"from xpuruntime.{module} import CUDAGraphWrapper")


def test_a_name_that_nobody_has_is_no_hint():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from xpuruntime import nothing")
    with pytest.raises(AttributeError, match=r"'xpuruntime\._core' has no attribute 'nothing'"):
        resolve("xpuruntime._core.nothing")


def run_python(code: str, warnings: str = "error") -> str:
    done = subprocess.run([sys.executable, "-W", warnings, "-c", code], capture_output=True, text=True, check=False)
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
            assert "Install with: `pip install" in str(error), error
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
