# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification as JUnit XML, which CI systems show as tests: a suite a section, a test case a claim."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from xpuruntime.locks.verification.text import place_text
from xpuruntime.locks.verification.vocabulary import SECTIONS
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.locks.verification.claims import Claim, VerificationResult

__all__ = ["to_junit"]

#: What XML 1.0 has no way to hold.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(result: VerificationResult) -> str:
    """Return the XML: failures, and inconclusive, unobservable and skipped claims as skipped with the reason.

    A claim that is inconclusive where that fails the verification is a failure, too. It is valid by the schema
    ``junit-10.xsd`` of Jenkins's xUnit plugin, which has no properties of test cases: figures are those of the suite.
    """
    counts = _counts(result, result.claims)
    counts.pop("skipped")  # which the schema has in suites alone
    root = ET.Element("testsuites", {"name": "xrt verify", **counts})
    for section in SECTIONS:
        claims = [one for one in result.claims if one.section == section]
        if not claims:
            continue
        facts = {"name": f"xrt.{section}", **_counts(result, claims), "timestamp": result.created.removesuffix("Z")}
        suite = ET.SubElement(root, "testsuite", {**facts, "hostname": "localhost"})
        properties = ET.SubElement(suite, "properties")
        for name in ("model", "policy", "lock", "engine", "device"):
            if value := getattr(result, name):
                ET.SubElement(properties, "property", {"name": name, "value": _text(value)})
        for one in claims:
            for name, figure in one.figures.items():
                facts = {"name": _text(f"{one.name}: {name}"), "value": f"{figure:.17g}"}
                ET.SubElement(properties, "property", facts)
        for one in claims:
            _case(suite, result, one)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(suite: ET.Element, result: VerificationResult, claim: Claim) -> None:
    case = ET.SubElement(
        suite, "testcase", {"classname": f"xrt.{claim.section}", "name": _text(claim.name), "time": "0"}
    )
    if result.effect(claim) == "fail":
        failure = ET.SubElement(case, "failure", {"type": claim.code, "message": _text(claim.reason)})
        failure.text = _text(_story(result, claim))
    elif claim.verdict != "pass":
        ET.SubElement(case, "skipped", {"message": _text(f"{claim.verdict}: {claim.reason}")})


def _story(result: VerificationResult, claim: Claim) -> str:
    lines = [f"requested: {claim.requested}", f"observed: {claim.observed}", f"reason: {claim.reason}"]
    lines += [f"fix: {claim.fix}"] if claim.fix else []
    place = place_text(result, claim)
    return "\n".join([*lines, f"policy: {place}"] if place else lines)


def _counts(result: VerificationResult, claims: Sequence[Claim]) -> dict[str, str]:
    failed = sum(result.effect(one) == "fail" for one in claims)
    skipped = sum(one.verdict != "pass" and result.effect(one) != "fail" for one in claims)
    return {"tests": str(len(claims)), "failures": str(failed), "errors": "0", "skipped": str(skipped), "time": "0"}


def _text(text: str) -> str:
    return _NOT_XML.sub(lambda found: f"\\u{ord(found[0]):04x}", printable(text))
