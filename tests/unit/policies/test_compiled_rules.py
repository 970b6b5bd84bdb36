# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The rule engine: what it finds by its index is what each rule by itself says, also where facts are unknown."""

from __future__ import annotations

import fnmatch
import random

from xpuruntime.policies import KernelPolicy, KernelRule, RuleMatch
from xpuruntime.policies.call_facts import UNKNOWN, CallFacts, NameSet, escape, literal_of
from xpuruntime.policies.compiled_rules import MatchResult

NAMES = ["a", "a.b", "layers.0.attn", "layers.1.attn", "layers.10.mlp", "é.[x]", "l*y", "]", "a/b.MatMul"]
PATTERNS = [
    *["*", "a", "a*", "?", "layers.*", "layers.1*", "layers.?.attn", "layers.0.attn", "[ab]", "[!a]*", "é.[[]x]"],
    *["l[*]y", "[]-]", "[", "a[", "*attn", "layers.[0-9]*", "a/b.MatMul"],
]
DEVICES = {"cpu": None, "cuda:0": "sm80", "cuda:1": "sm90"}


def random_rule(draw: random.Random) -> KernelRule:
    def maybe(value):
        return value() if draw.random() < 0.3 else None

    def size():
        number = draw.randrange(4)
        return draw.choice([number, f"<={number}", f">{number}", f"1..{number + 1}"])

    stated = {
        "op": maybe(lambda: draw.choice(["matmul", "attention", "conv"])),
        **{name: maybe(size) for name in ("m", "n", "k", "head_dim", "kv")},
        "dtype": maybe(lambda: draw.choice(["fp32", "fp16", ("fp32", "bf16")])),
        "device": maybe(lambda: draw.choice(["cpu", "cuda", "cuda:0", "cuda:1", "sm80", "sm90", "auto"])),
        "node": maybe(lambda: draw.choice(PATTERNS)),
        "module": maybe(lambda: draw.choice(PATTERNS)),
        "phase": maybe(lambda: draw.choice(["infer", "train", "decode", ("train", "prefill")])),
    }
    if all(value is None for value in stated.values()):
        stated["op"] = "matmul"
    what = draw.choice([{"use": "cpu"}, {"use": ("cpu", "auto")}, {"precision": "fp32"}])
    return KernelRule(match=RuleMatch(**stated), **what)


def random_facts(draw: random.Random) -> CallFacts:
    device = draw.choice(list(DEVICES))
    facts = CallFacts(
        draw.choice(["matmul", "attention", "conv", None]),
        *(draw.choice([None, *range(5)]) for _ in range(5)),
        draw.choice(["fp32", "fp16", "bf16", None]),
        device,
        DEVICES[device],
        draw.choice([*NAMES, None]),
        draw.choice([*NAMES, None]),
        draw.choice(["infer", "prefill", "decode", "train", "backward", None]),
    )
    unknown = draw.sample(CallFacts._fields, draw.choice([0, 0, 1, 2, 5, 11]))
    return facts._replace(**dict.fromkeys(unknown, UNKNOWN))


def holds(match: RuleMatch, facts: CallFacts) -> bool:
    """Compare known facts by plain means, key by key."""

    def number(stated, fact):
        if isinstance(stated, int):
            return fact == stated
        if ".." in stated:
            first, _, last = stated.partition("..")
            return int(first) <= fact <= int(last)
        return eval(f"{fact}{stated}")  # the test's own text, such as "3<=4"

    def words(stated, fact):
        return fact in ((stated,) if isinstance(stated, str) else stated)

    def phase(stated, fact):
        return words(stated, fact) or (words(stated, "infer") and fact in ("prefill", "decode"))

    def device(stated):
        if stated.startswith("sm"):
            return facts.arch == stated
        return facts.device is not None and (stated == "auto" or fnmatch.fnmatchcase(facts.device, f"{stated}*"))

    tests = {"op": words, "dtype": words, "phase": phase, "node": fnmatch_of, "module": fnmatch_of}
    for name in RuleMatch.KINDS:
        stated = getattr(match, name)
        if stated is None:
            continue
        if name == "device":
            if not device(stated):
                return False
        elif getattr(facts, name) is None or not tests.get(name, number)(stated, getattr(facts, name)):
            return False
    return True


