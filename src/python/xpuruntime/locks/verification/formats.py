# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FORMATS`: a verification for tools (JUnit, SARIF, OpenMetrics, in-toto, annotations of GitHub) and for people."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from xpuruntime.errors import InputError
from xpuruntime.evidence.page.document import assemble
from xpuruntime.files.paths import reason_of, user_path
from xpuruntime.files.writing import write_whole
from xpuruntime.lockfile.canonical import descriptor, statement_text
from xpuruntime.locks.verification.claims import SECTIONS, VERDICTS, Claim, ClaimCode, place_text, worst_first
from xpuruntime.notebook import Badge, escaped, fragment, fragment_table
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.locks.verification.result import VerificationResult

    Place = tuple[str | os.PathLike[str], int] | tuple[str | os.PathLike[str], int, int]

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
        claims = [claim for claim in result.claims if claim.section == section]
        if not claims:
            continue
        facts = {"name": f"xrt.{section}", **_counts(result, claims), "timestamp": result.created.removesuffix("Z")}
        suite = ET.SubElement(root, "testsuite", {**facts, "hostname": "localhost"})
        properties = ET.SubElement(suite, "properties")
        for name in ("model", "policy", "lock", "engine", "device"):
            if value := getattr(result, name):
                ET.SubElement(properties, "property", {"name": name, "value": _text(value)})
        for claim in claims:
            for name, figure in claim.figures.items():
                facts = {"name": _text(f"{claim.name}: {name}"), "value": f"{figure:.17g}"}
                ET.SubElement(properties, "property", facts)
        for claim in claims:
            _case(suite, result, claim)
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
    text = place_text(result, claim)
    return "\n".join([*lines, f"at: {text}"] if text else lines)


def _counts(result: VerificationResult, claims: Sequence[Claim]) -> dict[str, str]:
    failed = sum(result.effect(claim) == "fail" for claim in claims)
    skipped = sum(claim.verdict != "pass" and result.effect(claim) != "fail" for claim in claims)
    return {"tests": str(len(claims)), "failures": str(failed), "errors": "0", "skipped": str(skipped), "time": "0"}


def _text(text: str) -> str:
    return _NOT_XML.sub(lambda match: f"\\u{ord(match[0]):04x}", printable(text))


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
#: Names the fingerprint, which identifies the same finding in another run.
FINGERPRINT = "xrtClaim/v1"
_LEVELS = {"fail": "error", "inconclusive": "warning", "unobservable": "note"}


def to_sarif(result: VerificationResult) -> str:
    """Return the JSON text. Claims that passed or were skipped are no results."""
    claims = [claim for claim in result.claims if claim.verdict in _LEVELS]
    codes = sorted({claim.code for claim in claims}, key=lambda code: code.rule)
    places = {code: index for index, code in enumerate(codes)}
    driver = {
        "name": "xrt verify",
        "version": result.version,
        "rules": [_rule(code) for code in codes],
    }
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True, "exitCode": result.exit_code}],
        "columnKind": "unicodeCodePoints",
        "results": [_result(result, claim, places[claim.code]) for claim in claims],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _rule(code: ClaimCode) -> dict[str, Any]:
    return {"id": code.rule, "name": code.rule_name, "shortDescription": {"text": code.meaning}}


def _result(result: VerificationResult, claim: Claim, index: int) -> dict[str, Any]:
    fix = f" Fix: {claim.fix}" if claim.fix else ""
    text = printable(f"{claim.id}: {claim.reason}; requested {claim.requested}, observed {claim.observed}.{fix}")
    level = "error" if result.effect(claim) == "fail" else _LEVELS[claim.verdict]
    return {
        "ruleId": claim.code.rule,
        "ruleIndex": index,
        "level": level,
        "message": {"text": text},
        "locations": [_location(result, claim)],
        "partialFingerprints": {FINGERPRINT: _fingerprint(claim.code.rule, claim)},
        "properties": {"verdict": claim.verdict, "claim": printable(claim.id), "figures": claim.figures},
    }


