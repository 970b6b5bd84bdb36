# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `calibration=` takes, and what it refuses."""

from __future__ import annotations

import io
import tracemalloc

import numpy as np
import pytest
from exported_models import exported

from xpuruntime.engines.model import inspect_bytes, inspect_model, with_shapes
from xpuruntime.engines.quantization import Calibration
from xpuruntime.errors import InputError
from xpuruntime.policies import Policy
from xpuruntime.testing import models

ROW = np.zeros((1, 4), np.float32)


@pytest.fixture(scope="module")
def convnet():
    return inspect_model(exported("convnet"))


@pytest.fixture(scope="module")
def two():
    return inspect_bytes(models.two_inputs())


@pytest.fixture
def images():
    return np.random.default_rng(0).random((6, 3, 32, 32), dtype=np.float32)


def pairs(count, width=4):
    rng = np.random.default_rng(1)
    return [{name: rng.random((1, width), dtype=np.float32) for name in "ab"} for _ in range(count)]


def test_every_form_of_the_same_samples_has_the_same_digest(convnet, images, tmp_path):
    rows = [image[None] for image in images]
    np.savez(tmp_path / "stack.npz", image=images)
    np.savez_compressed(tmp_path / "packed.npz", image=images)
    np.savez(tmp_path / "each.npz", **{f"image/{i}": row for i, row in enumerate(rows)})
    np.savez(tmp_path / "whole.npz", image=images[:, None])
    np.save(tmp_path / "stack.npy", images)
    np.save(tmp_path / "columns.npy", np.asfortranarray(images))
    for form in ("npz", "npy"):
        (tmp_path / form).mkdir()
    for i, row in enumerate(rows):
        np.savez(tmp_path / "npz" / f"{i}.npz", image=row)
        np.save(tmp_path / "npy" / f"{i}.npy", row)
    forms = [
        *(tmp_path / name for name in ("stack.npz", "packed.npz", "each.npz", "whole.npz", "stack.npy", "columns.npy")),
        tmp_path / "npz",
        str(tmp_path / "npy"),
        images,
        {"image": images},
        {f"image/{i}": row for i, row in enumerate(rows)},
        rows,
        tuple({"image": row} for row in rows),
        (row for row in rows),
        iter([{"image": row} for row in rows]),
        dict(enumerate(rows)).values(),
    ]
    calibrations = [Calibration(form, convnet) for form in forms]
    assert {calibration.digest for calibration in calibrations} == {calibrations[0].digest}
    assert {len(calibration) for calibration in calibrations} == {6}
    for one in calibrations:
        for _ in range(2):
            again = [sample["image"] for sample in one]
            assert np.array_equal(np.concatenate(again), images)
            assert all(array.flags.c_contiguous and array.shape == (1, 3, 32, 32) for array in again)


def test_the_digest_knows_order_values_and_names(two):
    given = pairs(3)
    digests = {
        Calibration(given, two).digest,
        Calibration(given[::-1], two).digest,
        Calibration([{"a": s["b"], "b": s["a"]} for s in given], two).digest,
        Calibration(given[:2], two).digest,
    }
    assert len(digests) == 4


def test_a_generator_is_consumed_once(two):
    given, indexes = pairs(4), []

    def make():
        for index, sample in enumerate(given):
            indexes.append(index)
            yield sample

    calibration = Calibration(make(), two)
    for _ in range(3):
        assert [float(sample["a"][0, 0]) for sample in calibration] == [float(sample["a"][0, 0]) for sample in given]
    assert indexes == [0, 1, 2, 3]


def test_a_generator_that_fails_passes_its_own_error_on(two):
    def broken():
        yield from pairs(1)
        raise RuntimeError("the camera is gone")

    with pytest.raises(RuntimeError, match="the camera is gone"):
        Calibration(broken(), two)


@pytest.mark.torch
def test_torch_tensors_are_samples_too(convnet, images):
    torch = pytest.importorskip("torch")
    assert Calibration(torch.from_numpy(images), convnet).digest == Calibration(images, convnet).digest


def test_a_fixed_batch_cuts_the_stack(convnet, images):
    fixed = with_shapes(convnet, Policy.coerce({"execution": {"shapes": {"image": [3, 3, 32, 32]}}}))
    calibration = Calibration(images, fixed)
    assert [sample["image"].shape for sample in calibration] == [(3, 3, 32, 32)] * 2
    with pytest.raises(InputError, match=r"has 5 rows, and the model takes 3 at a time; give a multiple of 3"):
        Calibration(images[:5], fixed)
    with pytest.raises(InputError, match=r"sample 0 \(item 0 of a list of 1\): .*shape \[1, 3, 32, 32\].*3"):
        Calibration([images[:1]], fixed)


