# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``execution.shapes`` and ``execution.artifacts`` as values."""

from __future__ import annotations

import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies import ArtifactPolicy, ExecutionPolicy


class TestShapes:
    def test_canonical_forms(self):
        given = {"b": [" 1 .. 512 ", "7", 8], "a": ("1..512..512", "4..4", "1..2..9"), "c": ()}
        policy = ExecutionPolicy(shapes=given)
        assert policy.shapes == {"a": ("1..512", 4, "1..2..9"), "b": ("1..512", 7, 8), "c": ()}
        assert list(policy.shapes) == ["a", "b", "c"]
        assert policy == ExecutionPolicy(shapes=dict(reversed(policy.shapes.items())))
        assert hash(policy) == hash(ExecutionPolicy(shapes=policy.shapes))

    def test_frozen_and_apart_from_what_was_given(self):
        given = {"x": [1, 2]}
        policy = ExecutionPolicy(shapes=given)
        given["x"].append(3)
        assert policy.shapes == {"x": (1, 2)}
        with pytest.raises(TypeError, match="frozen"):
            policy.shapes["x"] = (1,)

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ([1, 2], "ExecutionPolicy.shapes: expected a mapping of input to its dimensions"),
            ({1: [1]}, "ExecutionPolicy.shapes: a key must be text, got the number 1"),
            ({"x": [1.0]}, "ExecutionPolicy.shapes.x[0]: expected a size"),
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
