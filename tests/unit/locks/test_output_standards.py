# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SARIF and JUnit by their standards: required and allowed properties, types and values, written by hand.

The tables are of what `to_sarif` and `to_junit` write: SARIF 2.1.0 (OASIS), and ``junit-10.xsd`` of the xUnit
plugin of Jenkins. A key that a table lacks fails, so that an addition is looked up in the standard first.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import Any
from urllib.parse import urlsplit

import pytest
from claim_records import HOSTILE, claim, result

import xpuruntime as xrt
from xpuruntime.locks.verification.formats import to_junit, to_sarif


def one_of(*values: str) -> Any:
    return lambda value: value in values


def at_least(least: int) -> Any:
    return lambda value: type(value) is int and value >= least


def text(value: Any) -> bool:
    return isinstance(value, str)


def uri(value: Any) -> bool:
    urlsplit(value)
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9._~:/?#@!$&'()*+,;=%\[\]-]*", value) is not None


def texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


#: Object to its required properties, and all properties with a check or the object (or ``[object]``) that they hold.
SARIF: dict[str, tuple[set[str], dict[str, Any]]] = {
    "sarifLog": ({"version", "runs"}, {"$schema": uri, "version": one_of("2.1.0"), "runs": ["run"]}),
    "run": (
        {"tool"},
        {
            "tool": "tool",
            "invocations": ["invocation"],
            "columnKind": one_of("utf16CodeUnits", "unicodeCodePoints"),
            "results": ["result"],
        },
    ),
    "tool": ({"driver"}, {"driver": "toolComponent"}),
    "toolComponent": ({"name"}, {"name": text, "version": text, "rules": ["reportingDescriptor"]}),
    "reportingDescriptor": ({"id"}, {"id": text, "name": text, "shortDescription": "multiformatMessageString"}),
    "multiformatMessageString": ({"text"}, {"text": text}),
    "invocation": (
        {"executionSuccessful"},
        {"executionSuccessful": lambda value: isinstance(value, bool), "exitCode": lambda value: type(value) is int},
    ),
    "result": (
        {"message"},
        {
            "ruleId": text,
            "ruleIndex": at_least(-1),
            "level": one_of("none", "note", "warning", "error"),
            "message": "message",
            "locations": ["location"],
            "partialFingerprints": texts,
            "properties": lambda value: isinstance(value, dict),
        },
    ),
    "message": ({"text"}, {"text": text}),
    "location": (set(), {"physicalLocation": "physicalLocation", "logicalLocations": ["logicalLocation"]}),
    "logicalLocation": (set(), {"fullyQualifiedName": text}),
    "physicalLocation": ({"artifactLocation"}, {"artifactLocation": "artifactLocation", "region": "region"}),
    "artifactLocation": (set(), {"uri": uri}),
    "region": (set(), {"startLine": at_least(1), "startColumn": at_least(1)}),
}


def check_sarif(kind: str, value: Any, where: str = "$") -> None:
    required, allowed = SARIF[kind]
    assert isinstance(value, dict), where
    assert required <= set(value), f"{where} lacks {required - set(value)}"
    for key, one in value.items():
        place = f"{where}.{key}"
        assert key in allowed, f"{place} is no property of {kind}"
        rule = allowed[key]
        if isinstance(rule, str):
            check_sarif(rule, one, place)
        elif isinstance(rule, list):
            assert isinstance(one, list), place
            for number, part in enumerate(one):
                check_sarif(rule[0], part, f"{place}[{number}]")
        else:
            assert rule(one), f"{place}: {one!r}"


#: Element to required attributes, all attributes, and the elements that it may hold.
JUNIT: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"name", "tests", "failures", "errors", "time", "skipped", "timestamp", "hostname"},
        {"properties", "testcase"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, {"name", "value"}, set()),
    "testcase": ({"name"}, {"name", "time", "classname"}, {"skipped", "failure"}),
    "skipped": (set(), {"type", "message"}, set()),
    "failure": (set(), {"type", "message"}, set()),
}
_TIME = re.compile(r"(([0-9]{0,3},)*[0-9]{3}|[0-9]{0,3})*(\.[0-9]*)?")


def check_junit(element: ET.Element) -> None:
    required, attributes, children = JUNIT[element.tag]
    assert required <= set(element.keys()) <= attributes, (element.tag, element.keys())
    assert {child.tag for child in element} <= children, element.tag
    assert element.get("time") is None or _TIME.fullmatch(element.get("time") or "")
    for name in ("tests", "failures", "errors", "skipped"):
        assert element.get(name) is None or (element.get(name) or "").isdigit()
    for child in element:
        check_junit(child)


@pytest.fixture(scope="module")
def verified(digits: str) -> Any:
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
    return xrt.verify(digits, policy, only=["evidence", "accuracy", "memory"])


HARD = result(
    claim("evidence.execution.engine"),
    claim("accuracy.y", "fail", reason=HOSTILE, requested=HOSTILE, observed=HOSTILE, fix=HOSTILE, line=3, column=1),
    claim("speed.latency.p50", "inconclusive", figures={"ratio": 1.5, "low": float("1e-30")}),
    claim("memory.peak", "unobservable"),
    policy="/absolute path/한글 policy.yaml",
)


@pytest.mark.parametrize("which", ["verified", "mixed", "hard", "empty"])
def test_sarif_has_what_the_standard_requires_and_nothing_else(which: str, verified: Any, mixed: Any) -> None:
    found = {"verified": verified, "mixed": mixed, "hard": HARD, "empty": result()}[which]
    check_sarif("sarifLog", json.loads(to_sarif(found)))


@pytest.mark.parametrize("which", ["verified", "mixed", "hard", "empty"])
def test_junit_has_what_the_schema_requires_and_nothing_else(which: str, verified: Any, mixed: Any) -> None:
    found = {"verified": verified, "mixed": mixed, "hard": HARD, "empty": result()}[which]
    check_junit(ET.fromstring(to_junit(found)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("runs", 0, "results", 0, "level"), "fatal"),
        (("runs", 0, "results", 0, "ruleIndex"), "0"),
        (("runs", 0, "results", 0, "locations", 0, "physicalLocation", "region", "startLine"), 0),
        (("runs", 0, "columnKind"), "bytes"),
        (("runs", 0, "unknown"), 1),
        (("version",), "2.0"),
    ],
)
def test_the_check_of_sarif_finds_what_is_wrong(path: tuple[Any, ...], value: Any, mixed: Any) -> None:
    log = json.loads(to_sarif(mixed))
    at = log
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    with pytest.raises(AssertionError):
        check_sarif("sarifLog", log)
