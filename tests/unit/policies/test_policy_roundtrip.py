# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Every policy survives every way of writing it down."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from policy_strategies import execution_policies, kernel_policies, policies

from xpuruntime import policies as all_policies
from xpuruntime.errors import PolicyError
from xpuruntime.policies import ExecutionPolicy, KernelPolicy, Policy, policy_schema

thorough = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
NAMES = {name: getattr(all_policies, name) for name in all_policies.__all__}
VALIDATOR = jsonschema.Draft202012Validator(policy_schema())


@thorough
@given(policies)
def test_text_reads_back_to_the_same_policy(policy):
    for format in ("yaml", "json"):
        text = policy.dumps(format)
        back = Policy.loads(text, format)
        assert back == policy
        assert repr(back) == repr(policy)  # also where == is lax, as for True and 1
        assert hash(back) == hash(policy)
        assert back.dumps(format) == text
        assert back.stated() == policy.stated()


@thorough
@given(policies)
def test_other_ways_of_writing_it_down(policy):
    assert eval(repr(policy), dict(NAMES)) == policy
    VALIDATOR.validate(policy.to_dict())
    assert Policy.coerce(policy.to_dict()) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert policy.replace() == policy
    assert msgspec.convert(msgspec.to_builtins(policy), Policy) == policy
    assert msgspec.json.decode(msgspec.json.encode(policy), type=Policy) == policy


@thorough
@given(policies)
def test_another_yaml_reader_sees_the_same_values(policy):
    read = yaml.safe_load(policy.dumps("yaml"))
    assert Policy.coerce(read) == policy


@thorough
@given(kernel_policies)
def test_kernel_policies_read_back(policy):
    assert KernelPolicy.from_json(policy.to_json()) == policy
    assert Policy.loads(policy.to_json(), "json").kernels == policy


@thorough
@given(execution_policies())
def test_execution_policies_read_back(policy):
    assert ExecutionPolicy.from_json(policy.to_json()) == policy
    assert Policy.loads(policy.to_json(), "json") == Policy(execution=policy)


@pytest.mark.parametrize("name", ["policy.yaml", "policy.json"])
def test_execution_policy_files_read_back(tmp_path, name, full_policy):
    policy = full_policy.execution.replace(lock=str(tmp_path / "model.lock"))
    policy.save(tmp_path / name)
    assert ExecutionPolicy.load(tmp_path / name) == policy
    assert Policy.load(tmp_path / name) == Policy(execution=policy)
    assert str(tmp_path) not in (tmp_path / name).read_text()


def test_an_execution_policy_holds_nothing_else(tmp_path, full_policy):
    full_policy.save(tmp_path / "policy.yaml")
    with pytest.raises(PolicyError, match=r"kernels.*which an ExecutionPolicy cannot hold.*\.execution"):
        ExecutionPolicy.load(tmp_path / "policy.yaml")


@pytest.mark.parametrize("name", ["policy.yml", "policy.json"])
def test_files_read_back(tmp_path, name, full_policy):
    full_policy.save(tmp_path / name)
    assert Policy.load(tmp_path / name) == full_policy
    assert Policy.load(str(tmp_path / name)) == full_policy
    assert Policy.coerce(tmp_path / name) == full_policy


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_policies_travel_between_processes(method, full_policy):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(copy.copy, (full_policy,)) == full_policy


def test_yaml_without_the_c_reader_is_read_alike(monkeypatch, full_policy):
    import yaml

    text = full_policy.dumps("yaml")
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert Policy.loads(text) == full_policy
    with pytest.raises(
        ValueError, match=r"^policy:2:3: unknown key 'precisoin' in execution; did you mean 'precision'\?"
    ):
        Policy.loads("execution:\n  precisoin: fp16\n")
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        Policy.loads("[" * 100_000)
