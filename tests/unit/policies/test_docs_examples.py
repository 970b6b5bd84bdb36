# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Every example in the reference page is read, and every key and word is in it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import jsonschema
import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies import (
    AccuracyPolicy,
    ArtifactPolicy,
    CalibrationPolicy,
    ExecutionPolicy,
    KernelPolicy,
    KernelRule,
    MemoryPolicy,
    Policy,
    RuleMatch,
    TuningPolicy,
    VerifyEvidence,
    VerifyGeneration,
    VerifyMemory,
    VerifyPolicy,
    VerifySpeed,
    WeightsPolicy,
    policy_schema,
)
from xpuruntime.policies.document import to_python
from xpuruntime.policies.kernel_rules import FAMILIES
from xpuruntime.policies.text_formats import read_json, read_yaml

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "policy.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```\n", PAGE, re.MULTILINE | re.DOTALL)
GOOD = [
    (language, text)
    for index, (language, text) in enumerate(BLOCKS)
    if language in ("yaml", "json")
    and not (index + 1 < len(BLOCKS) and BLOCKS[index + 1][1].startswith("policy.yaml:"))
]
BAD = [
    (before, after.strip())
    for (_, before), (_, after) in itertools.pairwise(BLOCKS)
    if after.startswith("policy.yaml:")
]
PYTHON = [text for language, text in BLOCKS if language == "python"]


def test_the_page_has_examples_of_each_sort():
    assert (len(GOOD), len(BAD), len(PYTHON)) == (7, 6, 3)


@pytest.mark.parametrize(("language", "text"), GOOD)
def test_good_examples(language, text):
    policy = Policy.loads(text, language)
    assert policy.stated()
    node = read_json(text) if language == "json" else read_yaml(text)
    jsonschema.Draft202012Validator(policy_schema()).validate(to_python(node))


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_examples(text, message):
    with pytest.raises(PolicyError) as error:
        Policy.loads(text, name="policy.yaml")
    assert str(error.value) == message


def test_the_message_of_a_constructor():
    with pytest.raises(PolicyError) as error:
        ExecutionPolicy(precision="fp61")
    assert f"`{str(error.value).partition('?')[0]}? …`" in PAGE


@pytest.mark.parametrize("code", PYTHON)
def test_python_examples(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "policy.md", "exec"), {})


def test_the_first_two_examples_are_the_same_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(PYTHON[0], scope)
    assert scope["policy"] == Policy.loads(GOOD[0][1])


def rows(heading):
    """Return the rows of all tables under a heading, as lists of cells."""
    section = re.split(rf"^##+ {re.escape(heading)}$", PAGE, flags=re.MULTILINE)[1]
    lines = re.split(r"^##", section, flags=re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


SECTIONS = (
    ArtifactPolicy, ExecutionPolicy, MemoryPolicy, TuningPolicy, VerifyEvidence, VerifyMemory, WeightsPolicy,
)  # fmt: skip


def written(value):
    plain = {None: "`null`", True: "`true`", False: "`false`", (): "`[]`"}
    if isinstance(value, SECTIONS):
        return "all defaults"
    if isinstance(value, dict):
        return "`{}`"
    if type(value) is int:  # which equals a truth value
        return f"`{value}`"
    return "nothing stated" if isinstance(value, KernelPolicy) else plain.get(value, f"`{value}`")


@pytest.mark.parametrize(
    ("heading", "policy", "elsewhere"),
    [
        ("Keys at the top", Policy(), set()),
        ("`execution`", ExecutionPolicy(), set()),
        ("`execution.memory`", MemoryPolicy(), set()),
        ("`execution.weights`", WeightsPolicy(), set()),
        ("`execution.artifacts`", ArtifactPolicy(), set()),
        ("`kernels`", KernelPolicy(), {"auto_strategy", "tuning"}),
        ("`tuning`", TuningPolicy(), {"min_effect", "budget"}),
        ("`accuracy`", AccuracyPolicy(rtol=1), {"rtol"}),
        (
            "`calibration`",
            CalibrationPolicy(path="c.npz", digest=f"sha256:{'0' * 64}"),
            {"path", "digest"},
        ),
        ("`verify`", VerifyPolicy(), set()),
        ("`verify.evidence`", VerifyEvidence(), set()),
        ("`verify.speed`", VerifySpeed(), {"metric", "max_slowdown", "budget"}),
        ("`verify.memory`", VerifyMemory(), {"max_growth"}),
        ("`verify.generation`", VerifyGeneration(text="texts.json", kl=0.1), {"text", "kl"}),
    ],
)
def test_every_key_is_explained_with_its_default(heading, policy, elsewhere):
    explained = {cells[0].strip("`"): cells[2] for cells in rows(heading) if len(cells) > 2}
    for key in set(policy.KINDS) - elsewhere:
        assert explained[key] == written(getattr(policy, key)), key


@pytest.mark.parametrize(
    ("heading", "value", "keys"),
    [
        ("`tuning`", TuningPolicy(), ("min_effect", "budget")),
        ("`verify.speed`", VerifySpeed(), ("metric", "max_slowdown", "budget")),
        ("`verify.memory`", VerifyMemory(), ("max_growth",)),
    ],
)
def test_defaults_with_units_are_explained_as_a_file_writes_them(heading, value, keys):
    explained = {cells[0].strip("`"): cells[2].strip("`") for cells in rows(heading) if len(cells) > 2}
    for key in keys:
        plain = value.KINDS[key].plain(getattr(value, key))
        assert explained[key] == (plain[0] if isinstance(plain, list) else plain)


def test_every_key_of_rules_is_explained():
    explained = {key for cells in rows("`kernels.rules`") for key in re.findall("`([a-z_]+)`", cells[0])}
    assert explained == {*KernelRule.KINDS, *RuleMatch.KINDS}
    assert rows("Keys at the top")[4][0] == "`auto_strategy`"
    assert rows("Keys at the top")[5][0] == "`tuning`"


def test_every_family_is_explained_in_the_same_words():
    explained = {cells[0].strip("`"): cells[1:3] for cells in rows("`kernels`") if cells[0].strip("`") not in FAMILIES}
    for family in {family for words in FAMILIES.values() for family in words}:
        ops = [op for op in FAMILIES if family in FAMILIES[op]]
        assert explained[family][0] == ("all" if len(ops) == len(FAMILIES) else ", ".join(ops))
        if family != "cudnn":  # one row for two meanings
            assert {FAMILIES[op][family] for op in ops} == {explained[family][1]}


def test_docstring_examples_run():
    import doctest
    import importlib
    import pkgutil

    import xpuruntime.policies as package

    run = 0
    for module in pkgutil.iter_modules(package.__path__):
        result = doctest.testmod(importlib.import_module(f"xpuruntime.policies.{module.name}"))
        assert result.failed == 0
        run += result.attempted
    assert run >= 10
