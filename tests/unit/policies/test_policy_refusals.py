# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is refused in a YAML file, with the place and the words of the message."""

from __future__ import annotations

import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies import Policy

YAML = [
    # keys
    (
        "mode: strict\nkernals: {}",
        "2:1: unknown key 'kernals' in the policy; did you mean 'kernels'? Valid keys: schema, mode,",
    ),
    (
        "xyz: 1",
        "1:1: unknown key 'xyz' in the policy. Valid keys: schema, mode, execution, kernels, auto_strategy, "
        "tuning, accuracy, calibration, verify.",
    ),
    (
        "execution:\n  memory:\n    limt: 1",
        "3:5: unknown key 'limt' in execution.memory; did you mean 'limit'? Valid keys: pool, limit.",
    ),
    (
        "kernels: {auto_strategy: first_supported}",
        "1:11: unknown key 'auto_strategy' in kernels; it belongs in the top level of the file.",
    ),
    ("tuning: {min_effect: 2}", "1:22: tuning.min_effect: the number 2 is out of range. Fix: write '2%'"),
    ("tuning: {budget: 3}", "1:18: tuning.budget: the number 3 has no unit. Fix: write '3s' for seconds"),
    (
        "kernels: {precision: fp16}",
        "1:11: unknown key 'precision' in kernels; it belongs in 'execution' or 'kernels.rules[]'.",
    ),
    (
        "kernels: {rules: [{match: {opp: matmul}, use: auto}]}",
        "1:28: unknown key 'opp' in kernels.rules[0].match; did you mean 'op'?",
    ),
    ("verify: {speed: {max_slowdown: -5%}}", "1:32: verify.speed.max_slowdown: '-5%' is not a share"),
    ("verify: {memory: {max_growth: 1001%}}", "1:31: verify.memory.max_growth: '1001%' is out of range"),
    ("verify: {start: .nan}", "1:17: verify.start: the number nan is not a duration. Fix: state a duration such as"),
    ("verify: {start: 20 sec}", "1:17: verify.start: '20 sec' is not a duration: unit 'sec' is not known"),
    ("verify: {start: 0s}", "1:17: verify.start: '0s' is out of range. Fix: state a duration from 1ms"),
    ("verify: {metrics: {top-1: 1}}", "1:20: verify.metrics: 'top-1' is not the name of a Python function"),
    ("mode: strict\nmode: prefer", "2:1: duplicate key 'mode': it is already set on line 1"),
    ("[a]: b", "1:1: a key must be a name, not a list or a mapping"),
    (
        "execution: {shapes: [1, 2]}",
        "1:21: execution.shapes: got a list. Fix: state a mapping of input to its dimensions, such as {image: [1, ",
    ),
    ("execution: {shapes: {x: 3}}", "1:25: execution.shapes.x: got the number 3. Fix: state a list of sizes such a"),
    (
        "execution: {shapes: {x: [1, -1]}}",
        "1:29: execution.shapes.x[1]: the number -1 is out of range. Fix: state a size such as 8, ",
    ),
    (
        "execution: {shapes: {x: [batch]}}",
        "1:26: execution.shapes.x[0]: 'batch' is not a size. Fix: state a size such as 8, ",
    ),
    ("execution: {shapes: {x: [null]}}", "1:26: execution.shapes.x[0]: has no value. Fix: state a size such as 8, "),
    (
        "execution: {shapes: {x: [1..99..3]}}",
        "1:26: execution.shapes.x[0]: '1..99..3' is an empty range. Fix: write '1..3..99'",
    ),
    ("execution: {shapes: {' ': [3]}}", "1:22: execution.shapes: an input needs a name"),
    (
        "execution: {static_shape: true, shapes: {x: [1..9]}}",
        "1:27: execution.static_shape: true contradicts the range in shapes.x. Fix: state one size for each dimension",
    ),
    (
        "execution: {artifacts: {cache: defualt}}",
        "1:32: execution.artifacts.cache: 'defualt' is neither 'off', 'default' nor a path; did you mean 'default'? "
        "Valid words:",
    ),
    ("~: b", "1:1: a key must be a name, got nothing"),
    ("<<: {mode: strict}", "1:1: unknown key '<<' in the policy"),
    # words
    (
        "mode: strct",
        "1:7: mode: 'strct' is not a valid value; did you mean 'strict'? Valid modes: prefer, strict, auto.",
    ),
    ("mode: Strict", "1:7: mode: 'Strict' is not a valid value; did you mean 'strict'?"),
    ("execution:\n  precision: fp8", "2:14: execution.precision: 'fp8' is not a valid value; did you mean "),
    ("execution: {determinism: no}", "1:26: execution.determinism: 'no' is not a valid value; did you mean 'none'?"),
    (
        "schema: xpuruntime.policy/2",
        "1:9: schema: 'xpuruntime.policy/2' is not a version that this release reads; upgrade xpuruntime to read it. Fix: write xpuruntime.policy/",  # noqa: E501
    ),
    # types
    ("mode: [strict]", "1:7: mode: got a list. Fix: state one of prefer, strict, au"),
    ("mode:", "1:6: mode: has no value. Fix: state one of prefer, strict, au"),
    ("execution:", "1:11: execution: has no value. Fix: state a mapping"),
    ("kernels: {rules: [3]}", "1:19: kernels.rules[0]: got the number 3. Fix: state a mapping such as {match: .."),
    ("execution: {static_shape: 1}", "1:27: execution.static_shape: got the number 1. Fix: state true or false"),
    (
        "execution: {threads: 2.0}",
        "1:22: execution.threads: got the number 2.0. Fix: state a whole number from 1 to 40",
    ),
    ("execution: {threads: true}", "1:22: execution.threads: got true. Fix: state a whole number from 1 to 40"),
    (
        "execution: {provider_options: []}",
        "1:31: execution.provider_options: got a list. Fix: state a mapping of engine to a mapp",
    ),
    (
        "execution: {provider_options: {a: {b: [1]}}}",
        "1:39: execution.provider_options.a.b: got a list. Fix: state text, a number, true or fal",
    ),
    (
        "execution: {provider_options: {a b: {}}}",
        "1:32: execution.provider_options: 'a b' cannot be the name of an engine",
    ),
    # numbers
    (
        "execution: {threads: 0}",
        "1:22: execution.threads: the number 0 is out of range. Fix: state a whole number from 1 to 40",
    ),
    (
        "execution: {threads: 99999999999999999999999}",
        "1:22: execution.threads: the number 99999999999999999999999 is out of range",
    ),
    (
        "accuracy: {rtol: .nan}",
        "1:18: accuracy.rtol: the number nan is out of range. Fix: state a finite number, 0 or mo",
    ),
    ("accuracy: {atol: -1e-3}", "1:18: accuracy.atol: the number -0.001 is out of range"),
    ("accuracy: {rtol: 1" + "0" * 400 + "}", "1:18: accuracy.rtol: "),
    ("execution: {provider_options: {a: {b: .nan}}}", "1:39: execution.provider_options.a.b: is not a finite number"),
    (
        "execution: {provider_options: {a: {b: 36893488147419103232}}}",
        "1:39: execution.provider_options.a.b: is out of range",
    ),
    # sizes
    (
        "execution: {memory: {limit: 8gb}}",
        "1:29: execution.memory.limit: '8gb' is not a size: unit 'gb' is not known; did you mean '8GB'?",
    ),
    (
        "execution: {memory: {limit: '8'}}",
        "1:29: execution.memory.limit: '8' is not a size: no unit is given. Valid units:",
    ),
    (
        "execution: {memory: {limit: 0}}",
        "1:29: execution.memory.limit: the number 0 is out of range. Fix: state a size from 1 byte",
    ),
    ("execution: {memory: {limit: 99999999TiB}}", "1:29: execution.memory.limit: text '99999999TiB' is out of range"),
    ("execution: {memory: {limit: 0.3B}}", "1:29: execution.memory.limit: '0.3B' is not a whole number of bytes"),
    ("execution: {memory: {limit: true}}", "1:29: execution.memory.limit: "),
    # lists
    ("execution: {engine: []}", "1:21: execution.engine: the list is empty. Fix: write 'auto' instead"),
    ("execution: {engine: [auto]}", "1:22: execution.engine[0]: 'auto' stands alone. Fix: write 'auto' without a l"),
    ("execution: {engine: [a, a]}", "1:25: execution.engine[1]: 'a' is listed twice"),
    ("kernels: {conv: [auto, cudnn]}", "1:24: kernels.conv[1]: nothing can come after 'auto', which accepts anything"),
    # names
    (
        "execution: {engine: onnxruntime@cpu}",
        "1:21: execution.engine: 'onnxruntime@cpu' cannot be the name of an engine. Fix: write letters, digits, '",
    ),
    ("execution: {engine: ''}", "1:21: execution.engine: is empty. Fix: state the name of an engi"),
    (
        "execution: {fallback: onnxruntime}",
        "1:23: execution.fallback: 'onnxruntime' names no device. Fix: write 'engine@device', such as 'onnxruntime",
    ),
    *(
        (
            f"execution: {{fallback: {word}}}",
            f"1:23: execution.fallback: '{word}' names no device. Fix: write 'engine@device'",
        )
        for word in ("allow", "warn")
    ),
    (
        "execution: {fallback: 'cuda:0'}",
        "1:23: execution.fallback: 'cuda:0' names no engine. Fix: write 'engine@device', such as 'onnxruntime@cu",
    ),
    ("execution: {fallback: onnxruntime@auto}", "1:23: execution.fallback: 'onnxruntime@auto' names no certain device"),
    ("execution: {allow_cpu_ops: [Shape, 'a b']}", "1:36: execution.allow_cpu_ops[1]: 'a b' is not an operator type"),
    (
        "execution: {device: cudda:0}",
        "1:21: execution.device: 'cudda:0' is not a device; did you mean 'cuda:0'? Valid kinds: cpu,",
    ),
    (
        "kernels: {matmul: cublaslt}",
        "1:19: kernels.matmul: 'cublaslt' is not a known kernel for matmul; did you mean 'cublasLt'? Valid kernels: auto,",  # noqa: E501
    ),
    (
        "kernels: {matmul: flash_v2}",
        "1:19: kernels.matmul: 'flash_v2' is a kernel of attention, not of matmul. Valid kernels: auto,",
    ),
    (
        "kernels: {matmul: a.b.c}",
        "1:19: kernels.matmul: 'a.b.c' is not a kernel id: an id is 'backend.name', with one dot",
    ),
    (
        "accuracy: {reference: onnxruntime, rtol: 1}",
        "1:23: accuracy.reference: 'onnxruntime' is not a reference. Fix: state 'engine.device.precisio",
    ),
    (
        "accuracy: {reference: a.auto.fp32, rtol: 1}",
        "1:23: accuracy.reference: 'a.auto.fp32' is not a reference: its device is 'auto'. Fix: name one",
    ),
    ('execution: {engine: "a\\tb"}', "1:21: execution.engine: 'a\\tb' holds the character U+0009"),
    # keys that do not go together
    ("execution:\n  tf32: off\n  precision: tf32", "2:9: execution.tf32: false contradicts precision 'tf32'"),
    ("accuracy:\n  reference: a.cpu.fp32", "2:3: accuracy: states no limit. Fix: state 'rtol', 'atol' or 'co"),
    ("kernels:\n  rules:\n  - use: torch", "3:5: kernels.rules[0]: needs 'match'"),
    (
        "kernels:\n  rules:\n  - match: {op: conv}",
        "3:5: kernels.rules[0]: asks for nothing. Fix: state 'use', 'precision' or",
    ),
    (
        "kernels:\n  rules:\n  - match: {}\n    use: torch",
        "3:12: kernels.rules[0].match: states no key, so it would match everything",
    ),
    (
        "kernels:\n  rules:\n  - match: {op: conv}\n    use: [cudnn, flash_v2]",
        "4:18: kernels.rules[0].use[1]: 'flash_v2' is a kernel of attention, not of conv.",
    ),
    # conditions
    (
        "kernels: {rules: [{match: {m: '<=x'}, use: auto}]}",
        "1:31: kernels.rules[0].match.m: '<=x' is not a condition. Fix: state a whole number such as ",
    ),
    (
        "kernels: {rules: [{match: {m: 9999999999999999999}, use: auto}]}",
        "1:31: kernels.rules[0].match.m: the number 9999999999999999999 is out of range",
    ),
    ("kernels: {rules: [{match: {m: true}, use: auto}]}", "1:31: kernels.rules[0].match.m: "),
    (
        "kernels: {rules: [{match: {device: sm9}, use: auto}]}",
        "1:36: kernels.rules[0].match.device: 'sm9' is not a device",
    ),
    (
        "kernels: {rules: [{match: {phase: [train, trian]}, use: auto}]}",
        "1:43: kernels.rules[0].match.phase[1]: 'trian' is not a valid value; did you mean 'train'?",
    ),
    # YAML itself
    ("", "1:1: the file is empty. Fix: state a key, such as 'mode: strict' in a policy"),
    ("# only a comment\n", "1:1: the file is empty"),
    ("---\n...\n", "2:1: got nothing. Fix: state a mapping such as {schema: .."),
    ("just text", "1:1: got text 'just text'. Fix: state a mapping such as {schema: .."),
    (
        "mode:strict",
        "1:1: got text 'mode:strict'; a space must follow the colon of each key. Fix: state a mapping such as {schema: ..",  # noqa: E501
    ),
    ("mode: &x strict", "1:7: anchor '&x' is not allowed: in a policy each value is written where it is used"),
    (
        "kernels: {rules: [{match: {node: *attn}, use: auto}]}",
        "1:34: alias '*attn' is not allowed: in a policy each value is written where it is used. Fix: write the value, or a pattern as ",  # noqa: E501
    ),
    (
        "mode: !!python/object/apply:os.system [echo]",
        "1:7: tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed",
    ),
    ("mode: strict\n---\nmode: prefer", "2:1: a second document starts here. Fix: delete the line '---', o"),
    ("mode: [", "2:1: not valid YAML: did not find expected node content (while parsing a flow node)"),
    (
        "execution:\n\tmode: x",
        "2:1: not valid YAML: found character that cannot start any token (while scanning for the next token). Fix: indent with spaces, not with",  # noqa: E501
    ),
    ("kernels:\n  rules:\n  - match:\n      m: >=16", "4:11: not valid YAML: "),
    ("mode: 'strict", "1:14: not valid YAML: found unexpected end of stream"),
    ("mode: \x00", "not valid YAML"),
    ("mode: \ud800", "not valid YAML"),
]


