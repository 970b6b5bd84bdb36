# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How the scalars of a file are read."""

from __future__ import annotations

import pytest

from xpuruntime.policies import Policy


def test_words_that_yaml_would_turn_into_truth_values():
    policy = Policy.loads("execution: {cuda_graph: off, tf32: off, static_shape: yes, determinism: none}")
    assert policy.execution.cuda_graph == "off"
    assert policy.execution.tf32 is False
    assert policy.execution.static_shape is True
    for word in ("true", "True", "TRUE", "on", "On", "yes"):
        assert Policy.loads(f"execution: {{tf32: {word}}}").execution.tf32 is True
    for word in ("null", "~", ""):
        assert Policy.loads(f"execution: {{tf32: {word}}}").execution.tf32 is None


def test_names_that_look_like_numbers_are_text():
    rule = "kernels: {rules: [{match: {node: 12, module: 1e3}, use: auto}]}"
    match = Policy.loads(rule).kernels.rules[0].match
    assert (match.node, match.module) == ("12", "1e3")


def test_provider_options_follow_the_core_schema():
    text = "execution: {provider_options: {ort: {a: off, b: no, c: 010, d: 0x10, e: 0o10, f: 1e-2, g: 'true', h: true, i: 1_0, j: 1:30}}}"  # noqa: E501
    options = Policy.loads(text).execution.provider_options["ort"]
    expected = {
        "a": "off",
        "b": "no",
        "c": 10,
        "d": 16,
        "e": 8,
        "f": 0.01,
        "g": "true",
        "h": True,
        "i": "1_0",
        "j": "1:30",
    }
    assert dict(options) == expected
    assert {key: type(value) for key, value in options.items()} == {key: type(value) for key, value in expected.items()}


def test_an_exponent_without_a_point_is_a_number():
    assert Policy.loads("accuracy: {rtol: 1e-2, atol: 1, cosine: .5}").accuracy.rtol == 0.01


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        ("512MB", 512 * 10**6),
        ("1.5KiB", 1536),
        ("0.1GB", 10**8),
        ("7B", 7),
        ("12345", 12345),
    ],
)
def test_sizes(text, size):
    assert Policy.loads(f"execution: {{memory: {{limit: {text}}}}}").execution.memory.limit == size


def test_json_text_of_all_kinds_is_read():
    text = '\ufeff{"execution": {"provider_options": {"ort": {"a\\u00e9\\ud83d\\ude00": "\\u000b".}}}}'.replace(
        '"\\u000b".', '"\\"\\\\\\/ x", "n": -1.5e+3'
    )
    options = Policy.loads(text.removeprefix("\ufeff"), "json").execution.provider_options["ort"]
    assert options == {"aé😀": '"\\/ x', "n": -1500.0}


def test_schema_line_is_optional_and_comments_are_fine():
    assert Policy.loads("# note\nschema: xpuruntime.policy/1  # version\n") == Policy() == Policy.loads("{}")
    assert Policy.loads("%YAML 1.2\n---\nmode: strict\n").mode == "strict"
