# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The core chooses by a policy's rules exactly as the policy itself does."""

from __future__ import annotations

import random

import pytest

from xpuruntime.ops.call_context import compile_rules, core_rules
from xpuruntime.policies import KernelPolicy, KernelRule, Policy, RuleMatch
from xpuruntime.policies.call_facts import ANY_CALL

DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
NAMES = ["", "a", "b", "ab", "a.b", "layers.0.attn", "layers.1.mlp.fc", "LAYERS.0.attn", "é.[x]", "a-b", "]"]
PATTERNS = [
    "*",
    "a",
    "a*",
    "?",
    "layers.*",
    "layers.?.attn",
    "[ab]",
    "[!a]*",
    "[a-c].b",
    "[c-a]",
    "é*",
    "*[[]x]",
    "[]-]",
]
SIZES = [0, 1, 7, 16, 64, 2**40]
KERNELS = {
    "matmul": ["cublas", "cublasLt", "cuda_raw.skinny", ("cpu", "auto"), "auto"],
    "attention": ["cudnn", ("flash_v2", "math"), "auto"],
    "layer_norm": ["cuda_raw", "cpu.vectorised"],
    "rms_norm": ["cuda_raw"],
    "conv": ["cudnn_heuristic", ("cudnn", "auto")],
}
CONDITIONS = ["{}", "<{}", "<={}", ">{}", ">={}"]


def some(draw: random.Random, value):
    return value() if draw.random() < 0.35 else None


def condition(draw: random.Random):
    number = draw.choice([*SIZES, 2**63 - 1])
    if draw.random() < 0.3:
        return number
    if draw.random() < 0.3:
        return f"{min(number, 8)}..{number}"
    return draw.choice(CONDITIONS).format(number)


def one_or_more(draw: random.Random, values: list[str]):
    return draw.choice(values) if draw.random() < 0.5 else tuple(draw.sample(values, 2))


def random_rule(draw: random.Random) -> KernelRule:
    stated = {
        "op": some(draw, lambda: draw.choice(list(KERNELS))),
        "m": some(draw, lambda: condition(draw)),
        "n": some(draw, lambda: condition(draw)),
        "k": some(draw, lambda: condition(draw)),
        "head_dim": some(draw, lambda: condition(draw)),
        "dtype": some(draw, lambda: one_or_more(draw, [*DTYPES.values(), "tf32"])),
        "device": some(draw, lambda: draw.choice(["cpu", "cuda", "cuda:0", "cuda:1", "sm80", "sm90", "gpu", "auto"])),
        "node": some(draw, lambda: draw.choice(PATTERNS)),
        "module": some(draw, lambda: draw.choice(PATTERNS)),
        "phase": some(draw, lambda: one_or_more(draw, ["train", "infer", "backward"])),
    }
    # Few keys at a time, so that many rules match.
    for key in draw.sample(list(stated), 7):
        stated[key] = None
    if all(value is None for value in stated.values()):
        stated["phase"] = "infer"
    use = None if draw.random() < 0.1 else draw.choice(KERNELS[stated["op"] or "matmul"])
    return KernelRule(match=RuleMatch(**stated), use=use, precision=None if use else "fp16")


def random_policy(draw: random.Random) -> KernelPolicy:
    short = {op: draw.choice(kernels) for op, kernels in KERNELS.items() if draw.random() < 0.4}
    return KernelPolicy(rules=[random_rule(draw) for _ in range(draw.randrange(5))], **short)


