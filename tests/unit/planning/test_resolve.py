# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`resolve`: who runs a model, from stated facts alone."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, ClassVar

import machines
import msgspec
import pytest

from xpuruntime.demo import demo_model_path
from xpuruntime.engines.base import Engine, Judgement, LoadedModel, Request
from xpuruntime.engines.model import inspect_model
from xpuruntime.errors import CudaError, EngineError, InputError, PolicyError, UnsupportedOperationError
from xpuruntime.evidence.records import Control, Verdict
from xpuruntime.planning import Plan, PlanRequest, decide, resolve
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import EngineFacts, Machine

if TYPE_CHECKING:
    from collections.abc import Mapping

CPU = machines.machine()
GPU = machines.machine(cuda=tuple(machines.gpu(index) for index in range(2)), core_cuda=True)


class FactsEngine(Engine):
    """An engine made of facts: which devices it has, what it rejects, which keys it enforces."""

    name = "alpha"

    def __init__(
        self,
        name: str = "alpha",
        devices: tuple[str, ...] = ("cpu",),
        rejects: Mapping[str, tuple[str, str, str | None]] | None = None,
        keys: Mapping[str, str] | None = None,
        aliases: tuple[str, ...] = (),
        automatic: bool = True,
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.aliases = aliases  # type: ignore[misc]
        self.automatic = automatic  # type: ignore[misc]
        self._devices, self._rejects, self._keys = devices, rejects or {}, keys or {}
        self.asked: list[str] = []

    def probe(self) -> EngineFacts:
        raise AssertionError("planning must not probe")

    def devices(self, machine: Machine) -> tuple[str, ...]:
        have = {"cpu", *(f"cuda:{gpu.index}" for gpu in machine.cuda)}
        return tuple(device for device in self._devices if device in have)

    def judge(self, request: Request, machine: Machine) -> Judgement:
        self.asked.append(request.device)
        name = f"{self.name}@{request.device}"
        rejection = self._rejects.get(request.device)
        if rejection is None and request.device not in self.devices(machine):
            rejection = ("device_missing", f"there is no {request.device} here", "choose cpu")
        if rejection is not None:
            code, reason, fix = rejection
            return Judgement(verdict=Verdict(candidate=name, accepted=False, code=code, reason=reason, fix=fix))
        controls = tuple(
            Control(
                key=key,
                requested=str(value),
                resolved=f"option_of_{self.name}",
                enforceability=self._keys[key],  # type: ignore[arg-type]
                reason=f"{self.name} says so",
                fix=None,
            )
            for key, value in request.policy.stated().items()
            if key in self._keys
        )
        verdict = Verdict(candidate=name, accepted=True, code="accepted", reason=f"{self.name} runs every operator")
        return Judgement(verdict=verdict, controls=controls, settings={"options": {"threads": 2}})

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        raise AssertionError("planning must not load")


class Settings(msgspec.Struct, frozen=True):
    threads: int
    order: tuple[str, ...]


class TypedEngine(FactsEngine):
    SETTINGS: ClassVar[Settings] = Settings(threads=2, order=("b", "a"))

    def judge(self, request: Request, machine: Machine) -> Judgement:
        judgement = super().judge(request, machine)
        return msgspec.structs.replace(judgement, settings=self.SETTINGS, uncompilable="it is typed")


MODEL = inspect_model(demo_model_path())


def settle(policy: Any = None, machine: Machine = CPU, *engines: FactsEngine) -> Plan:
    registered = engines or (FactsEngine(devices=("cuda:0", "cuda:1", "cpu")),)
    return resolve(
        PlanRequest(model=MODEL), Policy.coerce(policy), machine, {engine.name: engine for engine in registered}
    )


def codes(plan: Plan) -> list[tuple[str, str]]:
    return [(verdict.candidate, verdict.code) for verdict in plan.verdicts]


class TestOrder:
    def test_auto_takes_the_engines_best_device_and_does_not_try_the_rest(self) -> None:
        engine = FactsEngine(devices=("cuda:0", "cuda:1", "cpu"))
        plan = settle(None, GPU, engine)
        assert (plan.engine, plan.device) == ("alpha", "cuda:0")
        assert codes(plan) == [("alpha@cuda:0", "accepted"), ("alpha@cuda:1", "not_tried"), ("alpha@cpu", "not_tried")]
        assert engine.asked == ["cuda:0"]
        assert settle(None, CPU, engine).device == "cpu"

    def test_with_both_auto_any_accelerator_comes_before_any_cpu(self) -> None:
        engine, two = FactsEngine("one", ("cpu",)), FactsEngine("two", ("cuda:0", "cpu"))
        assert settle(None, GPU, engine, two).candidate == "two@cuda:0"
        assert settle(None, CPU, engine, two).candidate == "one@cpu"

    def test_engines_that_are_named_are_tried_in_the_order_named(self) -> None:
        engine, two = FactsEngine("one", ("cpu",)), FactsEngine("two", ("cuda:0", "cpu"))
        policy = {"execution": {"engine": ["one", "two"]}}
        assert settle(policy, GPU, engine, two).candidate == "one@cpu"
        assert settle({"execution": {"engine": ["two", "one"]}}, GPU, engine, two).candidate == "two@cuda:0"

    def test_an_engine_that_is_not_automatic_runs_only_when_named(self) -> None:
        real, empty = FactsEngine("real"), FactsEngine("empty", automatic=False)
        assert [v.candidate for v in settle(None, CPU, real, empty).verdicts] == ["real@cpu"]
        assert settle({"execution": {"engine": "empty"}}, CPU, real, empty).engine == "empty"
        with pytest.raises(EngineError, match="no engine is registered"):
            settle(None, CPU, empty)

    def test_cuda_is_cuda_0(self) -> None:
        assert settle({"execution": {"device": "cuda"}}, GPU).device == "cuda:0"

    def test_an_alias_names_the_engine(self) -> None:
        engine = FactsEngine("onnxruntime", aliases=("ort", "onnxrt"))
        plan = settle({"execution": {"engine": "ort"}}, CPU, engine)
        assert plan.candidate == "onnxruntime@cpu"
        assert plan.control("execution.engine").resolved == "onnxruntime"  # type: ignore[union-attr]


class TestNothingChangesSilently:
    REFUSED: ClassVar[dict[str, tuple[str, str, str | None]]] = {
        "cuda:0": ("library_missing", "libcudnn.so.9 was not found", 'pip install "xpuruntime[cuda]"')
    }

    @pytest.mark.parametrize("mode", ["prefer", "strict"])
    def test_an_explicit_device_has_one_candidate(self, mode: str) -> None:
        engine = FactsEngine(devices=("cuda:0", "cpu"), rejects=self.REFUSED)
        with pytest.raises(
            EngineError, match=r"alpha@cuda:0: library_missing: libcudnn\.so\.9 was not found\. Fix: pip"
        ):
            settle({"mode": mode, "execution": {"engine": "alpha", "device": "cuda:0"}}, GPU, engine)
        assert engine.asked == ["cuda:0"]

    def test_auto_mode_does_not_leave_the_device_either(self) -> None:
        engine = FactsEngine(devices=("cuda:0", "cpu"), rejects=self.REFUSED)
        with pytest.raises(EngineError):
            settle({"mode": "auto", "execution": {"device": "cuda:0"}}, GPU, engine)

    def test_a_listed_fallback_is_taken_and_said(self) -> None:
        engine = FactsEngine(devices=("cuda:0", "cpu"), rejects=self.REFUSED)
        policy = {"execution": {"engine": "alpha", "device": "cuda:0", "fallback": ["alpha@cpu"]}}
        plan = settle(policy, GPU, engine)
        assert codes(plan) == [("alpha@cuda:0", "library_missing"), ("alpha@cpu", "accepted")]
        [warning] = plan.warnings
        assert "execution.fallback was used" in warning
        assert "libcudnn.so.9 was not found" in warning
        assert "alpha@cpu" in plan.control("execution.fallback").resolved  # type: ignore[union-attr]

    def test_a_fallback_that_is_not_needed_is_not_tried(self) -> None:
        engine = FactsEngine(devices=("cuda:0", "cpu"))
        plan = settle({"execution": {"device": "cuda:0", "fallback": ["alpha@cpu"]}}, GPU, engine)
        assert codes(plan)[1] == ("alpha@cpu", "not_tried")
        assert plan.warnings == ()
        assert plan.control("execution.fallback").resolved == "not needed"  # type: ignore[union-attr]

    def test_auto_says_when_it_passes_over_a_device_that_could_be_mended(self) -> None:
        engine = FactsEngine(devices=("cuda:0", "cpu"), rejects=self.REFUSED)
        plan = settle(None, GPU, engine)
        assert plan.device == "cpu"
        assert any("alpha@cuda:0" in line and "xpuruntime[cuda]" in line for line in plan.warnings)


class TestModes:
    POLICY: ClassVar[dict[str, Any]] = {
        "kernels": {"matmul": "cublasLt", "attention": "flash_v2"},
        "execution": {"threads": 2},
    }
    KEYS: ClassVar[dict[str, str]] = {
        "kernels.matmul": "advisory",
        "kernels.attention": "unsupported",
        "execution.threads": "enforced",
    }

    def test_prefer_runs_and_warns_once_for_each_key(self) -> None:
        plan = settle(self.POLICY, CPU, FactsEngine(keys=self.KEYS))
        assert len(plan.warnings) == 2
        assert "kernels.matmul: cublasLt is advisory" in "\n".join(plan.warnings)
        assert "kernels.attention: flash_v2 is unsupported" in "\n".join(plan.warnings)
        assert "mode: prefer" not in "\n".join(plan.warnings), "it is that mode already"

    def test_strict_names_every_key_with_reason_and_fix(self) -> None:
        with pytest.raises(UnsupportedOperationError) as caught:
            settle({"mode": "strict", **self.POLICY}, CPU, FactsEngine(keys=self.KEYS))
        text = str(caught.value)
        assert "alpha@cpu: not_enforceable" in text
        matmul = "kernels.matmul: cublasLt is advisory: alpha says so. Fix: name an engine or a device that enforces"
        assert matmul in text
        assert "mode: auto, or use mode: prefer" in text
        assert "kernels.attention: flash_v2 is unsupported" in text
        assert "mode: prefer" in text
        assert "execution.threads" not in text

    def test_strict_takes_the_next_candidate_that_enforces_everything(self) -> None:
        weak, firm = FactsEngine("weak", keys=self.KEYS), FactsEngine("firm", keys=dict.fromkeys(self.KEYS, "enforced"))
        policy = {"mode": "strict", **self.POLICY, "execution": {"threads": 2, "engine": ["weak", "firm"]}}
        plan = settle(policy, CPU, weak, firm)
        assert codes(plan) == [("weak@cpu", "not_enforceable"), ("firm@cpu", "accepted")]
        assert "kernels.matmul" in plan.rejected[0].reason

    def test_auto_is_quiet_and_records_why(self) -> None:
        plan = settle({"mode": "auto", **self.POLICY}, CPU, FactsEngine(keys=self.KEYS))
        assert plan.warnings == ()
        assert any("kernels.matmul" in note and "alpha says so" in note for note in plan.notes)
        assert "alpha runs every operator" in plan.notes[0]

    def test_a_key_the_engine_says_nothing_about_is_unsupported_not_ignored(self) -> None:
        plan = settle({"execution": {"threads": 2}}, CPU, FactsEngine())
        assert plan.control("execution.threads").enforceability == "unsupported"  # type: ignore[union-attr]
        with pytest.raises(
            UnsupportedOperationError, match=r"execution\.threads: 2 is unsupported: the engine alpha has"
        ):
            settle({"mode": "strict", "execution": {"threads": 2}}, CPU, FactsEngine())

    def test_a_control_for_a_whole_section_covers_its_keys(self) -> None:
        class Sections(FactsEngine):
            def judge(self, request: Request, machine: Machine) -> Judgement:
                base = super().judge(request, machine)
                control = Control(
                    key="execution.memory", requested="", resolved="x", enforceability="enforced", reason="all of it"
                )
                return Judgement(verdict=base.verdict, controls=(control,))

        policy = {"mode": "strict", "execution": {"memory": {"pool": "caching", "limit": "8GiB"}}}
        keys = [control.key for control in settle(policy, CPU, Sections()).controls]
        assert [key for key in keys if key != "mode"] == ["execution.memory"]


class TestRefusal:
    def test_every_candidate_is_in_the_message_with_reason_and_fix(self) -> None:
        engines = [
            FactsEngine(name, rejects={"cpu": ("op_unsupported", f"{name} has no Celu", f"teach {name} Celu")})
            for name in ("one", "two", "three")
        ]
        with pytest.raises(UnsupportedOperationError) as caught:
            settle(None, CPU, *engines)
        for engine in engines:
            assert f"{engine.name}@cpu: op_unsupported: {engine.name} has no Celu. Fix: teach" in str(caught.value)
        assert "digits.onnx" in str(caught.value)

    @pytest.mark.parametrize("engine", ["auto", "alpha"])
    def test_a_cuda_device_that_is_not_there(self, engine: str) -> None:
        with pytest.raises(CudaError, match="alpha@cuda:99: device_missing: there is no cuda:99 here") as caught:
            settle({"execution": {"device": "cuda:99", "engine": engine}}, GPU)
        assert caught.value.device == "cuda:99"

    def test_another_device_that_is_not_there(self) -> None:
        with pytest.raises(EngineError, match="alpha@npu: device_missing"):
            settle({"execution": {"device": "npu"}})

    def test_an_engine_that_is_not_installed_names_the_extra(self) -> None:
        missing = FactsEngine(
            "openvino",
            rejects={"cpu": ("engine_missing", "openvino is not installed", 'pip install "xpuruntime[openvino]"')},
        )
        with pytest.raises(EngineError, match=r'pip install "xpuruntime\[openvino\]"') as caught:
            settle({"execution": {"engine": "openvino"}}, CPU, missing)
        assert caught.value.engine == "openvino"

    @pytest.mark.parametrize("name", ["openvino", "qnn", "tensorrt", "torch"])
    def test_an_engine_without_an_adapter_names_its_extra_too(self, name: str) -> None:
        with pytest.raises(EngineError) as caught:
            settle({"execution": {"engine": name}})
        assert f"{name}@auto: engine_missing" in str(caught.value)
        assert f"xpuruntime[{name}]" in str(caught.value)

    def test_an_unknown_engine_names_the_nearest(self) -> None:
        engine = FactsEngine("onnxruntime", aliases=("ort",))
        with pytest.raises(PolicyError, match=r"did you mean 'onnxruntime'\?.*registered: onnxruntime"):
            settle({"execution": {"engine": "onnxruntme"}}, CPU, engine)

    @pytest.mark.parametrize("mode", ["strict", "prefer", "auto"])
    @pytest.mark.parametrize(
        ("execution", "written"),
        [
            ({"engine": ["alhpa", "alpha"]}, "alpha in execution.engine"),
            ({"engine": ["alpha", "alhpa"]}, "alpha in execution.engine"),
            ({"engine": "alpha", "fallback": "alhpa@cpu"}, "alpha@cpu in execution.fallback"),
            ({"fallback": ["alpha@cpu", "alhpa@cuda:1"]}, "alpha@cuda:1 in execution.fallback"),
        ],
    )
    def test_a_misspelt_engine_is_refused_wherever_it_stands(self, mode: str, execution: dict, written: str) -> None:
        with pytest.raises(PolicyError, match=rf"did you mean 'alpha'\?.*Fix: write {written}"):
            settle({"mode": mode, "execution": execution})
        with pytest.raises(
            PolicyError, match=r"no engine is named 'allow'; registered: alpha\. Fix: write alpha@cpu in"
        ):
            settle({"mode": mode, "execution": {"fallback": "allow@cpu"}})
        options = {"alhpa": {"level": 1}}
        with pytest.raises(
            PolicyError, match=r"did you mean 'alpha'\?.*Fix: write execution\.provider_options\.alpha,"
        ):
            settle({"mode": mode, "execution": {"provider_options": options}})
        plan = settle({"mode": mode, "execution": {"fallback": "torch@cpu"}})
        assert plan.engine == "alpha", "torch can be installed"
        if mode != "strict":
            assert settle({"mode": mode, "execution": {"provider_options": {"torch": {"a": 1}}}}).engine == "alpha"

    def test_an_engine_with_no_device_here_gives_its_own_reason(self) -> None:
        reason = ("engine_broken", "the package does not import", "reinstall it")
        engine = FactsEngine(devices=("cuda:0",), rejects={"cpu": reason})
        with pytest.raises(EngineError, match="alpha@auto: engine_broken: the package does not import"):
            settle(None, CPU, engine)
        with pytest.raises(EngineError, match="alpha@auto: device_missing"):
            settle(None, CPU, FactsEngine(devices=("cuda:0",)))


class TestPlan:
    def test_to_dict_and_back(self) -> None:
        plan = settle(TestModes.POLICY, GPU, FactsEngine(devices=("cuda:0", "cpu"), keys=TestModes.KEYS))
        plain = plan.to_dict()
        assert plain["schema"] == "xpuruntime.plan/1"
        assert plain["model"]["inputs"][0]["name"] == "image"
        assert plain["policy"]["kernels"] == {"matmul": "cublasLt", "attention": "flash_v2"}
        assert plain["settings"] == {"options": {"threads": 2}}
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert (again.request_hash, again.execution_hash) == (plan.request_hash, plan.execution_hash)

    @pytest.mark.parametrize("text", ["", "{}", "[1]", "[" * 100_000, '{"schema": "xpuruntime.plan/9"}'])
    def test_what_is_not_a_plan_is_refused(self, text: str) -> None:
        with pytest.raises(InputError, match="not a plan"):
            Plan.from_json(text)
        newer = settle().to_json().replace("plan/1", "plan/9")
        with pytest.raises(InputError, match="plan/9"):
            Plan.from_json(newer)

    def test_text_and_tables_tell_choice_rejections_and_keys(self) -> None:
        from rich.console import Console

        engine = FactsEngine(devices=("cuda:0", "cpu"), rejects=TestNothingChangesSilently.REFUSED, keys=TestModes.KEYS)
        plan = settle(TestModes.POLICY, GPU, engine)
        console = Console(width=240, record=True, file=io.StringIO())
        console.print(plan)
        for text in (str(plan), console.export_text()):
            for part in (
                "alpha", "cpu", "libcudnn.so.9 was not found", 'pip install "xpuruntime[cuda]"', "kernels.matmul",
                "advisory", "option_of_alpha", plan.request_hash[:19],
                plan.execution_hash[:19], "image: float32[", "options.threads", "warning:",
            ):  # fmt: skip
                assert part in text, part

    def test_the_judgement_is_what_the_engine_said_in_a_type_of_its_own(self) -> None:
        engine = TypedEngine(devices=("cpu",))
        decision = decide(PlanRequest(model=MODEL), Policy(), CPU, {engine.name: engine})
        assert decision.judgement.verdict == decision.plan.accepted
        assert decision.judgement.settings is TypedEngine.SETTINGS
        assert decision.judgement.uncompilable == "it is typed"
        assert decision.plan.settings == {"threads": 2, "order": ["b", "a"]}
        assert Plan.from_json(decision.plan.to_json()) == decision.plan

    def test_equal_arguments_give_equal_plans(self) -> None:
        assert settle(TestModes.POLICY, GPU) == settle(TestModes.POLICY, GPU)
