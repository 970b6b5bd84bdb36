# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Each output format, read back by a parser that is not ours."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from claim_records import HOSTILE, claim, result
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuruntime.errors import InputError
from xpuruntime.locks.verification.formats import (
    FINGERPRINT,
    FORMATS,
    append_summary,
    escape_data,
    escape_property,
    to_in_toto,
    to_junit,
    to_markdown,
    to_openmetrics,
    to_sarif,
    workflow_commands,
    write_output,
)

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_written_as_utf8_without_control_characters(tmp_path, mixed, format):
    path = write_output(mixed, format, tmp_path / "out")
    text = path.read_bytes().decode("utf-8")
    assert text
    assert not CONTROLS.search(text.replace("\r", ""))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_cannot_be_written_is_named(tmp_path, mixed, format):
    with pytest.raises(InputError, match="cannot write the verification"):
        mixed.save(tmp_path / "nowhere" / "out", format)


def test_an_unknown_format_is_refused(tmp_path, mixed):
    with pytest.raises(InputError, match="'xml' is not a format of verifications; formats: json, md, junit"):
        mixed.save(tmp_path / "out", "xml")


class TestJUnit:
    def test_suites_cases_and_counts(self, mixed):
        root = ET.fromstring(to_junit(mixed))
        assert root.tag == "testsuites"
        assert [suite.get("name") for suite in root] == ["xrt.evidence", "xrt.accuracy"]
        for suite in (root, *root):
            cases = list(suite.iter("testcase"))
            assert int(suite.get("tests")) == len(cases)
            assert int(suite.get("failures")) == sum(case.find("failure") is not None for case in cases)
            if suite is not root:
                assert int(suite.get("skipped")) == sum(case.find("skipped") is not None for case in cases)
            assert suite.get("errors") == "0"

    def test_the_order_and_attributes_that_the_format_requires(self, mixed):
        for suite in ET.fromstring(to_junit(mixed)):
            assert suite[0].tag == "properties"
            assert {"name", "tests", "failures", "errors", "time", "timestamp", "hostname"} <= set(suite.keys())
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp"))
            for case in suite.findall("testcase"):
                assert set(case.keys()) == {"classname", "name", "time"}
                assert sum(child.tag in ("failure", "skipped") for child in case) <= 1
                for child in case:
                    assert child.tag in ("failure", "skipped")
                    assert child.get("message")

    def test_verdicts(self, mixed):
        cases = {one.get("name"): one for one in ET.fromstring(to_junit(mixed)).iter("testcase")}
        failure = cases["execution.precision"].find("failure")
        assert (failure.get("type"), failure.get("message")) == ("substituted", "a reason")
        assert "fix: do this" in failure.text
        assert "policies/my policy,a:b%.yaml:7:3" in failure.text
        assert cases["kernels.matmul"].find("skipped").get("message") == "unobservable: a reason"
        assert cases["logits"].find("skipped").get("message") == "inconclusive: a reason"
        assert len(cases["execution.engine"]) == 0
        suite = ET.fromstring(to_junit(mixed))[0]
        figures = {one.get("name"): one.get("value") for one in suite.find("properties")}
        assert float(figures["execution.precision: units"]) == 4.0
        assert float(figures["execution.precision: share"]) == 0.1

    def test_inconclusive_that_fails_is_a_failure(self):
        text = to_junit(result(claim("speed.latency.p50", "inconclusive"), inconclusive="fail"))
        assert ET.fromstring(text).find(".//failure") is not None

    @given(st.text())
    @settings(max_examples=60, deadline=None)
    def test_any_text_is_well_formed_xml(self, text):
        root = ET.fromstring(to_junit(result(claim("accuracy.x", "fail", reason=text, observed=text), model=text)))
        assert root.find(".//failure") is not None


