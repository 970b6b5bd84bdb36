# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Keys in the wrong section: for every key of every file, in every other section, the error names its place."""

from __future__ import annotations

import itertools

import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies import ExecutionPolicy, KernelPolicy, Policy
from xpuruntime.policies.compound_kinds import Nested
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.tuning.spec.tune_spec import TuneSpec

POLICY = {"": set(Policy.DOCUMENT)} | {
    name: set(kind.kinds) for name, kind in Policy.DOCUMENT.items() if isinstance(kind, Nested)
}
MISPLACED = [
    (section, key, home)
    for section, home in itertools.permutations(POLICY, 2)
    for key in sorted(POLICY[home] - POLICY[section])
]


@pytest.mark.parametrize(("section", "key", "home"), MISPLACED)
def test_a_key_of_another_section_is_told_where_it_belongs(section: str, key: str, home: str) -> None:
    stated = {section: {key: 1}} if section else {key: 1}
    with pytest.raises(PolicyError, match=f"unknown key '{key}' in .*it belongs in ") as caught:
        Policy.coerce(stated)
    assert (f"'{home}'" if home else "the top level") in str(caught.value)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (
            lambda: Policy(kernels={"auto_strategy": "best_performance"}),
            "Policy(kernels=KernelPolicy(auto_strategy=...))",
        ),
        (lambda: Policy(auto_strategy="best_performance"), "Policy(kernels=KernelPolicy(auto_strategy=...))"),
        (lambda: Policy(engine="openvino"), "Policy(execution=ExecutionPolicy(engine=...))"),
        (lambda: KernelPolicy(mode="strict"), "Policy(mode=...)"),
        (lambda: ExecutionPolicy(match="x"), "Policy(kernels=KernelPolicy(rules=[KernelRule(match=...)]))"),
        (
            lambda: Policy().replace(cache="./x"),
            "Policy(execution=ExecutionPolicy(artifacts=ArtifactPolicy(cache=...)))",
        ),
        (
            lambda: ServeSettings(max_batch_size=8),
            "models={NAME: ModelSettings(batching=BatchSettings(max_batch_size=...))}",
        ),
        (lambda: TuneSpec(maximise="throughput"), "TuneSpec(objective=Objective(maximise=...))"),
    ],
)
def test_a_keyword_of_another_class_is_told_how_to_write_it(make, call) -> None:
    with pytest.raises(PolicyError, match="unknown key") as caught:
        make()
    assert call in str(caught.value)


def test_other_files_tell_too() -> None:
    with pytest.raises(PolicyError, match=r"'max_batch_size' in models.m; it belongs in 'models.NAME.batching'"):
        ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": {"m": {"source": "m", "max_batch_size": 8}}})
    with pytest.raises(PolicyError, match="unknown key 'maximise' in the specification; it belongs in 'objective'"):
        TuneSpec.coerce({"maximise": "throughput"})
