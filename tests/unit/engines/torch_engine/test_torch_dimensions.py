# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of the sizes that an exported program leaves open, in place of PyTorch's symbols."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.cli.entry import run
from xpuruntime.engines.precision import probe_shape

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")
import xpuruntime.pytorch as xt  # noqa: E402

pytestmark = pytest.mark.torch
KEY = "xpuruntime.dimensions"
X, Y, Z = torch.zeros(3, 4), torch.zeros(4, 4), torch.zeros(5, 6)


def dim(name: str, **limits: int) -> Any:
    return torch.export.Dim(name, **limits)


class Net(torch.nn.Module):
    def forward(self, x: Any, y: Any, more: Any) -> Any:
        return x + y[1:], torch.cat([x, y]), more["z"] * 2


class Halves(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x.sum() + y.sum(), y


class Sum(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x + y


def net(path: Path, write: str) -> Path:
    rows = dim("rows", max=32)
    shapes = ({0: rows}, {0: rows + 1}, {"z": {0: dim("batch"), 1: torch.export.Dim.AUTO}})
    return written(path, Net(), (X, Y, {"z": Z}), shapes, write)


def written(path: Path, model: Any, args: Any, shapes: Any, write: str = "ours") -> Path:
    if write == "ours":
        xt.export(model.eval(), args, path, dynamic_shapes=shapes)
    else:
        torch.export.save(torch.export.export(model, args, dynamic_shapes=shapes, strict=write == "strict"), path)
    return path


def shapes_of(path: Path) -> tuple[list[Any], list[Any]]:
    with xrt.InferenceSession(path, device="cpu") as session:
        return [input_.shape for input_ in session.inputs], [output.shape for output in session.outputs]


def test_names_of_our_own_files_are_those_that_were_given(tmp_path: Path) -> None:
    inputs, outputs = shapes_of(net(tmp_path / "net.pt2", "ours"))
    assert inputs == [("rows", 4), ("rows + 1", 4), ("batch", "more_z.1")]
    assert outputs == [("rows", 4), ("2*rows + 1", 4), ("batch", "more_z.1")]


@pytest.mark.parametrize("write", ["torch", "strict"])
def test_names_of_other_files_tell_input_and_axis(tmp_path: Path, write: str) -> None:
    inputs, outputs = shapes_of(net(tmp_path / "net.pt2", write))
    assert inputs == [("x.0", 4), ("x.0 + 1", 4), ("more_z.0", "more_z.1")]
    assert outputs == [("x.0", 4), ("2*x.0 + 1", 4), ("more_z.0", "more_z.1")]


def test_sizes_that_only_others_are_made_of(tmp_path: Path) -> None:
    shapes = ({0: 2 * dim("half")}, {0: 2 * dim("half"), 1: dim("n")})
    args = (torch.zeros(4, 4), torch.zeros(4, 6))
    found = shapes_of(written(tmp_path / "ours.pt2", Halves(), args, shapes))
    assert found == ([("2*half", 4), ("2*half", "n")], [(), ("2*half", "n")])
    found = shapes_of(written(tmp_path / "other.pt2", Halves(), args, shapes, "torch"))
    assert found == ([("x.0", 4), ("x.0", "y.1")], [(), ("x.0", "y.1")])


def test_sizes_that_turn_out_to_be_equal_share_the_name(tmp_path: Path) -> None:
    auto = torch.export.Dim.AUTO
    for index, shapes in enumerate((({0: dim("n")}, {0: auto}), ({0: auto}, {0: dim("n")}))):
        path = written(tmp_path / f"{index}.pt2", Sum(), (X, X), shapes)
        assert shapes_of(path) == ([("n", 4), ("n", 4)], [("n", 4)])


def test_names_that_are_symbols_of_another_size(tmp_path: Path) -> None:
    with zipfile.ZipFile(net(tmp_path / "net.pt2", "ours")) as archive:
        (place,) = (name for name in archive.namelist() if name.endswith(f"/extra/{KEY}"))
        symbols = {name: symbol for symbol, name in json.loads(archive.read(place)).items()}
    shapes = ({0: (n := dim(symbols["batch"]))}, {0: n + 1}, {"z": {0: dim(symbols["rows"])}})
    inputs, _ = shapes_of(written(tmp_path / "crossed.pt2", Net(), (X, Y, {"z": Z}), shapes))
    assert inputs == [(symbols["batch"], 4), (f"{symbols['batch']} + 1", 4), (symbols["rows"], 6)]


@pytest.mark.parametrize("text", ["{", "[1]", '{"s77": 1}', '{"s77": ""}'])
def test_names_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    good, bad = net(tmp_path / "net.pt2", "ours"), tmp_path / "bad" / "net.pt2"
    bad.parent.mkdir()
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(bad, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, text if entry.filename.endswith(KEY) else old.read(entry))
    with pytest.raises(xrt.ModelError, match=rf"{KEY} is no object of names by symbol.*Fix: export it again"):
        xrt.plan(bad, device="cpu")


def test_they_are_left_out_where_pytorch_does_not_tell_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xpuruntime.pytorch.exporter import export_module

    def untold(program: Any) -> Any:
        return program.a_name_of_another_version

    monkeypatch.setattr(export_module, "dimension_names", untold)
    done = xt.export(Sum().eval(), (X, X), tmp_path / "sum.pt2", dynamic_shapes=({0: dim("n")}, {0: dim("n")}))
    assert "names of sizes are left out" in "".join(done.notes)
    assert shapes_of(done.path)[0] == [("x.0", 4), ("x.0", 4)]


@pytest.mark.parametrize("write", ["ours", "torch"])
def test_they_bind_and_are_held(tmp_path: Path, write: str) -> None:
    n = dim("n", max=8)
    path = written(tmp_path / "sum.pt2", Sum(), (X, X), ({0: n}, {0: n}), write)
    name = {"ours": "n", "torch": "x.0"}[write]
    with xrt.InferenceSession(path, device="cpu") as session:
        binding = session.bind({"x": (5, 4), "y": (5, 4)})
        binding.run()
        assert binding.outputs["output"].shape == (5, 4)
        with pytest.raises(xrt.InputError, match=rf"dimension '{name}' is 2 in input 'x' but 3 in input 'y'"):
            session.run({"x": np.zeros((2, 4), np.float32), "y": np.zeros((3, 4), np.float32)})
        with pytest.raises(xrt.InputError, match=rf"free dimensions \(x: float32 \[{name}, 4\]\)"):
            session.bind()
        with pytest.raises(xrt.InputError, match="axis 0 is from 0 to 8, got 9"):
            session.run(dict.fromkeys("xy", np.zeros((9, 4), np.float32)))


@pytest.mark.parametrize(("write", "name"), [("ours", "n"), ("torch", "x.0")])
def test_the_command_line_takes_them(tmp_path: Path, capfd: pytest.CaptureFixture[str], write: str, name: str) -> None:
    path = str(written(tmp_path / "sum.pt2", Sum(), (X, X), ({0: (n := dim("n"))}, {0: n}), write))
    arguments = ("bench", path, "-n", "3", "--warmup", "1", "--device", "cpu", "--json", "--dim")
    assert int(run([*arguments, f"{name}=7"])) == 0
    assert json.loads(capfd.readouterr().out)["shapes"] == {"x": [7, 4], "y": [7, 4]}
    assert int(run([*arguments, "batch=7"])) != 0
    assert f"the model has no dimension 'batch'. It has: {name}" in " ".join(capfd.readouterr().err.split())
    assert int(run(["plan", path, "--device", "cpu"])) == 0
    assert f"x: float32[{name}, 4]" in capfd.readouterr().out


def test_probe_sizes_come_from_dimension_names_not_from_tensor_names() -> None:
    from xpuruntime.engines.model import TensorInfo

    def probe(*shape: str) -> tuple[int, ...]:
        return probe_shape(TensorInfo(name="past_width", dtype="float32", shape=shape))

    assert probe("batch", "past_width") == (1, 0)
    assert probe("past_width.0", "past_width.1") == (1, 8)
