# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks that are there: kept, compared, upgraded in part, accepted with a reason, and read where they cannot hold."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import onnx
import pytest
from locked_cases import Case, make_case, with_entry, with_validator

import xpuruntime as xrt
from xpuruntime.cli.entry import run
from xpuruntime.lockfile.canonical import load_lock, save_lock
from xpuruntime.lockfile.records import Identity, Lock

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("onnxruntime", tmp_path_factory.mktemp("base"))


@pytest.fixture
def case(base: Case, tmp_path: Path) -> Case:
    model, path = Path(shutil.copy(base.model, tmp_path)), Path(shutil.copy(base.path, tmp_path))
    return Case(base.engine, model, path, base.policy, base.lock)


def plant(case: Case, *edits: Any) -> bytes:
    identity = case.lock.identity
    for edit in edits:
        identity = edit(identity)
    save_lock(Lock.of(identity, provenance=case.lock.provenance), case.path)
    return case.path.read_bytes()


OTHER_ENGINE = with_validator("engine", lambda e: {**e, "version": "0.9", "package": "onnxruntime-gpu==0.9"})
OTHER_LIBRARY = with_validator("library", lambda e: {**e, "build_id": "0" * 40})
OTHER_ENTRY = with_entry(lambda one: "mm2" in one.sources, precision="fp64")


def test_one_that_holds_is_not_written_again(case: Case) -> None:
    before = case.path.stat().st_mtime_ns, case.path.read_bytes()
    lock = xrt.lock(case.model, output=case.path)
    assert (lock.written, lock.drifts) == (False, ())
    assert (case.path.stat().st_mtime_ns, case.path.read_bytes()) == before
    assert not xrt.lock(case.model, output=case.path, upgrade=True).written


def test_a_renamed_file_is_the_same_model(case: Case) -> None:
    renamed = case.model.rename(case.model.with_name("renamed.onnx"))
    result = xrt.lock(renamed, output=case.path, check=True)
    assert result.drifts == ()