def random_call(draw: random.Random):
    """An operation as the core takes it, and the facts of it that a policy takes."""
    op = draw.choice(["matmul", "attention", "attention_backward", "layer_norm", "rms_norm_backward", "conv"])
    dtype, word = draw.choice(list(DTYPES.items()))
    phase = draw.choice(["infer", "train", "backward"])
    device, arch, capability = draw.choice(
        [("cpu", None, None), ("cuda:0", "sm80", (8, 0)), ("cuda:1", "sm90", (9, 0)), ("cuda:0", "sm120", (12, 0))]
    )
    tf32 = draw.random() < 0.3 and dtype == "float32"
    m, n, k, head_dim = (draw.choice(SIZES) for _ in range(4))
    facts: dict = {"dtype": word, "device": device, "arch": arch, "phase": phase}
    shapes = {"x": (m, n)}
    if op.endswith("norm_backward"):
        shapes["grad_y"] = (m, n)
    elif op == "matmul":
        shapes = {"a": (m, k), "b": (k, n), "out": (m, n)}
        if draw.random() < 0.5:
            shapes = {name: (3, *shape) for name, shape in shapes.items()}
        facts.update(m=m, n=n, k=k)
    elif op.startswith("attention"):
        shapes = dict.fromkeys(("q", "k", "v", "out"), (2, 3, 5, head_dim))
        facts.update(head_dim=head_dim)
    elif op == "conv":
        shapes = dict.fromkeys(("x", "weight", "out"), (2, 3, 5, 5))
    if tf32 and op in ("matmul", "conv"):
        facts["dtype"] = "tf32"
    desc = {
        "op": op,
        "device": device,
        "phase": phase,
        "attributes": {"allow_tf32": tf32},
        "operands": {name: {"dtype": dtype, "shape": shape} for name, shape in shapes.items()},
    }
    return desc, op.removesuffix("_backward"), facts, capability


def test_the_core_and_the_policy_agree() -> None:
    draw = random.Random(20260101)
    sources = set()
    for _ in range(400):
        policy = random_policy(draw)
        for _ in range(15):
            desc, op, facts, capability = random_call(draw)
            node, module = draw.choice(NAMES), draw.choice(NAMES)
            expected = policy.choose(op, node=node or None, module=module or None, **facts)
            place = ANY_CALL._replace(node=node or None, module=module or None)
            rules = core_rules(policy, policy.compiled_rules.matching(place), "prefer")
            choice = rules.choose(desc, compute_capability=capability)
            assert choice == expected, (policy, desc, node, module)
            sources.add(expected[1].partition("[")[0])
    assert sources >= {"kernels.rules", "kernels.matmul", "default"}, "the table tests something"


def test_compiled_once_for_each_value() -> None:
    policy, two = KernelPolicy(matmul="cublasLt"), KernelPolicy(matmul="cublasLt")
    assert compile_rules(policy) is compile_rules(two)
    assert compile_rules(Policy(kernels=policy)) is compile_rules(policy), "prefer is the default"
    assert compile_rules(Policy(kernels=policy, mode="auto")) is compile_rules(policy)
    strict = compile_rules(Policy(kernels=policy, mode="strict"))
    assert strict is not compile_rules(policy)
    assert compile_rules(Policy(kernels=two, mode="strict")) is strict


def test_conditions_at_the_ends_of_the_numbers() -> None:
    desc = {"op": "matmul", "device": "cpu"}
    for written, met in [("<0", False), (f">{2**63 - 1}", False), (">=0", True), (f"<={2**63 - 1}", True), (0, True)]:
        rules = compile_rules(KernelPolicy(rules=[{"match": {"m": written}, "use": "cpu"}]))
        operands = {"a": {"dtype": "float32", "shape": (0, 4)}, "b": {"dtype": "float32", "shape": (4, 4)}}
        _, source = rules.choose({**desc, "operands": operands})
        assert (source == "kernels.rules[0]") == met, written


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"op": "matmull"}, "matmull"),
        ({"device": "cuda:x"}, "cuda:x"),
        ({"operands": {"c": {"dtype": "float32", "shape": (1,)}}}, "'c' is not an operand of matmul"),
        ({"operands": {"a": {"dtype": "float31", "shape": (1,)}}}, "float31"),
        ({"operands": {"a": {"dtype": "float32", "shape": (1, 1, 1, 1, 1)}}}, "a.shape has 5 numbers"),
        ({"operands": {"a": {"dtype": "float32", "shape": (2, 2), "strides": (1,)}}}, "a.strides has 1 numbers"),
        ({"operands": {"a": {"shape": (1,)}}}, "lacks 'dtype'"),
        ({"attributes": {"scales": 1}}, "scales"),
        ({"attributes": {"scale": "big"}}, "scale is 'big'"),
        ({"phase": "inference"}, "inference"),
    ],
)
def test_a_description_that_is_none_is_refused(broken: dict, said: str) -> None:
    from xpuruntime.errors import InputError

    desc = {"op": "matmul", "device": "cpu", "operands": {}, **broken}
    with pytest.raises(InputError) as caught:
        compile_rules(KernelPolicy()).choose(desc)
    assert said in str(caught.value)
