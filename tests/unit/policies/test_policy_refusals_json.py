# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is refused in a JSON file, with the place and the words of the message."""

from __future__ import annotations

import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies import Policy

JSON = [
    ('{"mode": "strict",\n "kernals": {}}', "2:2: unknown key 'kernals' in the policy; did you mean 'kernels'?"),
    ('{"mode": "strict", "mode": "prefer"}', "1:20: duplicate key 'mode': it is already set on line 1"),
    ('{"mode": 3}', "1:10: mode: got the number 3. Fix: state one of prefer, strict, au"),
    ('{"execution": {"tf32": "off"}}', "1:24: execution.tf32: got text 'off'. Fix: state true or false"),
    (
        '{"execution": {"threads": 1e2}}',
        "1:27: execution.threads: got the number 100.0. Fix: state a whole number from 1 to 40",
    ),
    ('{"accuracy": {"rtol": NaN}}', "1:23: not valid JSON: expected a value, found NaN"),
    ('{"accuracy": {"rtol": 1e999}}', "1:23: accuracy.rtol: the number inf is out of range"),
    ('{"accuracy": {"rtol": ' + "9" * 5000 + "}}", "1:23: not valid JSON: a number with too many digits"),
    ("", '1:1: the file is empty. Fix: state a key, such as {"mode": "strict"} in a policy'),
    ("[]", "1:1: got a list. Fix: state a mapping such as {schema: .."),
    (
        '"mode: strict"',
        "1:1: got text 'mode: strict'; a space must follow the colon of each key. Fix: state a mapping such as ",
    ),
    ("mode: strict", '1:1: not valid JSON: expected a value, found mode. Fix: write "mode"'),
    ("{'mode': 1}", "1:2: not valid JSON: expected a key in double quotes"),
    ('{"mode" "strict"}', "1:9: not valid JSON: expected ':' after a key"),
    ('{"mode": "strict",}', "1:19: not valid JSON: expected a key in double quotes"),
    ('{"mode":', "1:9: not valid JSON: expected a value, found the end"),
    ('{"execution": {"engine": ["a" "b"]}}', "1:31: not valid JSON: expected ',' or ']'"),
    ('{"mode": "str', "1:10: not valid JSON: unterminated string starting"),
    ('{"mode": "a\\q"}', "1:12: not valid JSON: invalid \\escape"),
    ('{"mode": "a\nb"}', "1:12: not valid JSON: invalid control character"),
    ('{"mode": "strict"} {}', "1:20: not valid JSON: more text after the end of the policy"),
    ('{"kernels": {"rules": [{"match": {"node": "\\ud800"}, "use": "auto"}]}}', "1:43: kernels.rules[0].match.node: "),
    ('// note\n{"mode": "strict"}', "1:1: not valid JSON: expected a value, found '/'"),
]


@pytest.mark.parametrize(("text", "message"), JSON, ids=[text[:40] for text, _ in JSON])
def test_json_refusals(text, message):
    with pytest.raises(PolicyError) as error:
        Policy.loads(text, "json", name="policy.json")
    assert str(error.value).startswith("policy.json:" + message), str(error.value)
    assert " Fix: " in str(error.value)
