# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The file of a lock: the same bytes for the same lock, one record a line, and nothing read that is not whole."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest
from lock_values import ENGINE, a_lock

import xpuruntime as xrt
from xpuruntime.lockfile.canonical import load_lock, lock_bytes, parse_lock, save_lock
from xpuruntime.lockfile.measured import Measured
from xpuruntime.lockfile.records import Identity, Lock, UnitEntry, digest_of_part

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent


def test_what_is_written_is_read_back_to_the_same_bytes(tmp_path: Path) -> None:
    lock = a_lock()
    path = save_lock(lock, tmp_path / "m.lock")
    assert load_lock(path) == lock
    assert lock_bytes(load_lock(path)) == path.read_bytes()


def test_the_text_is_json_with_sorted_keys_and_one_record_a_line() -> None:
    text = lock_bytes(a_lock(3)).decode()
    plain = json.loads(text)
    assert list(plain) == sorted(plain)
    assert list(plain["identity"]) == sorted(plain["identity"])
    entries = [line for line in text.splitlines() if '"unit":' in line]
    assert len(entries) == 3
    assert json.loads(entries[0].strip().rstrip(","))["unit"] == "conv0+relu0"
    assert "größe" in text, "it is UTF-8, without escapes of letters"


def test_it_is_as_its_schema_says() -> None:
    schema = json.loads((HERE.parents[2] / "docs" / "reference" / "lock.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    plain = json.loads(lock_bytes(a_lock()))
    validator.validate(plain)
    del plain["identity"]["entries"][0]["known"]
    with pytest.raises(jsonschema.ValidationError, match="known"):
        validator.validate(plain)


def test_validators_that_entries_share_are_stated_once() -> None:
    identity = a_lock(20).identity
    ids = tuple(validator.id for validator in identity.validators)
    entries = tuple(msgspec.structs.replace(entry, depends_on=ids) for entry in identity.entries)
    lock = Lock.of(msgspec.structs.replace(identity, entries=entries))
    data = lock_bytes(lock)
    plain = json.loads(data)
    assert plain["identity"]["groups"] == {"g0": list(ids)}
    assert {tuple(entry["depends_on"]) for entry in plain["identity"]["entries"]} == {("g0",)}
    assert [tuple(call["depends_on"]) for call in plain["identity"]["calls"]] == [(ENGINE,)], "no entry shares it"
    assert parse_lock(data, "m.lock") == lock
    for entry in plain["identity"]["entries"]:
        entry["depends_on"] = list(ids)
    del plain["identity"]["groups"]
    assert parse_lock(json.dumps(plain), "m.lock") == lock, "as earlier releases wrote it, with the same digest"


@pytest.mark.parametrize("edit", [{"g0": ["eng-00000000"]}, {}, {"g1": [ENGINE, ENGINE]}])
def test_edited_groups_are_refused(edit: dict[str, list[str]]) -> None:
    identity = a_lock().identity
    shared = tuple(validator.id for validator in identity.validators)
    entries = tuple(msgspec.structs.replace(entry, depends_on=shared) for entry in identity.entries)
    plain = json.loads(lock_bytes(Lock.of(msgspec.structs.replace(identity, entries=entries))))
    plain["identity"]["groups"] = edit
    with pytest.raises(xrt.LockError, match=r"m\.lock was edited: its identity has the digest"):
        parse_lock(json.dumps(plain), "m.lock")


def test_only_the_identity_decides_the_digest() -> None:
    lock = a_lock()
    other = msgspec.structs.replace(
        lock, provenance=msgspec.structs.replace(lock.provenance, created="2030-01-01T00:00:00Z")
    )
    assert digest_of_part(other.identity) == lock.digest
    changed = msgspec.structs.replace(lock.identity, entries=lock.identity.entries[1:])
    assert digest_of_part(changed) != lock.digest


def test_the_fix_of_an_edited_file_has_its_model_and_its_path(tmp_path: Path) -> None:
    plain = json.loads(lock_bytes(a_lock()))
    plain["measured"]["memory_peak"] += 1
    (tmp_path / "m.lock").write_text(json.dumps(plain))
    with pytest.raises(xrt.LockError, match=f"`xrt lock {plain['identity']['model']['name']} -o {tmp_path}/m.lock`"):
        load_lock(tmp_path / "m.lock")


def test_edited_measurements_are_refused_where_they_are_sealed() -> None:
    plain = json.loads(lock_bytes(a_lock()))
    plain["measured"]["memory_peak"] += 1
    with pytest.raises(xrt.LockError, match=r"m\.lock was edited: its section measured has the digest .*Fix: restore"):
        parse_lock(json.dumps(plain), "m.lock")
    del plain["measured_digest"]
    earlier = parse_lock(json.dumps(plain), "m.lock")
    assert (a_lock().sealed, earlier.sealed, earlier.measured.memory_peak) == (True, False, 6)
    assert parse_lock(lock_bytes(earlier), "m.lock") == earlier
    assert b"measured_digest" not in lock_bytes(earlier)


def test_a_file_that_is_cut_off_anywhere_is_refused() -> None:
    data = lock_bytes(a_lock())
    for end in range(0, len(data) - 2, 13):
        with pytest.raises(xrt.LockError, match=r"m\.lock .*(lock|schema)"):
            parse_lock(data[:end], "m.lock")


def test_a_file_in_which_any_byte_of_the_identity_changed_is_refused() -> None:
    data = lock_bytes(a_lock())
    start, end = data.index(b'"identity"'), data.index(b'"measured"')
    refused = 0
    for at in range(start + 12, end, 17):
        edited = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            lock = parse_lock(edited, "m.lock")
        except xrt.LockError:
            refused += 1
        else:
            assert lock.identity == a_lock().identity, "only white space may change"
    assert refused > 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a lock"),
        ("[]", "not a lock"),
        ("{}", "not a lock"),
        ('{"schema": "xpuruntime.report/1"}', "its schema is 'xpuruntime.report/1'"),
        ('{"schema": "xpuruntime.lock/2"}', "upgrade xpuruntime"),
        ('{"schema": "xpuruntime.lock/0"}', "make it again"),
        ('{"schema": "xpuruntime.lock/1"}', "damaged lock"),
        ("[" * 100_000, "not a lock"),
        ("\ud800".encode("utf-8", "surrogatepass"), "not a lock"),
    ],
)
def test_what_is_no_lock_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(xrt.LockError, match=message):
        parse_lock(text, "m.lock")