def fnmatch_of(stated: str, fact: str) -> bool:
    return fnmatch.fnmatchcase(fact, stated)


def first_that_holds(policy: KernelPolicy, facts: CallFacts) -> tuple[tuple[str, ...], str]:
    for index, rule in enumerate(policy.rules):
        if rule.use is not None and holds(rule.match, facts):
            return (rule.use,) if isinstance(rule.use, str) else rule.use, f"kernels.rules[{index}]"
    short = policy.preferences.get(facts.op or "")
    return (("auto",), "default") if short is None else ((short,), f"kernels.{facts.op}")


def test_known_facts_are_decided_as_by_reading_the_rules_in_order() -> None:
    draw = random.Random(5)
    sources = set()
    for size in [0, 1, 5, 30, 200] * 10:
        policy = KernelPolicy(rules=[random_rule(draw) for _ in range(size)], matmul="cpu")
        for _ in range(40):
            facts = random_facts(draw)
            if UNKNOWN in facts:
                continue
            match = policy.compiled_rules.match(facts)
            assert (match.use, match.source) == first_that_holds(policy, facts), (policy, facts)
            assert match.certainty == ("no" if match.source == "default" else "yes")
            sources.add(match.source.partition("[")[0])
    assert sources == {"kernels.rules", "kernels.matmul", "default"}


def test_the_index_leaves_no_rule_out() -> None:
    draw = random.Random(6)
    uncertain = smaller = 0
    for size in [9, 60, 300] * 8:
        compiled = KernelPolicy(rules=[random_rule(draw) for _ in range(size)]).compiled_rules
        for _ in range(40):
            facts = random_facts(draw)
            expected = [rule.index for rule in compiled.rules if rule.certainty(facts) != "no"]
            assert [rule.index for rule in compiled.matching(facts)] == expected, facts
            uncertain += any(rule.certainty(facts) == "unknown" for rule in compiled.rules)
            smaller += len(compiled.candidates(facts)) < size
    assert uncertain > 100
    assert smaller > 300


def test_an_unknown_fact_covers_every_value_that_it_may_have() -> None:
    """Whatever the unknown facts turn out to be, what decides then is among the preferences."""
    draw = random.Random(7)
    values = {
        "op": ["matmul", "attention", "conv", None],
        **{name: [None, 0, 1, 3, 9] for name in ("m", "n", "k", "head_dim", "kv")},
        "dtype": ["fp32", "bf16", None],
        "node": [*NAMES, None],
        "module": [*NAMES, None],
        "phase": ["infer", "decode", "backward", None],
    }
    certain = 0
    for _ in range(60):
        policy = KernelPolicy(rules=[random_rule(draw) for _ in range(draw.randrange(1, 25))])
        for _ in range(15):
            facts = random_facts(draw)
            match = policy.compiled_rules.match(facts)
            possible = {match.preferences} if match.certainty != "unknown" else set()
            certain += bool(possible)
            for _ in range(12):
                device = draw.choice(list(DEVICES))
                told = {name: draw.choice(values[name]) for name in values if getattr(facts, name) is UNKNOWN}
                if facts.device is UNKNOWN or facts.arch is UNKNOWN:
                    told.update(device=device, arch=DEVICES[device])
                known = facts._replace(**told)
                if (facts.device, facts.arch).count(UNKNOWN) == 1:
                    continue  # the other one may contradict it
                assert first_that_holds(policy, known) in match.preferences
    assert certain > 50