SYNTAX = {
    "execution: {device: cpu\nmode: strict": "close the '{' of line 1 with '}'",
    "kernels:\n  matmul: [a\nmode: strict": "close the '[' of line 2 with ']'",
    "execution:\n  device: cpu\n mode: strict": (
        "begin the line in column 1, as the keys from line 1 do, or in column 3, as line 2 does"
    ),
    "- a\nmode: strict": "begin the line with '- ' in column 1, as line 1 does",
    "mode: strict\n  execution: {}": "begin the line in the column of the key above it",
    "execution:\n device: cpu\n  tuning: {a: 1, b: 2}": "begin the line in the column of the key above it",
    "mode strict\nexecution: {}": "write line 1 as 'key: value'",
    'mode: "strict\n': "close the quote of line 1",
    'mode: "\\q"': "write the text of line 1 in single quotes",
    "mode: >=16": 'write mode: ">=16"',
    "mode: strict: 5": 'write mode: "strict: 5"',
    "mode: 'it's'": """write mode: "'it's'\"""",
    "mode: *": 'write mode: "*"',
    "mode: \x01": "delete the character",
    "%FOO": "write each line as 'key: value'",
}


@pytest.mark.parametrize("text", SYNTAX)
def test_a_fault_of_syntax_is_mended_as_the_error_says(text):
    with pytest.raises(PolicyError, match="not valid YAML") as error:
        Policy.loads(text)
    assert str(error.value).partition(" Fix: ")[2] == SYNTAX[text]