def _location(result: VerificationResult, claim: Claim) -> dict[str, Any]:
    file = result.file_of(claim) or result.model
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(file)}}
    physical["region"] = {"startLine": claim.line or 1, "startColumn": claim.column or 1}
    return {"physicalLocation": physical, "logicalLocations": [{"fullyQualifiedName": printable(claim.id)}]}


def _uri(path: str) -> str:
    pure = PurePath(path)
    text = quote(pure.as_posix(), errors="backslashreplace")
    return f"file://{text}" if pure.is_absolute() else text


def _fingerprint(rule: str, claim: Claim) -> str:
    return hashlib.sha256(f"{rule}|{claim.key or ''}|{claim.id}".encode(errors="surrogatepass")).hexdigest()


def to_openmetrics(result: VerificationResult) -> str:
    """Return the text, which ends in ``# EOF``."""
    counts = [({"verdict": verdict}, len(result.of(verdict))) for verdict in VERDICTS]
    passed = [
        ({"claim": claim.id, "section": claim.section, "verdict": claim.verdict}, int(claim.verdict == "pass"))
        for claim in result.claims
    ]
    figures = [
        ({"claim": claim.id, "figure": name}, value) for claim in result.claims for name, value in claim.figures.items()
    ]
    lines = [
        *_family("xrt_verify_claims", "Claims by verdict.", counts),
        *_family("xrt_verify_claim_passed", "Whether a claim passed.", passed),
        *_family("xrt_verify_figure", "Measured figures of claims.", figures),
        *_family("xrt_verify_exit_code", "Exit code of xrt verify.", [({}, result.exit_code)]),
    ]
    return "\n".join([*lines, "# EOF", ""])