def test_unknown_is_another_thing_than_absent() -> None:
    policy = KernelPolicy(rules=[{"match": {"op": "matmul", "m": "<=16"}, "use": "cuda_raw.skinny"}], matmul="cublas")
    match = policy.compiled_rules.match
    skinny, short = (("cuda_raw.skinny",), "kernels.rules[0]"), (("cublas",), "kernels.matmul")
    assert match(CallFacts("matmul", m=8)) == MatchResult((skinny,))
    assert match(CallFacts("matmul", m=17)) == MatchResult((short,))
    assert match(CallFacts("matmul", m=None)) == MatchResult((short,))
    found = match(CallFacts("matmul", m=UNKNOWN))
    assert (found.preferences, found.certainty) == ((skinny, short), "unknown")
    assert match(CallFacts("conv", m=UNKNOWN)).certainty == "no"


def test_a_cuda_device_whose_index_is_not_known() -> None:
    def certainty(stated: str) -> str:
        rules = [{"match": {"device": stated}, "use": "cuda_raw"}]
        compiled = KernelPolicy(rules=rules * 12).compiled_rules
        return compiled.match(CallFacts("matmul", device="cuda", arch=UNKNOWN)).certainty

    told = {stated: certainty(stated) for stated in ("cuda", "cuda:1", "cpu", "sm90", "auto")}
    assert told == {"cuda": "yes", "cuda:1": "unknown", "cpu": "no", "sm90": "unknown", "auto": "yes"}


def test_patterns_mean_what_fnmatch_means() -> None:
    draw = random.Random(7)
    patterns = ["".join(draw.choices("ab*?[]!-^é\\.", k=draw.randrange(1, 8))) for _ in range(3000)]
    met = 0
    compiled = KernelPolicy(rules=[{"match": {"node": pattern}, "use": "cudnn"} for pattern in patterns]).compiled_rules
    for _ in range(25):
        name = "".join(draw.choices("ab-!]é^[\\.", k=draw.randrange(1, 5)))
        expected = [at for at, pattern in enumerate(patterns) if fnmatch.fnmatchcase(name, pattern)]
        assert [rule.index for rule in compiled.matching(CallFacts("conv", node=name))] == expected, name
        met += len(expected)
    assert met > 200
    names = ["".join(draw.choices("ab-!]é^[\\.", k=draw.randrange(1, 5))) for _ in range(60)]
    known = NameSet(names)
    for pattern in patterns[:1500]:
        expected = sorted({name for name in names if fnmatch.fnmatchcase(name, pattern)})
        assert list(known.matching(pattern)) == expected, pattern
        assert known.matches(pattern) == bool(expected)
    for name in names:
        assert literal_of(escape(name)) == name


def test_a_match_among_many_rules_takes_no_longer() -> None:
    """A look-up among 5,000 rules compares few of them."""
    rules = [
        {"match": {"node": f"layers.{i % 1000}/MatMul", "m": 1 + i // 1000, "dtype": "fp32"}, "use": "cpu"}
        for i in range(5000)
    ]
    compiled = KernelPolicy(rules=rules).compiled_rules
    facts = CallFacts("matmul", m=3, node="layers.77/MatMul", dtype="fp32")
    assert len(compiled.candidates(facts)) <= 8
    assert len(compiled.candidates(facts._replace(m=UNKNOWN))) <= 8
    assert compiled.match(facts).source == "kernels.rules[2077]"
    globs = KernelPolicy(rules=[{"match": {"module": f"net.{i}.*"}, "use": "cpu"} for i in range(5000)])
    assert [rule.index for rule in globs.compiled_rules.candidates(CallFacts("conv", module="net.4321.fc"))] == [4321]


def test_a_policy_is_compiled_once_and_stays_a_value() -> None:
    import copy
    import pickle

    rules = [{"match": {"op": "matmul"}, "use": "cpu"}]
    policy, other = KernelPolicy(rules=rules), KernelPolicy(rules=rules)
    assert policy.compiled_rules is policy.compiled_rules
    assert policy == other
    assert hash(policy) == hash(other)
    for copied in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert copied == policy
        assert copied.choose("matmul") == (("cpu",), "kernels.rules[0]")
    assert repr(policy) == repr(other)
    changed = policy.replace(rules=())
    assert changed.choose("matmul") == (("auto",), "default")
    hash(policy)