class TestSarif:
    def test_results_rules_and_places(self, mixed):
        log = json.loads(to_sarif(mixed))
        assert log["version"] == "2.1.0"
        [run] = log["runs"]
        rules = run["tool"]["driver"]["rules"]
        assert [rule["id"] for rule in rules] == sorted({rule["id"] for rule in rules})
        found = {one["properties"]["claim"]: one for one in run["results"]}
        assert len(found) == 4  # those that failed, are inconclusive or unobservable
        for one in found.values():
            assert rules[one["ruleIndex"]]["id"] == one["ruleId"]
            place = one["locations"][0]["physicalLocation"]
            assert place["artifactLocation"]["uri"] == "policies/my%20policy%2Ca%3Ab%25.yaml"
            assert place["region"]["startLine"] >= 1
            assert one["message"]["text"]
        precision = found["evidence.execution.precision"]
        assert (precision["level"], precision["ruleId"]) == ("error", "XRT1001")
        assert precision["locations"][0]["physicalLocation"]["region"] == {"startLine": 7, "startColumn": 3}
        assert found["evidence.kernels.matmul"]["level"] == "note"
        assert found["accuracy.logits"]["level"] == "warning"

    def test_fingerprints_tell_claims_apart_and_stay_the_same(self, mixed):
        def prints(text):
            return [one["partialFingerprints"][FINGERPRINT] for one in json.loads(text)["runs"][0]["results"]]

        first = prints(to_sarif(mixed))
        assert len(set(first)) == len(first)
        moved = result(*(claim(one.id, one.verdict, code=one.code, key=one.key, line=99) for one in mixed.claims))
        assert prints(to_sarif(moved)) == first
        assert all(re.fullmatch("[0-9a-f]{64}", one) for one in first)

    def test_all_passed_is_a_run_without_results(self):
        [run] = json.loads(to_sarif(result(claim("evidence.x"))))["runs"]
        assert run["results"] == []
        assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 0}]


def unescape(text: str, *, property: bool) -> str:
    """Read a part of a workflow command as GitHub's runner does."""
    pairs = [("%0D", "\r"), ("%0A", "\n"), *([("%3A", ":"), ("%2C", ",")] if property else []), ("%25", "%")]
    for escape, character in pairs:
        text = text.replace(escape, character)
    return text


class TestGitHub:
    @given(st.text())
    @settings(max_examples=200, deadline=None)
    def test_escapes_are_read_back(self, text):
        assert unescape(escape_data(text), property=False) == text
        assert unescape(escape_property(text), property=True) == text
        assert not set("\r\n").intersection(escape_data(text))
        assert not set("\r\n:,").intersection(escape_property(text))

    def test_commands(self, mixed):
        lines = workflow_commands(mixed)
        kinds = [re.fullmatch(r"::(error|warning) ([^\r\n]*?)::([^\r\n]*)", line) for line in lines]
        assert all(kinds)
        assert [kind[1] for kind in kinds] == ["error", "error", "warning"]
        facts = dict(pair.split("=", 1) for pair in kinds[0][2].split(","))
        assert unescape(facts["file"], property=True) == mixed.policy
        assert (facts["line"], facts["col"], facts["title"]) == ("7", "3", "evidence.execution.precision")
        assert unescape(kinds[0][3], property=False).endswith("\nFix: do this")

    @pytest.mark.parametrize(("count", "shown"), [(1, 1), (10, 10), (11, 10), (200, 10)])
    def test_ten_of_a_kind_at_most(self, count, shown):
        lines = workflow_commands(result(*(claim(f"accuracy.o{i}", "fail") for i in range(count))))
        assert len(lines) == shown
        assert ("more in the summary" in lines[-1]) == (count > 10)
        if count > 10:
            assert lines[-1].endswith(f"::{count - 9} more in the summary of the job")

    def test_what_passes_by_consent_is_not_annotated(self):
        undecided = claim("speed.latency.p50", "inconclusive")
        assert workflow_commands(result(undecided, inconclusive="pass")) == []
        assert workflow_commands(result(undecided, inconclusive="warn"))[0].startswith("::warning ")
        assert workflow_commands(result(undecided, inconclusive="fail"))[0].startswith("::error ")

    def test_the_summary_is_appended_and_cut_off_at_one_mebibyte(self, tmp_path, mixed):
        path = tmp_path / "summary.md"
        path.write_text("before\n")
        append_summary(mixed, path)
        assert path.read_text(encoding="utf-8") == "before\n" + to_markdown(mixed)
        many = result(*(claim(f"accuracy.{'가' * 100}{i}", "fail") for i in range(5000)))
        for _ in range(3):
            append_summary(many, path)
        assert path.stat().st_size <= 1 << 20
        assert "The rest was cut off" in path.read_text(encoding="utf-8")

    def test_a_summary_that_cannot_be_written_is_named(self, tmp_path, mixed):
        with pytest.raises(InputError, match="cannot write the summary"):
            append_summary(mixed, tmp_path / "nowhere" / "summary.md")


