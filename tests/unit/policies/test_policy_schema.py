# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The JSON Schema agrees with `Policy.load`."""

from __future__ import annotations

import json

import jsonschema
import pytest
from test_policy_refusals import YAML
from test_policy_refusals_json import JSON

from xpuruntime.errors import PolicyError
from xpuruntime.policies import Policy, policy_schema
from xpuruntime.policies.document import Refused, to_python
from xpuruntime.policies.text_formats import read_json, read_yaml

VALIDATOR = jsonschema.Draft202012Validator(policy_schema())


def test_it_is_a_schema_and_plain_json():
    schema = policy_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    schema.clear()
    assert policy_schema()


def test_every_key_has_a_description():
    def walk(schema, path):
        for key, inner in schema.get("properties", {}).items():
            assert inner.get("description", "").endswith("."), f"{path}{key}"
            walk(inner, f"{path}{key}.")
        for inner in [*([schema["items"]] if "items" in schema else []), *schema.get("anyOf", [])]:
            walk(inner, path)

    walk(policy_schema(), "")


def test_a_full_policy(full_policy):
    VALIDATOR.validate(full_policy.to_dict())
    VALIDATOR.validate({})


#: Refused for reasons that a schema does not state: several keys together, order, forms of numbers, characters.
BEYOND = (
    "contradicts",
    "states no limit",
    "asks for nothing",
    "states no key",
    "nothing can come after",
    "empty range",
    "stands alone",
    "is a kernel of",
    "holds the character",
    "no certain device",
    "its device is 'auto'",
    "'99999999TiB'",
    "'0.3B'",
    "36893488147419103232",
    "b: is out of range",
    "b: is not a finite",
    "got the number 2.0",
    "got the number 100.0",
    "the number nan",
    "the number inf",
    "match.node: ",
    "an input needs a name",
    "metrics.top1",
    "'1001%'",
    "'0s'",
)


def documents():
    """Return every refused text that is a document at all, as a schema sees it."""
    for text, message, read in [(*case, read_yaml) for case in YAML] + [(*case, read_json) for case in JSON]:
        try:
            document = to_python(read(text))
        except Refused:
            continue
        if not any(words in message for words in BEYOND):
            yield pytest.param(document, id=text[:40])


@pytest.mark.parametrize("document", list(documents()))
def test_what_load_refuses_the_schema_refuses(document):
    assert not VALIDATOR.is_valid(document)


def test_most_refusals_are_in_the_schema():
    assert len(list(documents())) > 60


@pytest.mark.parametrize(
    "document",
    [
        {"execution": {"device": "cuda:-1"}},
        {"execution": {"device": "cpu:0"}},
        {"execution": {"fallback": ["onnxruntime"]}},
        {"execution": {"memory": {"limit": "8gb"}}},
        {"execution": {"engine": []}},
        {"execution": {"shapes": {"x": "1..2"}}},
        {"execution": {"shapes": {"x": [-1]}}},
        {"execution": {"shapes": {"x": ["1..2..3..4"]}}},
        {"execution": {"shapes": {"x": ["batch"]}}},
        {"execution": {"artifacts": {"cache": "cache"}}},
        {"execution": {"artifacts": {"stale": "refuse"}}},
        {"kernels": {"matmul": "flash_v2"}},
        {"kernels": {"rules": [{"use": "torch"}]}},
        {"kernels": {"rules": [{"match": {"m": "=>3"}, "use": "torch"}]}},
        {"accuracy": {"cosine": 2}},
        {"schema": "xpuruntime.policy/2"},
    ],
)
def test_both_refuse(document):
    assert not VALIDATOR.is_valid(document)
    with pytest.raises(PolicyError):
        Policy.coerce(document)


@pytest.mark.parametrize(
    "document",
    [
        {
            "execution": {
                "device": "cuda:1023",
                "fallback": ["a-b@cpu"],
                "allow_cpu_ops": [],
                "tf32": None,
                "threads": None,
            }
        },
        {"execution": {"memory": {"limit": "1.5 GiB"}}},
        {"execution": {"shapes": {"x": [0, "7", "1 .. 2", "1..2..3"], "y": []}}},
        {"execution": {"artifacts": {"cache": "a/b"}}},
        {"execution": {"memory": {"limit": 5, "pool": "driver"}}},
        {"execution": {"provider_options": {"ort": {"a": 1, "b": 1.5, "c": True, "d": ""}}}},
        {"kernels": {"matmul": "my.kernel", "attention": ["flash_v3", "auto"], "rules": []}},
        {"kernels": {"rules": [{"match": {"m": " 1 .. 64", "n": 3, "k": ">= 3", "device": "sm90"}, "use": "torch"}]}},
        {"accuracy": {"cosine": 1, "rtol": 0, "atol": None}},
        {"accuracy": None, "auto_strategy": "best_performance"},
    ],
)
def test_both_accept(document):
    VALIDATOR.validate(document)
    assert isinstance(Policy.coerce(document), Policy)