@pytest.mark.parametrize(("text", "message"), YAML, ids=[text[:40] for text, _ in YAML])
def test_yaml_refusals(text, message):
    with pytest.raises(PolicyError) as error:
        Policy.loads(text, name="policy.yaml")
    said = str(error.value)
    start = "policy.yaml:" if message[0].isdigit() else "policy.yaml: "
    assert said.startswith(start + message), said
    assert " Fix: " in said, said
    assert "\n" not in said
    assert len(said) < 600


def test_every_fault_of_a_file_is_named_in_one_error():
    text = (
        "moode: strict\nexecution: {engin: ort, device: xpu}\nkernels: {rules: [{match: {op: matmull}, use: auto}, 3]}"
    )
    with pytest.raises(PolicyError) as error:
        Policy.loads(text, name="policy.yaml")
    lines = str(error.value).split("\n  ")
    begins = [
        "policy.yaml:1:1: unknown key 'moode' in the policy; did you mean 'mode'?",
        "policy.yaml:2:13: unknown key 'engin' in execution; did you mean 'engine'?",
        "policy.yaml:2:33: execution.device: 'xpu' is not a device",
        "policy.yaml:3:32: kernels.rules[0].match.op: 'matmull' is not",
        "policy.yaml:3:54: kernels.rules[1]: got the number 3",
    ]
    assert [line[: len(begin)] for line, begin in zip(lines, begins, strict=True)] == begins


