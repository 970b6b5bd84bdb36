# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The public surface is a list: sorted, resolving, typed and documented."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
from public_coverage import PACKAGES

import xpuruntime
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.locks.verification.claims import ClaimCode
from xpuruntime.runtime.doctor.facts import FindingCode
from xpuruntime.stability import LEVELS

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


def test_the_list_is_sorted_and_without_repeats():
    assert list(xpuruntime.__all__) == sorted(set(xpuruntime.__all__))


@pytest.mark.parametrize("name", xpuruntime.__all__)
def test_name_resolves_and_is_documented(name: str):
    thing = getattr(xpuruntime, name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        assert inspect.getdoc(thing), f"xpuruntime.{name} has no docstring"
    directive = rf"^::: xpuruntime\.(?:[\w.]+\.)?{re.escape(name)}$|^\| `{re.escape(name)}` \|"
    assert re.search(directive, API, re.M), f"{name} is on no page of docs/reference"


@pytest.mark.parametrize("package", ["", *sorted(xpuruntime._PACKAGES - {"training"}), "pytorch.ops"])
def test_each_public_name_has_one_level_of_stability(package: str):
    if package.startswith("pytorch"):
        pytest.importorskip("torch", reason="xpuruntime.pytorch needs torch")
    full = f"xpuruntime.{package}".rstrip(".")
    marked = [name for name in xpuruntime.__stability__ if name.rpartition(".")[0] == full]
    assert sorted(marked) == sorted(f"{full}.{name}" for name in importlib.import_module(full).__all__)
    assert {xpuruntime.__stability__[name] for name in marked} <= set(LEVELS)


@pytest.mark.parametrize("package", PACKAGES[1:])
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
