# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fields with forms of their own: numbers, sizes, devices, shapes, artifacts."""

from __future__ import annotations

import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies import ArtifactPolicy, DeviceSpec, ExecutionPolicy, Policy


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


class TestShapes:
    def test_canonical_forms(self):
        given = {"b": [" 1 .. 512 ", "7", 8], "a": ("1..512..512", "4..4", "1..2..9"), "c": ()}
        policy = ExecutionPolicy(shapes=given)
        assert policy.shapes == {"a": ("1..512", 4, "1..2..9"), "b": ("1..512", 7, 8), "c": ()}
        assert list(policy.shapes) == ["a", "b", "c"]
        assert policy == ExecutionPolicy(shapes=dict(reversed(policy.shapes.items())))
        assert hash(policy) == hash(ExecutionPolicy(shapes=policy.shapes))

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ([1, 2], "ExecutionPolicy.shapes: got a list. Fix: state a mapping of input to its dimensions"),
            ({1: [1]}, "ExecutionPolicy.shapes: a key must be text, got the number 1"),
            ({"x": [1.0]}, "ExecutionPolicy.shapes.x[0]: got the number 1.0. Fix: state a size"),
            ({"x": [2**63]}, "ExecutionPolicy.shapes.x[0]: the number 9223372036854775808 is out of range"),
            ({"x": ["1\n..2"]}, "ExecutionPolicy.shapes.x[0]: '1\\n..2' holds the character U+000A"),
            ({"x\x00": [1]}, "ExecutionPolicy.shapes: 'x\\x00' holds the character U+0000"),
        ],
    )
    def test_refusals(self, shapes, message):
        with pytest.raises(PolicyError) as error:
            ExecutionPolicy(shapes=shapes)
        assert str(error.value).startswith(message), str(error.value)


class TestArtifacts:
    @pytest.mark.parametrize("cache", ["off", "default", "./cache", "/var/cache", "C:\\cache", "~/cache", "a/"])
    def test_words_and_folders(self, cache):
        assert ArtifactPolicy(cache=cache).cache == cache

    def test_a_path_is_its_text(self, tmp_path):
        assert ArtifactPolicy(cache=tmp_path).cache == str(tmp_path)

    @pytest.mark.parametrize("cache", ["on", "", " ", "cache", None, True, 3, b"./cache"])
    def test_what_is_neither(self, cache):
        with pytest.raises(PolicyError, match=r"ArtifactPolicy\.cache"):
            ArtifactPolicy(cache=cache)


@pytest.mark.parametrize(
    ("text", "kind", "index"),
    [
        ("cpu", "cpu", None),
        ("cuda", "cuda", None),
        ("cuda:0", "cuda", 0),
        ("cuda:99", "cuda", 99),
        ("gpu:1", "gpu", 1),
        ("npu", "npu", None),
        ("rocm:0", "rocm", 0),
        ("metal", "metal", None),
        ("dml:1023", "dml", 1023),
        ("auto", "auto", None),
    ],
)
def test_devices(text, kind, index):
    spec = DeviceSpec.parse(text)
    assert (spec.kind, spec.index, str(spec)) == (kind, index, text)
    assert spec == DeviceSpec(kind=kind, index=index)
    assert ExecutionPolicy(device=spec).device == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:-1", "'cuda:-1' is not a device: its index is negative. Fix: write 'cuda:0' for the first"),
        (
            "cuda:x",
            "'cuda:x' is not a device: its index is 'x', which is not a whole number. Fix: write 'cuda:0'",
        ),
        ("cuda:00", "'cuda:00' is not a device: its index is '00', which is not a whole number"),
        ("cuda:٣", "'cuda:٣' is not a device: its index is '٣', which"),
        ("cuda:1024", "'cuda:1024' is not a device: its index is above 1023"),
        ("cuda:" + "9" * 10_000, "'cuda:999"),
        (
            "cudda:0",
            "'cudda:0' is not a device; did you mean 'cuda:0'? Valid kinds: cpu, cuda, gpu, npu, rocm, metal, dml, auto.",  # noqa: E501
        ),
        ("CUDA:0", "'CUDA:0' is not a device; did you mean 'cuda:0'?"),
        ("quantum", "'quantum' is not a device. Valid kinds: cpu,"),
        ("", "'' is not a device. Valid kinds: cpu,"),
        ("cpu:0", "'cpu:0' is not a device: 'cpu' takes no index. Fix: write 'cpu'"),
        (0, "got int 0. Fix: state text such as 'cpu' or 'cuda:0'"),
        (None, "got NoneType None. Fix: state text such as 'cpu' or 'cuda:0'"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(PolicyError) as error:
        DeviceSpec.parse(text)
    assert str(error.value).startswith(message), str(error.value)
    assert len(str(error.value)) < 300


def test_constructor_refusals():
    with pytest.raises(PolicyError, match=r"DeviceSpec\.index: 'cpu' takes no index. Fix: write 'cpu'"):
        DeviceSpec(kind="cpu", index=0)
    with pytest.raises(
        PolicyError, match=r"DeviceSpec\.kind: 'cudda' is not a valid value; did you mean 'cuda'\? Valid kinds:"
    ):
        DeviceSpec(kind="cudda")
    with pytest.raises(PolicyError, match="DeviceSpec: needs 'kind'"):
        DeviceSpec(index=1)
