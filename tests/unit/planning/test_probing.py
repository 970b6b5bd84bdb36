# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Planning on this computer probes an engine only when it may be chosen, and each one once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import machines
import msgspec
import pytest

import xpuruntime as xrt
from xpuruntime.demo import demo_model_path
from xpuruntime.engines.base import Engine, Judgement, LoadedModel, Request
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.registry import EngineRegistry
from xpuruntime.errors import EngineError, PolicyError, UnsupportedOperationError
from xpuruntime.evidence.records import Verdict
from xpuruntime.planning import PlanRequest, plan_here, resolve
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import CudaFacts, EngineFacts, Machine
from xpuruntime.runtime.packages import install_command
from xpuruntime.runtime.snapshot import machine_snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = inspect_model(demo_model_path())


class Probed(Engine):
    """Accepts the devices it offers, once it was probed; counts its probes."""

    name = "probed"

    def __init__(self, name: str, *devices: str, installed: bool = True, **facts: Any) -> None:
        self.name = name  # type: ignore[misc]
        for key, value in facts.items():
            setattr(self, key, value)
        self._devices, self._installed = devices, installed
        self.probes = 0

    def probe(self) -> EngineFacts:
        self.probes += 1
        return EngineFacts(name=self.name, version="1" if self._installed else None, loadable=self._installed)

    def devices(self, machine: Machine) -> tuple[str, ...]:
        facts = machine.engines.get(self.name)
        return self._devices if facts is not None and facts.loadable else ()

    def judge(self, request: Request, machine: Machine) -> Judgement:
        name = f"{self.name}@{request.device}"
        facts = machine.engines.get(self.name)
        if facts is None or facts.version is None:
            return Judgement(verdict=Verdict(candidate=name, accepted=False, code="engine_missing", reason="gone"))
        if request.device not in self._devices:
            reason = f"no {request.device}"
            return Judgement(verdict=Verdict(candidate=name, accepted=False, code="device_unsupported", reason=reason))
        return Judgement(verdict=Verdict(candidate=name, accepted=True, code="accepted", reason="it runs"))

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        raise AssertionError("planning must not load")


def register(*engines: Probed) -> EngineRegistry:
    registry = EngineRegistry()
    for engine in engines:
        registry.register(engine)
    return registry


def settle(engines: Sequence[Probed], **asked: Any) -> tuple[str, list[int]]:
    plan = xrt.plan(demo_model_path(), registry=register(*engines), **asked)
    return plan.candidate, [engine.probes for engine in engines]


def test_a_named_engine_is_the_only_one_probed():
    engines = [Probed("a", "cpu"), Probed("b", "cpu"), Probed("c", "cpu")]
    assert settle(engines, engine="b") == ("b@cpu", [0, 1, 0])


def test_a_stated_device_probes_until_one_accepts():
    engines = [Probed("a", "cuda:0"), Probed("b", "cpu", "npu"), Probed("c", "npu")]
    assert settle(engines, device="npu") == ("b@npu", [1, 1, 0])


def test_engines_named_in_order_probe_until_one_accepts():
    engines = [Probed("a", "cpu"), Probed("b", "cpu", installed=False), Probed("c", "cpu")]
    assert settle(engines, engine=["b", "c", "a"]) == ("c@cpu", [0, 1, 1])


def test_both_auto_probe_all_that_take_part():
    engines = [Probed("a", "cpu"), Probed("b", "npu", "cpu"), Probed("c", "cpu", automatic=False)]
    assert settle(engines) == ("b@npu", [1, 1, 0])


def test_engines_of_cuda_alone_are_probed_only_where_they_may_be_chosen():
    version = (13, 0)
    gpu = machines.gpu(
        name="a GPU",
        total_memory=1 << 30,
        sm_count=1,
        driver_version=version,
        runtime_version=version,
        pci_id="0",
        dtypes=(),
    )

    def probes(engines: Sequence[Probed], purpose: Literal["run", "compile"] = "run", *cuda: CudaFacts) -> list[int]:
        registered = {engine.name: engine for engine in engines}

        def snapshot(names: tuple[str, ...]) -> Machine:
            here = msgspec.structs.replace(machine_snapshot(), cuda=cuda)
            return here.with_engines({name: registered[name].probe() for name in names})

        plan_here(PlanRequest(model=MODEL, purpose=purpose), Policy(), registered, snapshot)
        return [engine.probes for engine in engines]

    def engines() -> list[Probed]:
        return [Probed("a", "cpu", compiles=True), Probed("b", "cuda:0", device_kinds=("cuda",), compiles=True)]

    assert probes(engines()) == [1, 0]
    assert probes(engines(), "run", gpu) == [1, 1]
    assert probes(engines(), "compile") == [1, 1]
    assert probes([Probed("a", "cpu", installed=False), engines()[1]]) == [2, 1], "nothing else can run it"