class TestOpenMetrics:
    LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')

    def test_every_line_is_one_of_the_format(self, mixed):
        lines = to_openmetrics(mixed).split("\n")
        assert lines[-2:] == ["# EOF", ""]
        families = set()
        for line in lines[:-2]:
            if line.startswith("# TYPE "):
                name = line.split()[2]
                assert name not in families
                families.add(name)
            elif not line.startswith("# HELP "):
                match = self.LINE.fullmatch(line)
                assert match, line
                assert match[1] in families
                float(match[3])

    def test_counts_and_figures(self, mixed):
        text = to_openmetrics(mixed)
        assert 'xrt_verify_claims{verdict="fail"} 2\n' in text
        assert 'xrt_verify_figure{claim="evidence.execution.precision",figure="units"} 4\n' in text
        assert "xrt_verify_exit_code 1\n" in text


class TestInToto:
    def test_the_statement(self, mixed):
        statement = json.loads(to_in_toto(mixed))
        assert statement["_type"] == "https://in-toto.io/Statement/v1"
        assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
        assert statement["subject"] == [{"name": "model.onnx", "digest": {"sha256": "0" * 64}}]
        predicate = statement["predicate"]
        assert predicate["result"] == "FAILED"
        assert predicate["configuration"] == [{"name": "my policy,a:b%.yaml", "digest": {"sha256": "1" * 64}}]
        assert predicate["passedTests"] == ["evidence.execution.engine"]
        assert "evidence.execution.precision" in predicate["failedTests"]
        assert predicate["warnedTests"] == ["evidence.kernels.matmul", "accuracy.logits"]

    @pytest.mark.parametrize(("verdict", "word"), [("pass", "PASSED"), ("inconclusive", "WARNED"), ("fail", "FAILED")])
    def test_the_result(self, verdict, word):
        assert json.loads(to_in_toto(result(claim("evidence.x", verdict))))["predicate"]["result"] == word

    def test_a_model_without_a_digest_is_refused(self):
        with pytest.raises(InputError, match="has no digest"):
            to_in_toto(result(claim("evidence.x"), model_sha256=None))


class TestMarkdown:
    def test_a_row_a_claim_with_four_cells(self, mixed):
        rows = [line for line in to_markdown(mixed).splitlines() if line.startswith("| ")]
        assert len(rows) == 1 + len(mixed.claims)
        assert all(len(re.split(r"(?<!\\)\|", row)) == 6 for row in rows)

    def test_text_of_a_result_is_no_markup(self, mixed):
        text = to_markdown(mixed)
        assert "<b>" not in text
        assert "@team" not in text
        assert "`c`" not in text


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self.inside = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = dict(attrs).get("id") if tag == "script" else None

    def handle_data(self, data):
        if self.inside:
            self.data[self.inside] = self.data.get(self.inside, "") + data


class TestPage:
    def test_data_is_read_back_and_nothing_is_loaded(self, mixed):
        page = Page(mixed.to_html())
        data = json.loads(page.data["data"])
        assert data["headline"] == mixed.headline
        assert [one["verdict"] for one in data["claims"]][:3] == ["fail", "fail", "inconclusive"]
        assert {one["id"] for one in data["claims"]} >= {"evidence.execution.precision"}
        assert not {"link", "img", "iframe", "object", "embed", "base", "form"}.intersection(page.tags)
        assert "<b>&amp;" not in mixed.to_html().partition("<noscript>")[2].partition("</noscript>")[0]

    def test_hostile_text_reaches_the_page_as_text(self, mixed):
        data = json.loads(Page(mixed.to_html()).data["data"])
        assert any("<b>" in one["reason"] and "\\u001b" in one["reason"] for one in data["claims"])
        assert "\x1b" not in mixed.to_html()
        assert HOSTILE[:5] in data["claims"][1]["reason"]
