# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
from __future__ import annotations

import pytest
import writing


@pytest.mark.parametrize(
    "text",
    [
        "The model is quantised before it runs.",
        "Its behaviour is stated, and the colour too.",
        "What is not stated is taken from the precision.",
        "A first sentence. What nobody reads is left out.",
        "cuda:0 is not there: this machine has none.",
        "the digest of a part of the lock of a model",
        "A paragraph whose rule is broken over two lines: this device is not\nthere.",
    ],
)
def test_a_breach_is_found(text: str) -> None:
    assert list(writing.findings(text))


@pytest.mark.parametrize(
    "text",
    [
        "Inputs are quantized, and a key that is `quantised` keeps its name.",
        "What ran, beside the request.",
        "What will run, decided from facts alone, before anything is loaded.",
        "What does it cost?",
        'The rule says "what is wrong is found", and is quoted.',
        "```text\ncuda:0 is not there\n```\n",
        "[a link](guides/quantisation.md)",
    ],
)
def test_prose_that_follows_the_rules_has_no_finding(text: str) -> None:
    assert not list(writing.findings(writing.prose(text)))


def test_lines_are_those_of_the_page() -> None:
    page = "# Title\n\n```text\nis not there\n```\n\nOne line\nof a paragraph that is not there.\n"
    assert [line for line, *_ in writing.findings(writing.prose(page))] == [8]


def test_strings_of_a_module_are_prose_where_they_have_words() -> None:
    source = '"""The module that normalises."""\nNAME = "behaviour"\ntext = f"a colour for {NAME!r}, or none"\n'
    found = [words for _, text in writing.strings(source) for _, words, _ in writing.findings(text)]
    assert found == ["normalises", "colour"]