def test_a_fallback_is_probed_when_it_comes_to_it():
    policy = {"execution": {"engine": "a", "device": "npu", "fallback": ["b@cpu", "c@cpu"]}}
    engines = [Probed("a", "cpu"), Probed("b", "cpu"), Probed("c", "cpu")]
    assert settle(engines, policy=policy) == ("b@cpu", [1, 1, 0])
    engines = [Probed("a", "npu"), Probed("b", "cpu"), Probed("c", "cpu")]
    assert settle(engines, policy=policy) == ("a@npu", [1, 0, 0])


def test_an_engine_that_needs_no_facts_is_not_taken_before_its_turn():
    class Always(Probed):
        def judge(self, request: Request, machine: Machine) -> Judgement:
            verdict = Verdict(candidate=f"{self.name}@cpu", accepted=True, code="accepted", reason="always")
            return Judgement(verdict=verdict)

    engines = [Probed("a", "npu"), Probed("b", "cpu"), Always("c", "cpu")]
    assert settle(engines, engine=["a", "b", "c"], device="cpu") == ("b@cpu", [1, 1, 0])
    assert settle(engines[::2], engine=["a", "c"], device="cpu")[0] == "c@cpu"


def test_engines_that_do_not_take_the_format_are_not_probed():
    engines = [Probed("a", "cpu", formats=("pt2",)), Probed("b", "cpu")]
    assert settle(engines) == ("b@cpu", [0, 1])
    plan = xrt.plan(demo_model_path(), registry=register(*engines))
    assert [(v.candidate, v.code) for v in plan.rejected] == [("a@auto", "format_unsupported")] or plan.rejected == ()


@pytest.mark.parametrize(
    ("asked", "chosen"), [({}, "near@cpu"), ({"device": "cuda:0"}, "far@cuda:0"), ({"engine": "far"}, "far@cuda:0")]
)
def test_a_model_is_compiled_for_another_machine_only_where_that_is_named(asked, chosen):
    engines = {"far": Probed("far", "cuda:0", compiles=True), "near": Probed("near", "cpu", compiles=True)}
    here = machines.machine(engines={name: EngineFacts(name=name, version="1", loadable=True) for name in engines})
    plan = resolve(PlanRequest(model=MODEL, purpose="compile"), Policy.coerce({"execution": asked}), here, engines)
    assert plan.candidate == chosen


def test_when_nothing_accepts_every_verdict_is_told():
    engines = [Probed("a", "cpu"), Probed("b", "cpu", installed=False, extra="bee"), Probed("c", "cpu")]
    with pytest.raises(UnsupportedOperationError) as error:
        settle(engines, device="npu")
    assert [engine.probes for engine in engines] == [1, 1, 1]
    lines = str(error.value).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["a@npu:", "device_unsupported:"],
        ["b@npu:", "engine_missing:"],
        ["c@npu:", "device_unsupported:"],
    ]
    assert lines[2].endswith('Fix: `pip install "xpuruntime[bee]"`')


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx", "openvino", "qnn", "torch"])
def test_a_known_engine_that_nobody_registered_names_its_extra(name):
    with pytest.raises(EngineError) as error:
        settle([Probed("a", "cpu")], engine=name, device="cpu")
    assert install_command(name) in str(error.value)


def test_a_simulator_runs_only_when_named():
    class Simulator(Probed):
        def probe(self) -> EngineFacts:
            return EngineFacts(name=self.name, version="1", loadable=True, detail={"runs_on": "simulator"})

    engines = [Simulator("chip", "npu"), Probed("host", "cpu")]
    plan = xrt.plan(demo_model_path(), registry=register(*engines))
    assert [(v.candidate, v.code) for v in plan.verdicts] == [("chip@npu", "not_named"), ("host@cpu", "accepted")]
    with pytest.raises(UnsupportedOperationError, match=r"the simulator of chip runs only when named.*engine: chip"):
        xrt.plan(demo_model_path(), device="npu", registry=register(*engines))
    assert settle(engines, engine="chip")[0] == "chip@npu"
    policy = {"execution": {"device": "npu", "engine": "host", "fallback": "chip@npu"}}
    assert settle(engines, policy=policy)[0] == "chip@npu"


def test_an_unknown_name_probes_nothing():
    engines = [Probed("alpha", "cpu")]
    with pytest.raises(PolicyError, match="did you mean 'alpha'"):
        settle(engines, engine="alhpa", device="cpu")
    assert engines[0].probes == 0