def test_an_error_names_eight_faults_and_counts_the_rest():
    with pytest.raises(PolicyError) as error:
        Policy.loads("\n".join(f"key_{index}: 1" for index in range(11)), name="policy.yaml")
    *first, last = str(error.value).split("\n  ")
    assert [line.split(":")[1] for line in first] == list("12345678")
    assert last == "and 3 more"


MANY = {
    "keys": "\n".join(f"key_{index}: 1" for index in range(16_000)),
    "keys of a section": "execution:\n" + "\n".join(f"  enginf_{index}: 1" for index in range(16_000)),
    "rules": "kernels:\n  rules:\n" + "  - {match: {opp: conv}, use: torch}\n" * 16_000,
}


@pytest.mark.parametrize("name", MANY)
def test_reading_stops_at_a_hundred_faults(name: str):
    """What each fault is asked for is not asked for all that a hostile file has."""
    with pytest.raises(PolicyError) as error:
        Policy.loads(MANY[name], name="policy.yaml")
    assert str(error.value).splitlines()[-1] == "  and 92 more, where reading stopped"


def test_every_fault_of_a_constructor_is_named_in_one_error():
    with pytest.raises(PolicyError) as error:
        Policy(mode="strikt", execution={"device": "xpu", "precision": "fp17"})
    said = str(error.value).split("\n  ")
    assert [line.partition(": ")[0] for line in said] == [
        "Policy.mode", "Policy.execution.device", "Policy.execution.precision"
    ]  # fmt: skip
    with pytest.raises(PolicyError, match=r"unknown key 'moode' .*\n  unknown key 'kernel' in Policy"):
        Policy(moode="strict", kernel={})
