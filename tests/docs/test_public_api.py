# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The public surface is a list: sorted, resolving, typed and documented."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import xpuruntime
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.locks.verification.claims import ClaimCode
from xpuruntime.runtime.doctor.facts import FindingCode

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
#: The pages of the Python reference, as one text.
API = "".join(
    path.read_text(encoding="utf-8")
    for path in [
        *(REFERENCE / name for name in ("api.md", "pytorch.md", "ops.md")),
        *(REFERENCE / "python").glob("*.md"),
    ]
)
#: Packages with a public surface of their own.
PACKAGES = (
    "xpuruntime.ops",
    "xpuruntime.pytorch",
    "xpuruntime.pytorch.ops",
    "xpuruntime.distributed",
    "xpuruntime.serving",
)
#: The share of public names and of their methods that tests mention; raise it with the tests.
MENTIONED = 0.92


def test_the_list_is_sorted_and_without_repeats():
    assert list(xpuruntime.__all__) == sorted(set(xpuruntime.__all__))


@pytest.mark.parametrize("name", xpuruntime.__all__)
def test_name_resolves_and_is_documented(name: str):
    thing = getattr(xpuruntime, name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        assert inspect.getdoc(thing), f"xpuruntime.{name} has no docstring"
    directive = rf"^::: xpuruntime\.(?:[\w.]+\.)?{re.escape(name)}$|^\| `{re.escape(name)}` \|"
    assert re.search(directive, API, re.M), f"{name} is on no page of docs/reference"


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_a_package_resolve_and_are_documented(package: str):
    if package.startswith("xpuruntime.pytorch"):
        pytest.importorskip("torch", reason="xpuruntime.pytorch needs torch")
    module = importlib.import_module(package)
    assert len(module.__all__) == len(set(module.__all__))
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), f"{package}.{name} has no docstring"
        directive = rf"^::: {re.escape(package)}\.(?:[\w.]+\.)?{re.escape(name)}$"
        assert re.search(directive, API, re.M), f"{package}.{name} is on no page of docs/reference"


def test_nothing_public_is_missing_from_the_list():
    public = {
        name
        for name, value in vars(xpuruntime).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("xpuruntime")
    }
    outside = {"get_version", *xpuruntime._LAZY}
    assert public <= {*xpuruntime.__all__, *outside}, sorted(public - {*xpuruntime.__all__, *outside})


def test_dir_lists_it():
    assert set(xpuruntime.__all__) <= set(dir(xpuruntime))


def test_version_is_that_of_the_package():
    declared = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert declared is not None
    assert xpuruntime.__version__ == declared[1]


def test_every_finding_of_doctor_is_documented():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    table = page.partition("| code | finding |")[2].partition("## ")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", table, re.M) == list(FindingCode)


def test_every_code_of_a_verdict_is_documented():
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z_]+)` \|", page, re.M) == list(VerdictCode)
    assert re.findall(r"^\| (XRT\d+) \| `(\w+)` \|", page, re.M) == [(code.rule, code.value) for code in ClaimCode]


def public_surface() -> Iterator[tuple[str, str]]:
    """Yield the dotted public names of `xpuruntime` and of its `PACKAGES`, each with its spelling in a test."""
    for package in ("xpuruntime", *PACKAGES):
        module = importlib.import_module(package)
        for name in module.__all__:
            yield f"{package}.{name}", name
            thing = getattr(module, name)
            for method, value in vars(thing).items() if inspect.isclass(thing) else ():
                routine = inspect.isroutine(value) or isinstance(value, (property, classmethod, staticmethod))
                if routine and not method.startswith("_"):
                    yield f"{package}.{name}.{method}", f".{method}"


def test_tests_mention_the_public_names():
    """A name that no test mentions is tested by none; of a method, any class's mention counts."""
    pytest.importorskip("torch", reason="xpuruntime.pytorch needs torch")
    mentioned = {
        word
        for path in (ROOT / "tests").rglob("test_*.py")
        for word in re.findall(r"\.?\b[A-Za-z_]\w*", path.read_text(encoding="utf-8"))
    }
    names = dict(public_surface())
    missing = sorted(name for name, spelled in names.items() if not mentioned & {spelled, f".{spelled}"})
    share = 1 - len(missing) / len(names)
    assert share >= MENTIONED, f"tests mention {share:.1%} of {len(names)} public names, and not\n" + "\n".join(missing)