def test_a_large_file_is_never_whole_in_memory(convnet, tmp_path):
    with (tmp_path / "large.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2000, 3, 32, 32)})
        file.truncate(file.tell() + 2000 * 3 * 32 * 32 * 4)
    tracemalloc.start()
    calibration = Calibration(tmp_path / "large.npy", convnet)
    assert sum(1 for _ in calibration) == len(calibration) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000, f"24 MB of samples took {peak / 1e6:.0f} MB"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], r"a list of 0 holds no samples; quantizing needs inputs like those"),
        (iter(()), "holds no samples"),
        ([{"a": np.zeros((1, 4), np.float32)}], r"sample 0 \(item 0 of a list of 1\): input 'b' is missing"),
        ([*pairs(1), {"a": 1.0, "b": 2.0}], r"sample 1 .*input 'a' is a float, not an array"),
        ([{**pairs(1)[0], "c": np.zeros(1)}], "the model has no input 'c'"),
        ([*pairs(2), {n: v.astype(np.float64) for n, v in pairs(1)[0].items()}], r"sample 2 .*dtype float64.*float32"),
        ([{n: v * np.nan for n, v in pairs(1)[0].items()}], "sample 0 .*NaN or infinity"),
        ([pairs(1)[0]["a"]], "bare arrays are for models with one input, and this one has 2: 'a', 'b'"),
        (np.zeros((3, 4), np.float32), "bare arrays are for models with one input"),
        ({"a": ROW.repeat(3, 0), "b": ROW.repeat(2, 0)}, "different numbers of samples: 'a' 3, 'b' 2"),
        ({"a": np.float32(1), "b": np.float32(1)}, "'a' of the mapping is a single number"),
        ({"a": [1.0], "b": [2.0]}, "'a' is a list, not an array"),
        ({"a/0": 1, "b/0": 1, "a": 2}, "has 'a' for all samples beside arrays for single ones such as 'a/0'"),
        ({"a/0": 1, "a/2": 1, "b/0": 1, "b/2": 1}, "has no arrays numbered 1, but higher ones"),
        ({"a/first": 1}, "has the array 'a/first'. Fix: write 'a/0'"),
        ({"a/0": np.zeros((1, 4), np.float32)}, r"sample 0 \(number 0 of the mapping\): input 'b' is missing"),
        (7, "calibration= takes no int. Fix: pass the path of an .npz file"),
        (b"samples", "calibration= takes no bytes"),
        ("nowhere.npz", r"file or folder 'nowhere.npz'. Fix: write it with numpy.savez\('nowhere.npz', \*\*{'a': s"),
        ({}, "the mapping holds no samples"),
    ],
)  # fmt: skip
def test_refusals_name_the_sample_and_the_fix(two, data, said):
    with pytest.raises(InputError, match=said):
        Calibration(data, two)


def test_refusals_of_files(convnet, images, tmp_path):
    def refused(name, match):
        with pytest.raises(InputError, match=match):
            Calibration(tmp_path / name, convnet)

    (tmp_path / "data.txt").write_text("1 2 3")
    refused("data.txt", r"'data.txt' is neither .npz nor .npy nor a folder")
    (tmp_path / "empty").mkdir()
    refused("empty", r"holds no .npz or .npy file")
    (tmp_path / "junk.npz").write_bytes(b"not a zip")
    refused("junk.npz", r"'junk.npz' cannot be read: .*Write it again with np.savez")
    bytes_io = io.BytesIO()
    np.savez(bytes_io, image=images)
    (tmp_path / "cut.npz").write_bytes(bytes_io.getvalue()[:-200])
    refused("cut.npz", "'cut.npz' cannot be read")
    np.save(tmp_path / "cut.npy", images)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-5000])
    refused("cut.npy", "'cut.npy' cannot be read: it is cut off")
    np.savez(tmp_path / "objects.npz", image=np.array([{}, {}], dtype=object))
    refused("objects.npz", "the array 'image' of 'objects.npz' cannot be read: it holds Python objects")
    np.savez(tmp_path / "other.npz", picture=images)
    refused("other.npz", r"sample 0 \(number 0 of other.npz\): the model has no input 'picture'")


def test_files_that_change_meanwhile_are_noticed(convnet, images, tmp_path):
    np.save(tmp_path / "x.npy", images)
    calibration = Calibration(tmp_path / "x.npy", convnet)
    np.save(tmp_path / "x.npy", images[:4])
    with pytest.raises(InputError, match=r"held 6 samples when it was checked, and holds 4 now"):
        list(calibration)


def test_a_full_disk_under_a_generator(two, monkeypatch):
    from xpuruntime.engines.quantization import calibration

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(InputError, match=r"no room for more in the temporary folder \(No space left on device\)"):
        calibration.open_source(iter(pairs(2)), two)
