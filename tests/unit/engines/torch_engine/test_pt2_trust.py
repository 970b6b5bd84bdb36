# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A ``.pt2`` file runs none of its code unless it is trusted, and unpacks to nothing much larger than itself."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import xpuruntime as xrt  # noqa: E402
from xpuruntime.cli.entry import run  # noqa: E402
from xpuruntime.engines.torch.program.archive import Unsafe, check_program  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.torch
#: What the code of a hostile file would write: its own file beside the model.
PWNED = "PWNED"


class Net(torch.nn.Module):
    """Has a weight, a constant, an open size, a subgraph, and takes and gives trees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Any, *, y: Any) -> dict[str, Any]:
        more = torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))
        both = torch.cat([x, y]) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"a": self.layer(x) * x.shape[0] + self.scale, "b": [more, both]}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    size = torch.export.Dim("N", max=64)
    args, kwargs = (torch.ones(3, 4),), {"y": torch.ones(3, 4)}
    shapes = {"x": {0: size}, "y": {0: size}}
    torch.export.save(torch.export.export(Net().eval(), args, kwargs, dynamic_shapes=shapes), path)
    return path


def rewritten(sound: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """Write the archive again with each member changed."""
    with zipfile.ZipFile(sound) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name.partition("/")[2], old.read(name)))
    return target


def reaching(data: Any, words: tuple[Any, ...], value: Any) -> Any:
    """Set the place that some keys lead to."""
    for word in words[:-1]:
        data = data[word]
    data[words[-1]] = value


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (self.code,)


def pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def config(data: bytes, **changes: Any) -> bytes:
    table = json.loads(data)
    for entry in table["config"].values():
        entry.update(changes)
    return json.dumps(table).encode()


def in_weights(name: str, data: bytes, code: str) -> bytes:
    if name == "data/weights/model_weights_config.json":
        return config(data, use_pickle=True)
    return pickled(Evil(code)) if name.startswith("data/weights/weight_") else data


def in_constants(name: str, data: bytes, code: str) -> bytes:
    if name == "data/constants/model_constants_config.json":
        return config(data, use_pickle=True)
    return pickled(Evil(code)) if name.startswith("data/constants/tensor_") else data


def in_opaque_objects(name: str, data: bytes, code: str) -> bytes:
    import pickle

    if name == "data/constants/model_constants_config.json":
        return config(data, path_name="opaque_obj_0", use_pickle=True)
    return pickle.dumps(Evil(code)) if name.startswith("data/constants/tensor_") else data


def in_sample_inputs(name: str, data: bytes, code: str) -> bytes:
    return pickled((Evil(code), {})) if name == "data/sample_inputs/model.pt" else data


def in_program(*places: tuple[Any, ...], text: str) -> Callable[[str, bytes, str], bytes]:
    """Return a change that puts a text, with the code in place of CODE, into the program."""

    def change(name: str, data: bytes, code: str) -> bytes:
        if name != "models/model.json":
            return data
        program = json.loads(data)
        for place in places:
            reaching(program, place, text.replace("CODE", code))
        return json.dumps(program).encode()

    return change


INPUT = ("graph_module", "graph", "inputs", 0, "as_tensor", "name")
NODE = ("graph_module", "graph", "nodes", 1)
FORWARD = ("graph_module", "module_call_graph", 0, "signature")
ATTACKS: dict[str, Callable[[str, bytes, str], bytes]] = {
    "weights": in_weights,
    "constants": in_constants,
    "opaque objects": in_opaque_objects,
    "sample inputs": in_sample_inputs,
    "a size": in_program(
        ("graph_module", "graph", "tensor_values", "x", "sizes", 0, "as_expr", "expr_str"), text="[CODE, 1][1]"
    ),
    "an input's name": in_program(INPUT, text="x=CODE"),
    "a node's name": in_program((*NODE, "name"), text="x\n    CODE\n    y"),
    "an argument's name": in_program((*NODE, "inputs", 0, "name"), text="x=CODE, z"),
    "a parameter's name": in_program((*FORWARD, "forward_arg_names", 0), text="x=CODE"),
    "an operator": in_program((*NODE, "target"), text="torch.os.system"),
    "an operator that reads files": in_program((*NODE, "target"), text="torch.ops.aten.from_file.default"),
    "a default": in_program(
        (*FORWARD, "in_spec"),
        text='[1, {"type": "collections.defaultdict", "context": {"default_factory_module": "antigravity",'
        ' "default_factory_name": "x", "dict_context": []}, "children_spec": []}]',
    ),
    "an enumeration": in_program(
        (*FORWARD, "in_spec"),
        text='[1, {"type": "builtins.dict", "context": "[{\\"\\u005f_enum__\\": 1, \\"fqn\\": \\"antigravity:x\\",'
        ' \\"name\\": \\"y\\"}]", "children_spec": []}]',
    ),
}


def test_sound_files_load_and_compute(sound: Path) -> None:
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    with torch.no_grad():
        want = torch.export.load(sound).module()(x, y=y)
    with xrt.InferenceSession(sound, device="cpu") as session:
        outputs = session.run({"x": x.numpy(), "y": y.numpy()})
    for got, expected in zip(outputs.values(), (want["a"], *want["b"]), strict=True):
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_code_of_a_file_runs(
    attack: str, sound: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / PWNED
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    change = ATTACKS[attack]
    evil = rewritten(sound, tmp_path / "evil.pt2", lambda name, data: change(name, data, code))
    assert any(
        zipfile.ZipFile(evil).read(name) != zipfile.ZipFile(sound).read(name)
        for name in zipfile.ZipFile(evil).namelist()
    )
    for call in (xrt.plan, xrt.InferenceSession):
        with pytest.raises(xrt.ModelError, match=r"evil\.pt2.*can run code of the file.*--trust"):
            call(evil, device="cpu")
    for command in ("plan", "run", "explain", "bench", "profile"):
        assert run([command, str(evil)]) == 2
    assert "--trust" in capfd.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("attack", ["weights", "sample inputs"])
def test_the_attacks_are_real(attack: str, sound: Path, tmp_path: Path) -> None:
    """With trust the code does run, so that the tests above can fail."""
    mark = tmp_path / PWNED
    code = f"__import__('pathlib').Path({str(mark)!r}).touch() or __import__('torch').ones(2, 4)"
    change = ATTACKS[attack]
    evil = rewritten(sound, tmp_path / "evil.pt2", lambda name, data: change(name, data, code))
    with pytest.raises(xrt.XpuRuntimeError):
        xrt.plan(evil, device="cpu", trust=True)
    assert mark.exists()


def test_trust_loads_what_is_no_plain_tensor(sound: Path, tmp_path: Path) -> None:
    def change(name: str, data: bytes) -> bytes:
        if name == "data/weights/model_weights_config.json":
            table = json.loads(data)
            table["config"]["layer.weight"].update(use_pickle=True, path_name="weight_9")
            return json.dumps(table).encode()
        return data

    odd = rewritten(sound, tmp_path / "odd.pt2", change)
    with zipfile.ZipFile(odd, "a") as archive:
        code = "__import__('torch').nn.Parameter(__import__('torch').ones(2, 4))"
        archive.writestr("net/data/weights/weight_9", pickled(Evil(code)))
    with pytest.raises(xrt.ModelError, match=r"weight_9 is a pickle that names eval"):
        xrt.plan(odd, device="cpu")
    assert xrt.plan(odd, device="cpu", trust=True).engine == "torch"
    assert run(["plan", str(odd), "--trust"]) == 0
    with xrt.InferenceSession(odd, device="cpu", trust=True) as session:
        assert session.run({name: np.ones((3, 4), np.float32) for name in ("x", "y")})


@pytest.mark.parametrize("member", ["net/extra/xpuruntime.policy", "net/models/more.json"])
def test_bombs(member: str, sound: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.pt2"
    bomb.write_bytes(sound.read_bytes())
    with (
        zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open(member, "w", force_zip64=True) as file,
    ):
        for _ in range(300):
            file.write(b" " * (1 << 20))
    with pytest.raises(xrt.ModelError, match="more than 32 times its size"):
        xrt.plan(bomb, device="cpu")
    with pytest.raises(xrt.ModelError, match="more than 32 times its size"):
        xrt.plan(bomb, device="cpu", trust=True)


def test_bombs_inside_of_pickles(sound: Path, tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (300 << 20))
    bomb = rewritten(
        sound,
        tmp_path / "bomb.pt2",
        lambda name, data: inner.getvalue() if name == "data/sample_inputs/model.pt" else data,
    )
    with pytest.raises(xrt.ModelError, match="more than 32 times its size"):
        xrt.plan(bomb, device="cpu")


def test_weights_without_data(sound: Path, tmp_path: Path) -> None:
    empty = rewritten(
        sound,
        tmp_path / "empty.pt2",
        lambda name, data: b"" if name.startswith("data/weights/weight_") else data,
    )
    with pytest.raises(xrt.ModelError, match="has no data and a size that is not 0"):
        xrt.plan(empty, device="cpu")


SIZES = (
    "s77",
    "2*s77 + 1",
    "Symbol('s77', positive=True, integer=True)",
    "Mul(Integer(2), Symbol('u0', integer=True))",
    "Pow(Symbol('s0', integer=True), Integer(2))",
    "Pow(Symbol('s0', integer=True), Integer(-1))",
    "((s0 - 1)//2)**2",
    "Max(1, s0)",
    "Float('0.5', precision=53)",
)
CODE = (
    "__import__('os')",
    "s0.__class__",
    "eval(chr(49))",
    "(lambda: 1)()",
    "[1][0]",
    "Symbol('__import__')",
    "Symbol(name=eval)",
    "Integer(s0, evaluate=print(1))",
    "9**9**9**9",
    "Pow(9, Pow(9, 99))",
    "Pow(Symbol('s0'), Integer(10**9))",
    "Pow(Integer(9), Integer(60))",
    "1 << 64",
    "u99999999999",
    "f'{s0}'",
    "\uff45val(s0)",
    "(ev\nal)(s0)",
    "s0 if s0 else 1",
    "",
    "(" * 3000,
)


@pytest.mark.parametrize("text", SIZES)
def test_sizes_that_pytorch_writes(text: str) -> None:
    check_program({"range_constraints": {"s0": {}, "s77 + 1": {}}, "x": [{"expr_str": text}]})


@pytest.mark.parametrize("text", CODE)
def test_sizes_that_are_code(text: str) -> None:
    with pytest.raises(Unsafe):
        check_program({"x": [{"expr_str": text}]})
    with pytest.raises(Unsafe):
        check_program({"range_constraints": {text: {}}})