def _family(name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterable[str]:
    lines = [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return [f"# TYPE {name} gauge", f"# HELP {name} {text}", *lines] if lines else []


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _escaped(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.17g}" if isinstance(value, float) else str(value)


_PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"


def to_in_toto(result: VerificationResult) -> str:
    """Return the JSON text of the statement: the model is its subject, policy and lock its configuration."""
    if result.model_sha256 is None:
        raise InputError(f"{result.model} has no digest, and an in-toto statement is about a file: verify a model file")
    configuration = [("policy", result.policy, result.policy_sha256), ("lock", result.lock, result.lock_sha256)]
    return statement_text(
        _PREDICATE,
        [descriptor(result.model, result.model_sha256)],
        {
            "result": {"pass": "PASSED", "warn": "WARNED", "inconclusive": "WARNED", "fail": "FAILED"}[result.verdict],
            "configuration": [descriptor(file or what, digest) for what, file, digest in configuration if digest],
            "passedTests": [printable(claim.id) for claim in result.of("pass")],
            "warnedTests": [
                printable(claim.id)
                for claim in result.of("inconclusive", "unobservable")
                if result.effect(claim) != "fail"
            ],
            "failedTests": [printable(claim.id) for claim in result.claims if result.effect(claim) == "fail"],
        },
    )


#: GitHub shows ten annotations of a kind in a step; the last says how many more there are.
_SHOWN = 9
#: Bytes that the summary of a step may have.
_SUMMARY = 1 << 20
_CUT = "\n\nThe rest was cut off, since a summary may have 1 MiB.\n"


def workflow_commands(result: VerificationResult, default: Place | None = None) -> list[str]:
    """Return workflow commands, one a line: errors for what fails, warnings for what is inconclusive otherwise.

    `default` is the file and the line of claims that no line of the policy or the lock states.
    """
    claims = worst_first(result.claims)
    kinds = {"error": [claim for claim in claims if result.effect(claim) == "fail"]}
    kinds["warning"] = [claim for claim in claims if result.effect(claim) in ("undecided", "warn")]
    return [line for kind, claims in kinds.items() for line in _lines(kind, claims, result, default)]


def _lines(kind: str, claims: list[Claim], result: VerificationResult, default: Place | None) -> Iterable[str]:
    shown = claims if len(claims) <= _SHOWN + 1 else claims[:_SHOWN]
    for claim in shown:
        file = result.file_of(claim)
        files = (file, claim.line, claim.column or 1) if file and claim.line else default
        fix = f"\nFix: {claim.fix}" if claim.fix else ""
        text = f"{claim.reason} (requested {claim.requested}, observed {claim.observed}){fix}"
        yield workflow_command(kind, claim.id, text, files)
    if len(shown) < len(claims):
        yield workflow_command(kind, "xrt verify", f"{len(claims) - len(shown)} more in the summary of the job")


def workflow_command(kind: str, title: str, text: str, position: Place | None = None) -> str:
    """Return a workflow command that annotates a file, line and column, where `place` has them.

    GitHub shows paths from the root of the repository; those of files that lie elsewhere stay as they are.
    """
    facts = {}
    if position is not None:
        path, root = Path(position[0]).absolute(), os.environ.get("GITHUB_WORKSPACE")
        facts["file"] = path.relative_to(root).as_posix() if root and path.is_relative_to(root) else str(position[0])
        facts |= {name: str(number) for name, number in zip(("line", "col"), position[1:], strict=False)}
    named = ",".join(f"{name}={escape_property(value)}" for name, value in {**facts, "title": title}.items())
    return f"::{kind} {named}::{escape_data(printable(text))}"


def escape_data(text: str) -> str:
    """Escape the message of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """Escape a property of a workflow command, such as a file name."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def append_summary(result: VerificationResult, path: str | os.PathLike[str]) -> None:
    """Append the Markdown of a verification to the file that ``GITHUB_STEP_SUMMARY`` names.

    The file is that of the step, which its other commands append to, so it is not replaced. Text beyond the
    size that GitHub accepts is cut off.
    """
    target = user_path(path, "GITHUB_STEP_SUMMARY")
    text = to_markdown(result).encode("utf-8", "backslashreplace")
    try:
        room = _SUMMARY - (target.stat().st_size if target.is_file() else 0)
        if len(text) > room:
            kept = text[: max(room - len(_CUT), 0)].decode("utf-8", "ignore")
            text = (kept.rpartition("\n")[0] + _CUT).encode() if kept else b""
        with target.open("ab") as file:
            file.write(text)
    except OSError as error:
        fix = "unset GITHUB_STEP_SUMMARY, or leave --github out"
        raise InputError(f"cannot write the summary to '{target}': {reason_of(error)}. Fix: {fix}") from error


def _to_json(result: VerificationResult) -> str:
    return printable(result.to_json()) + "\n"


#: Format to the file that GitLab reads it from: ``artifacts:reports:junit`` and ``artifacts:reports:metrics`` of a job.
GITLAB_REPORTS = {"junit": "xrt-junit.xml", "openmetrics": "metrics.txt"}


def write_output(result: VerificationResult, format: str, path: str | os.PathLike[str]) -> Path:
    """Write a verification to a file, which is replaced as a whole or not at all."""
    if format not in FORMATS:
        raise InputError(f"{format!r} is not a format of verifications; formats: {', '.join(FORMATS)}")
    return write_whole(path, FORMATS[format](result), f"the verification as {format}")


_MARK = {"pass": "✅", "fail": "❌", "inconclusive": "⚠️", "unobservable": "❔", "skipped": "⏭️"}
_SPECIAL = re.compile(r"[\\`*_\[\]#|~<>@&]")


def to_markdown(result: VerificationResult) -> str:
    """Return Markdown in which all text of the result is text: no markup, link or mention is made of it."""
    lines = [f"## {_plain(result.headline)}", ""]
    where = f" on {_plain(f'{result.engine}@{result.device}')}" if result.engine else ""
    lines += [f"{_code(result.model)}{where}", ""]
    claims = worst_first(result.claims)
    if claims:
        lines += ["| claim | requested | observed | verdict |", "|---|---|---|---|"]
        lines += [_row(claim) for claim in claims]
        lines.append("")
    reasons = [claim for claim in claims if claim.verdict != "pass"]
    if reasons:
        lines += ["### Reasons", ""]
        for reason in reasons:
            text = place_text(result, reason)
            lines.append(f"* {_code(reason.id)}: {_plain(reason.reason)}" + (f" ({_code(text)})" if text else ""))
            if reason.fix:
                lines.append(f"  Fix: {_plain(reason.fix)}")
        lines.append("")
    if result.notes:
        lines += ["### Notes", "", *(f"* {_plain(note)}" for note in result.notes), ""]
    return "\n".join(lines)


def _row(claim: Claim) -> str:
    verdict = f"{_MARK[claim.verdict]} {claim.verdict}"
    return f"| {_code(claim.id)} | {_plain(claim.requested)} | {_plain(claim.observed)} | {verdict} |"


def _plain(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", printable(" ".join(text.split())))


def _code(text: str) -> str:
    """Return text as code; pipes, which would end a cell of a table, as entities in plain text."""
    line = printable(" ".join(text.split()))
    return _plain(line) if "|" in line or "`" in line or not line else f"`{line}`"


_PARTS = ("elements", "sorting", "intervals", "verified", "shell", "verification")


def render_page(result: VerificationResult) -> str:
    """Return the page. It loads nothing, from nowhere, and shows all text of the result as text."""
    name = result.model.replace("\\", "/").rpartition("/")[2]
    return assemble(
        "verification.html",
        "verification",
        _PARTS,
        f"{result.headline} - {name}",
        _data(result),
        _fragment(result),
    )


def _data(result: VerificationResult) -> dict[str, Any]:
    names = ("model", "policy", "lock", "engine", "device", "created", "version")
    return {
        "headline": result.headline,
        "verdict": result.verdict,
        "exit": result.exit_code,
        "known": [[name, value] for name in names if (value := getattr(result, name))],
        "claims": [_claim(result, claim) for claim in worst_first(result.claims)],
        "sections": [section for section in SECTIONS if any(claim.section == section for claim in result.claims)],
        "facts": [list(pair) for pair in result.facts.items()],
        "notes": list(result.notes),
    }


def _claim(result: VerificationResult, claim: Claim) -> dict[str, Any]:
    return {
        "id": claim.id,
        "section": claim.section,
        "requested": claim.requested,
        "observed": claim.observed,
        "verdict": claim.verdict,
        "rule": "" if claim.verdict == "pass" else claim.code.rule,
        "reason": claim.reason,
        "fix": claim.fix or "",
        "place": place_text(result, claim),
        "figures": [[name, f"{value:.6g}"] for name, value in claim.figures.items()],
        "interval": _interval(claim),
    }


def _interval(claim: Claim) -> dict[str, float | None] | None:
    known = claim.figures
    if "margin" in known:
        return {"value": known["ratio"], "low": known["low"], "high": known["high"], "limit": 1 + known["margin"]}
    if "locked_ratio" in known and "ratio" in known:
        value, low, high = (known[name] / known["locked_ratio"] for name in ("ratio", "low", "high"))
        return {"value": value, "low": low, "high": high, "limit": None}
    for figure, limit, locked in (("peak_bytes", "limit_bytes", "locked_bytes"), ("seconds", "limit_seconds", "")):
        if figure in known and limit in known:
            base = known.get(locked, known[limit])
            return {"value": known[figure] / base, "limit": known[limit] / base}
    if known.get("before_bytes"):
        return {"value": known["after_bytes"] / known["before_bytes"]}
    return None


def _fragment(result: VerificationResult) -> str:
    """Return headline and claims, for browsers without scripts."""
    kind = {"pass": "honoured", "fail": "substituted"}.get(result.verdict, "unobservable")
    rows = [
        (claim.id, claim.requested, claim.observed, Badge(claim.verdict), claim.reason)
        for claim in worst_first(result.claims)
    ]
    head = f"<p class='xrt-headline xrt-{kind}'>{escaped(result.headline)}</p>"
    columns = ("claim", "requested", "observed", "verdict", "reason")
    return fragment([head, fragment_table("Claims", columns, rows)])


#: Name of a format to what writes a verification as text.
FORMATS: dict[str, Callable[[VerificationResult], str]] = {
    "json": _to_json,
    "md": to_markdown,
    "junit": to_junit,
    "sarif": to_sarif,
    "openmetrics": to_openmetrics,
    "html": render_page,
    "intoto": to_in_toto,
}