def test_other_weights_are_told_in_a_sentence_and_the_command_takes_them(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = onnx.load(case.model)
    weights = next(tensor for tensor in other.graph.initializer if len(tensor.dims) == 2)
    values = onnx.numpy_helper.to_array(weights) * 2
    weights.CopyFrom(onnx.numpy_helper.from_array(values, weights.name))
    onnx.save(other, tmp_path / "re trained.onnx")
    monkeypatch.chdir(tmp_path)
    result = xrt.verify("re trained.onnx", lock=case.path, only=["evidence"])
    claim = next(claim for claim in result.claims if claim.id == "evidence.lock.model")
    assert claim.observed == "the weights differ, the graph is the same"
    assert f"model {case.model.name}: {claim.observed} (expected" in claim.reason
    assert not re.search("[0-9a-f]{13}", f"{claim.requested} {claim.reason}")
    command = str(claim.fix).partition("`")[2].partition("`")[0]
    assert "--accept model --accept output" in command
    capsys.readouterr()
    assert run(shlex.split(command)[1:]) == 0
    assert "Fix" not in capsys.readouterr().out
    assert xrt.lock("re trained.onnx", output=case.path, check=True).drifts == ()


def test_one_that_does_not_hold_is_kept_and_named(case: Case) -> None:
    before = plant(case, OTHER_LIBRARY, OTHER_ENTRY)
    with pytest.raises(xrt.LockError, match=r"(?s)library libscipy_openblas.*precision mm2") as refused:
        xrt.lock(case.model, output=case.path)
    assert case.path.read_bytes() == before
    assert [drift.code for drift in refused.value.drifts] == ["library", "precision"]


def renamed_input(case: Case, name: str) -> None:
    """Give the first input of the model another name, as another version of an exporter does."""
    import onnx

    model = onnx.load(case.model)
    before = model.graph.input[0].name
    model.graph.input[0].name = name
    for node in model.graph.node:
        node.input[:] = [name if one == before else one for one in node.input]
    onnx.save(model, case.model)


def test_a_model_with_other_inputs_is_compared_and_upgraded(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed_input(case, "pixels")
    lock = xrt.lock(case.model, output=case.path, check=True)
    assert {"model", "shapes"} <= {drift.code for drift in lock.drifts}
    assert not next(drift for drift in lock.drifts if drift.code == "shapes").restore
    assert run(["lock", str(case.model), "-o", str(case.path), "--check"]) == 1
    assert run(["diff", str(case.path), "here", str(case.model)]) == 1
    assert "evidence.lock.model" in [claim.id for claim in xrt.verify(case.model, lock=case.path).claims]
    assert xrt.lock(case.model, output=case.path, upgrade=True).written
    assert run(["lock", str(case.model), "-o", str(case.path), "--check"]) == 0


def test_another_policy_explains_the_plan_that_follows(case: Case) -> None:
    policy = {**msgspec.to_builtins(case.lock.identity.policy.document), "mode": "strict"}
    with pytest.raises(xrt.LockError, match=r"plan mode: expected nothing, found strict") as refused:
        xrt.lock(case.model, policy, case.path)
    fixes = {drift.code: drift.restore for drift in refused.value.drifts}
    assert "state the policy that was locked" in fixes["policy"]
    assert not fixes["plan"]


def test_check_and_dry_run_write_nothing(case: Case) -> None:
    before = plant(case, OTHER_ENTRY)
    assert [drift.code for drift in xrt.lock(case.model, output=case.path, check=True).drifts] == ["precision"]
    tried = xrt.lock(case.model, output=case.path, upgrade=True, dry_run=True)
    assert (tried.written, tried.changed) == (False, True)
    assert case.path.read_bytes() == before


def test_a_dry_run_on_a_lock_that_holds_changes_nothing(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path, policy = str(case.model), tmp_path / "new.lock", tmp_path / "p.yaml"
    xrt.Policy.coerce(case.policy).save(policy)
    command = ["lock", model, "--policy", str(policy), "-o", str(path), "--shapes", "x=2x64", "--dry-run"]
    assert run(command) == 0
    assert "would be written" in capsys.readouterr().out
    assert run(command[:-1]) == 0
    assert ": written" in capsys.readouterr().out
    assert run(command) == 0
    assert ": holds" in capsys.readouterr().out


def test_upgrade_takes_everything(case: Case) -> None:
    plant(case, OTHER_LIBRARY, OTHER_ENTRY, OTHER_ENGINE)
    assert xrt.lock(case.model, output=case.path, upgrade=True).written
    assert load_lock(case.path).digest == case.lock.digest


@pytest.mark.parametrize("pattern", ["mm2", "mm*"])
def test_a_unit_is_upgraded_alone(case: Case, pattern: str) -> None:
    plant(case, OTHER_ENTRY)
    assert xrt.lock(case.model, output=case.path, upgrade_units=[pattern]).written
    assert load_lock(case.path).digest == case.lock.digest
    before = plant(case, OTHER_ENTRY, OTHER_LIBRARY)
    with pytest.raises(xrt.LockError) as refused:
        xrt.lock(case.model, output=case.path, upgrade_units=[pattern])
    assert [drift.code for drift in refused.value.drifts] == ["library"]
    assert case.path.read_bytes() == before
    plant(case, OTHER_ENTRY)
    with pytest.raises(
        xrt.InputError, match=r"upgrade_units: 'other\*' matches no unit or node of the lock or the model; "
    ):
        xrt.lock(case.model, output=case.path, upgrade_units=["other*"])


def test_a_package_is_upgraded_with_what_follows(case: Case) -> None:
    plant(case, OTHER_ENGINE, OTHER_LIBRARY, OTHER_ENTRY)
    with pytest.raises(xrt.InputError, match="the lock does not depend on 'onnxruntimegpu'; did you mean 'onnxruntime"):
        xrt.lock(case.model, output=case.path, upgrade_packages=["onnxruntimegpu"])
    with pytest.raises(xrt.LockError):
        xrt.lock(case.model, output=case.path, upgrade_packages=["xpuruntime"])
    assert xrt.lock(case.model, output=case.path, upgrade_packages=["onnxruntime-gpu"]).written
    plant(case, OTHER_ENGINE, with_validator("device", lambda e: {**e, "name": "Z80"}))
    with pytest.raises(xrt.LockError) as refused:
        xrt.lock(case.model, output=case.path, upgrade_packages=["onnxruntime-gpu"])
    assert [drift.code for drift in refused.value.drifts] == ["device"]


def test_what_is_accepted_is_recorded(case: Case) -> None:
    plant(case, OTHER_LIBRARY)
    lock = xrt.lock(case.model, output=case.path, accept=["library"], why="rebuilt by the distribution")
    assert lock.written
    (accepted,) = load_lock(case.path).provenance.accepted
    assert (accepted.code, accepted.why) == ("library", "rebuilt by the distribution")
    assert "build_id 0000" in accepted.expected
    assert accepted.at.endswith("Z")
    plant(case, OTHER_LIBRARY, OTHER_ENTRY)
    with pytest.raises(xrt.LockError) as refused:
        xrt.lock(case.model, output=case.path, accept=["library"], why="x")
    assert [drift.code for drift in refused.value.drifts] == ["precision"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accept": ["drivr"], "why": "x"}, "did you mean 'driver'"),
        ({"accept": ["driver"]}, "needs a reason"),
        ({"why": "x"}, "nothing to accept"),
        ({"shapes": {"y": (1, 2)}}, "no input 'y'"),
    ],
)
def test_wrong_arguments(case: Case, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(xrt.InputError, match=message):
        xrt.lock(case.model, output=case.path, **arguments)


def test_a_policy_that_names_its_lock(case: Case, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    execution = {**case.policy["execution"], "lock": str(case.path)}
    xrt.Policy.coerce({**case.policy, "execution": execution}).save(policy)
    with xrt.InferenceSession(case.model, policy=policy) as session:
        assert session.plan.control("execution.lock") is not None
        assert session.plan.policy_source == "lock"
    plant(case, OTHER_LIBRARY)
    for call in (xrt.InferenceSession, xrt.plan):
        with pytest.raises(xrt.LockError, match="library"):
            call(case.model, policy=policy)


def test_frozen_takes_the_policy_of_the_lock(case: Case, tmp_path: Path) -> None:
    with xrt.InferenceSession(case.model, lock=case.path, frozen=True) as session:
        assert session.policy.kernels.matmul == "cpu.blas"
    with pytest.raises(xrt.PolicyError, match="leave out policy"):
        xrt.InferenceSession(case.model, lock=case.path, frozen=True, policy=tmp_path / "none.yaml")
    with pytest.raises(xrt.InputError, match="none is named"):
        xrt.InferenceSession(case.model, frozen=True)
    plant(case, OTHER_LIBRARY)
    with pytest.raises(xrt.LockError, match="library"):
        xrt.InferenceSession(case.model, lock=case.path, frozen=True)


def test_a_lock_of_something_else(case: Case) -> None:
    save_lock(Lock.of(Identity(subject="training")), case.path)
    with pytest.raises(xrt.LockError, match="lock of training, and a session needs one of inference"):
        xrt.InferenceSession(case.model, lock=case.path)
    with pytest.raises(xrt.InputError, match="lock of training"):
        xrt.lock(case.model, output=case.path)


def test_outputs_within_a_tolerance(case: Case) -> None:
    """Where bits do not repeat, values are compared: near ones pass, others do not."""
    from xpuruntime.inference.locked import observed_outputs, probe_at
    from xpuruntime.lockfile.measured import Measured

    with case.open() as session:
        result = session.run(probe_at(session.model, case.lock.identity.shapes[0].inputs))
    other = {name: array * 1.0001 for name, array in result.items()}
    outputs, samples = observed_outputs([result, other], rtol=1e-3, atol=1e-6)
    assert [output.grade for output in outputs] == ["tolerance"]
    identity = msgspec.structs.replace(case.lock.identity, outputs=outputs)
    save_lock(Lock.of(identity, measured=Measured(samples=samples)), case.path)
    case.open().close()
    far = msgspec.structs.replace(samples[0], values=tuple(1.01 * value + 0.1 for value in samples[0].values))
    save_lock(Lock.of(identity, measured=Measured(samples=(far,))), case.path)
    with pytest.raises(xrt.LockError, match="output y"):
        case.open()


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(case: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in this process, in the folder of the model."""

    def call(*words: str, **env: str) -> Result:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(case.model.parent)
            for name, value in env.items():
                patch.setenv(name, value)
            code = run(list(words))
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Result(int(code), out, err)

    return call


def test_the_command(case: Case, command: Callable[..., Result]) -> None:
    done = command("lock", "model.onnx", "--check")
    assert done.returncode == 0, done.stderr
    assert "model.lock: holds" in done.stdout
    done = command("lock", "model.onnx", "--check", "--json", XPURUNTIME_CPU_THREADS="3")
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout)
    assert [drift["code"] for drift in record["drifts"]] == ["environment"]
    done = command("run", "model.onnx", "--lock", "model.lock", XPURUNTIME_CPU_THREADS="3")
    assert done.returncode == 1
    assert "unset XPURUNTIME_CPU_THREADS" in done.stderr
    done = command("explain", "model.onnx", "--lock", "model.lock", "--frozen", "--json")
    assert done.returncode == 0, done.stderr
    assert any(observation["key"] == "execution.lock" for observation in json.loads(done.stdout)["observations"])
    assert command("plan", "model.onnx", "--lock", "model.lock").returncode == 0
    assert command("bench", "model.onnx", "--lock", "model.lock", "--runs", "3", "--json").returncode == 0
    assert command("run", "model.onnx", "--lock", "none.lock").returncode == 2
    case.path.write_bytes(case.path.read_bytes()[:500])
    done = command("run", "model.onnx", "--lock", "model.lock")
    assert done.returncode == 1
    assert "not a lock" in done.stderr


def test_deviations_are_those_of_explain(case: Case, command: Callable[..., Result]) -> None:
    words = ("model.onnx", "-d", "cpu", "-e", "onnxruntime", "--precision", "fp16")
    explained = json.loads(command("explain", *words, "--json").stdout)
    (deviation,) = [seen for seen in explained["observations"] if seen["status"] == "substituted"]
    done = command("lock", *words, "-o", "fp16.lock")
    assert done.stdout.splitlines()[0] == "fp16.lock: written, with 1 deviation from the policy"
    told = f"deviation: {deviation['key']}: requested fp16; the lock holds what ran, {deviation['observed']}"
    assert told in done.stdout
    assert f"{len(explained['units'])} units (" in done.stdout
    again = command("lock", "model.onnx", "-o", "fp16.lock", "--check", "--json")
    assert again.returncode == 0
    assert [seen["key"] for seen in json.loads(again.stdout)["deviations"]] == ["execution.precision"]


def test_the_statement(case: Case, command: Callable[..., Result]) -> None:
    folder = case.model.parent
    case.path.unlink()
    words = ("lock", "model.onnx", "-e", "onnxruntime", "-d", "cpu", "--shapes", "x=2x64", "--statement", "s.json")
    done = command(*words)
    assert done.returncode == 0, done.stderr
    statement = json.loads((folder / "s.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    digests = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    for name in ("model.onnx", "model.lock"):
        assert digests[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_two_processes_lock_one_file(case: Case) -> None:
    folder = case.model.parent
    case.path.unlink()
    code = "from xpuruntime.cli import main; main()"
    words = ["lock", "model.onnx", "-e", "onnxruntime", "-d", "cpu"]
    both = [subprocess.Popen([sys.executable, "-c", code, *words], cwd=folder, stdout=subprocess.PIPE) for _ in "ab"]
    for one in both:
        one.communicate(timeout=120)
    assert [one.returncode for one in both] == [0, 0]
    assert load_lock(case.path).identity.subject == "inference"
    assert {path.name for path in folder.iterdir()} == {"model.onnx", "model.lock"}


def test_figures_without_a_digest_are_noted_and_an_upgrade_seals_them(case: Case, tmp_path: Path) -> None:
    plain = json.loads(case.path.read_bytes())
    del plain["measured_digest"]
    earlier = tmp_path / "earlier.lock"
    earlier.write_text(json.dumps(plain))
    before = xrt.verify(case.model, lock=earlier, only=["evidence"]).notes
    assert [one for one in before if "is not detected: `xrt lock --upgrade` seals them" in one]
    assert xrt.lock(case.model, output=earlier, upgrade=True).lock.sealed
    after = xrt.verify(case.model, lock=earlier, only=["evidence"]).notes
    assert list(after) == [one for one in before if "seals" not in one]