def test_an_entry_that_depends_on_nothing_known_is_refused() -> None:
    identity = a_lock().identity
    entry = msgspec.structs.replace(identity.entries[0], depends_on=("lib-00000000",))
    lock = Lock.of(msgspec.structs.replace(identity, entries=(entry,)))
    with pytest.raises(xrt.LockError, match="'lib-00000000', which the lock lacks"):
        parse_lock(lock_bytes(lock), "m.lock")


def without(identity: dict[str, Any], kind: str) -> None:
    identity["validators"] = [validator for validator in identity["validators"] if validator["kind"] != kind]


def renamed(identity: dict[str, Any], id: str) -> None:
    identity["validators"][0].update(id=id)
    for entry in (*identity["entries"], *identity["calls"]):
        entry.update(depends_on=[id])


#: Edits of a lock as plain values, and what is said of them. Its digest is made anew each time.
CONTRADICTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "two validators": (lambda it: it["validators"].append(it["validators"][0]), "two validators of one id"),
    "two entries": (lambda it: it["entries"].append(it["entries"][0]), r"two entries of one unit: 's0 conv0\+relu0'"),
    "two outputs": (lambda it: it["outputs"].append(it["outputs"][0]), "two outputs of one name: 's0 probe:0 y'"),
    "two shapes": (lambda it: it["shapes"].append(it["shapes"][0]), "two input shapes of one id: 's0'"),
    "an entry of no shapes": (lambda it: it["entries"][0].update(at="S0"), r"'conv0\+relu0' is of the input shapes"),
    "an output of no shapes": (lambda it: it["outputs"][0].update(at=""), "output 'y' is of the input shapes ''"),
    "no model": (lambda it: it.update(model=None), "of inference, and has no model"),
    "no policy": (lambda it: it.update(policy=None), "of inference, and has no policy"),
    "no plan": (lambda it: it.update(plan=None), "of inference, and has no plan"),
    "a device": (lambda it: it["plan"].update(device='cpu"; import os'), "which no device is named"),
    "the key of a validator": (lambda it: it["validators"][0].update(key="torch"), "the id of the validator 'eng-"),
    "a validator of another engine": (lambda it: it["plan"].update(engine="torch"), "and the plan has 'torch'"),
    "the type of a fact": (lambda it: it["validators"][0].update(expect=[1]), "another type: Expected `object`"),
    "a version": (lambda it: it["validators"][0]["expect"].update(version="1\n2"), r"the version '1\\n2', which"),
    "a package": (lambda it: it["validators"][0]["expect"].update(package="a; rm x"), "the package 'a; rm x', which"),
    "no validator of the model": (lambda it: without(it, "model"), "has no validators of model, where one is"),
    "no validator of the policy": (lambda it: without(it, "policy"), "has no validators of policy, where one is"),
    "no validator of the processor": (lambda it: without(it, "cpu_isa"), "has no validators of cpu_isa, where one"),
    "no validator of the package": (lambda it: without(it, "package"), "no validator of the package xpuruntime"),
    "no shapes": (lambda it: it.update(shapes=[], entries=[], outputs=[]), "has no input shapes"),
    "another model": (lambda it: it["model"].update(sha256="b" * 64), "of another model than its record of 'm.onnx'"),
    "other weights": (lambda it: it["model"].update(external={"w.bin": "b"}), "external data are of other files"),
    "another policy": (lambda it: it["policy"].update(stated={}), "of another policy than the one that is stated"),
    "the id of a validator": (lambda it: renamed(it, "eng-00000000"), "the id of the validator 'eng-00000000'"),
    "a kernel unseen": (lambda it: it["entries"][0].update(kernel="k"), "has a kernel, and says that none was obs"),
    "a kernel seen": (lambda it: it["entries"][0].update(known="observed"), "no kernel, and says that one was obs"),
    "a kernel of a call": (lambda it: it["calls"][0].update(kernel="nan"), "'matmul fp32' of the kernel 'nan' is no"),
    "a fact of a call": (lambda it: it["calls"][0].update(facts={"a": 1}), "'matmul fp32 a=1' of the kernel 'cpu.b"),
    "a count": (lambda it: it["calls"][0].update(count=-1), "Expected `int` >= 0"),
    "a control": (lambda it: it["plan"].update(controls=[["a", "b"]]), "Expected `array` of length 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(name: str) -> None:
    edit, message = CONTRADICTIONS[name]
    plain = json.loads(lock_bytes(a_lock()))
    edit(plain["identity"])
    with contextlib.suppress(msgspec.ValidationError):
        plain["digest"] = digest_of_part(msgspec.convert(plain["identity"], Identity))
    with pytest.raises(xrt.LockError, match=rf"m\.lock is a damaged lock: .*{message}.*Fix: "):
        parse_lock(json.dumps(plain), "m.lock")


@pytest.mark.parametrize(
    "figures",
    [
        {"memory_peak": -1},
        {"batches": [{"rows": 0, "median_us": 1.0, "longest_us": 1.0, "runs": 1}]},
        {"batches": [{"rows": 1, "median_us": -1.0, "longest_us": 1.0, "runs": 1}]},
        {"memory": {"device": "cpu", "bytes": -1, "rows": 1}},
        {"latency_us": {"p50": 0}},
    ],
)
def test_figures_that_nothing_measures_are_refused(figures: dict[str, Any]) -> None:
    plain = json.loads(lock_bytes(a_lock()))
    plain["measured"].update(figures)
    with pytest.raises(xrt.LockError, match=r"damaged lock: Expected `\w+` >=? ?\d"):
        parse_lock(json.dumps(plain), "m.lock")


RATIO = {"control": "anchor", "ratio": 1.5, "low": 1.0, "high": 2.0, "confidence": 0.9, "rounds": 1}
BATCH = {"median_us": 1.0, "longest_us": 2.0, "runs": 1}


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"batches": [{**BATCH, "rows": 2}, {**BATCH, "rows": 1}]}, "not of ascending sizes"),
        ({"batches": [{**BATCH, "rows": 1, "longest_us": 0.5}]}, "took less than their median"),
        ({"latency_us": {"fastest": 2.0, "p50": 1.0}}, "not in order"),
        ({"ratios": {"start": {**RATIO, "ratio": 3.0}}}, "'start' is outside of the interval"),
        ({"samples": [{"name": "y", "at": "s0", "values": [1]}] * 2}, "two samples of one output: 's0 y'"),
    ],
)  # fmt: skip
def test_figures_that_contradict_each_other_are_refused(figures: dict[str, Any], message: str) -> None:
    plain = json.loads(lock_bytes(a_lock()))
    plain["measured"].update(figures)
    plain["measured_digest"] = digest_of_part(msgspec.convert(plain["measured"], Measured))
    with pytest.raises(xrt.LockError, match=rf"m\.lock is a damaged lock: .*{message}.*Fix: "):
        parse_lock(json.dumps(plain), "m.lock")


def test_a_hundred_thousand_entries_are_all_there(tmp_path: Path) -> None:
    lock = a_lock(100_000)
    path = save_lock(lock, tmp_path / "large.lock")
    found = load_lock(path)
    assert len(found.identity.entries) == 100_000
    assert isinstance(found.identity.entries[-1], UnitEntry)
    assert found.identity.dependents()[ENGINE][99_999] == "conv99999+relu99999"


@pytest.mark.parametrize("folder", ["missing/m.lock", "."])
def test_where_nothing_can_be_written_the_path_is_named(tmp_path: Path, folder: str) -> None:
    with pytest.raises(xrt.InputError, match=r"cannot write the lock .*Fix: give a path"):
        save_lock(a_lock(), tmp_path / folder)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(xrt.InputError, match=r"cannot read the lock .*No such file"):
        load_lock(tmp_path / "none.lock")
    save_lock(a_lock(), tmp_path / "model.lock")
    with pytest.raises(xrt.InputError, match=r"Fix: name '.*model\.lock'"):
        load_lock(tmp_path / "modl.lock")
