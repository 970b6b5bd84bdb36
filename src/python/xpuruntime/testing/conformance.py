# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`EngineSuite`: what every engine must do, whatever it is.

Subclass it in a test module of your engine, name the engine and the device, and run pytest::

    from xpuruntime.testing import EngineSuite


    class TestMyEngine(EngineSuite):
        engine = "mine"
        device = "cpu"
        unsupported = {"computes": "it only counts calls"}

What an engine cannot do is declared in `unsupported`, name of the check to reason; nothing is skipped silently.
"""

from __future__ import annotations

import gc
import signal
import threading
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.engines import default_registry
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.engines import EngineRegistry
    from xpuruntime.inference import InferenceSession

_THREADS = 16
_RUNS = 50


class EngineSuite:
    """The conformance checks; see the module's text."""

    engine: ClassVar[str]
    device: ClassVar[str]
    unsupported: ClassVar[dict[str, str]] = {}
    rtol: ClassVar[float] = 1e-4
    atol: ClassVar[float] = 1e-5
    symbol: ClassVar[str] = "N"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool")

    def registry(self) -> EngineRegistry:
        """Return the registry that has the engine."""
        return default_registry()

    def open(self, path: Path, **options: Any) -> InferenceSession:
        """Open a session on the engine under test."""
        return xrt.InferenceSession(path, device=self.device, engine=self.engine, registry=self.registry(), **options)

    @pytest.fixture(autouse=True)
    def _declared(self, request: pytest.FixtureRequest) -> None:
        check = request.node.originalname.removeprefix("test_")
        if check in self.unsupported:
            pytest.skip(f"{self.engine} declares {check!r} unsupported: {self.unsupported[check]}")

    @pytest.fixture
    def mlp(self, tmp_path: Path) -> Path:
        """Return the path of an MLP with a free batch."""
        return models.save(models.mlp(), tmp_path)

    def _x(self, rows: int = 4, seed: int = 1) -> np.ndarray[Any, Any]:
        return np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)

    def test_declarations_are_checks(self) -> None:
        """Every declared name is a check of this suite."""
        known = {name.removeprefix("test_") for name in dir(self) if name.startswith("test_")}
        assert set(self.unsupported) <= known

    def test_probe_and_plan(self, mlp: Path) -> None:
        """The engine reports itself, and the plan names it with a reason."""
        facts = self.registry().get(self.engine).probe()
        assert facts.version is not None
        assert facts.loadable
        plan = xrt.plan(mlp, device=self.device, engine=self.engine, registry=self.registry())
        assert plan.engine == self.registry().get(self.engine).name
        assert plan.device == self.device
        assert plan.accepted.reason

    def test_computes(self, mlp: Path) -> None:
        """Results agree with float64."""
        from onnx import numpy_helper

        weights = [numpy_helper.to_array(w).astype(np.float64) for w in models.mlp().graph.initializer]
        x = self._x()
        want = np.maximum(x.astype(np.float64) @ weights[0], 0) @ weights[1]
        with self.open(mlp, precision="fp32") as session:
            got = session.run({"x": x})["y"]
        np.testing.assert_allclose(got, want, rtol=self.rtol, atol=self.atol)

    def test_shapes_and_types(self, mlp: Path) -> None:
        """Outputs have the declared names, dtype and shape, for several batches of one session, also an empty one."""
        with self.open(mlp) as session:
            for rows in (1, 4, 7, 0, 4):
                out = session.run({"x": self._x(rows)})
                assert list(out) == ["y"]
                assert out["y"].shape == (rows, 64)
                assert out["y"].dtype == np.float32

    def test_dtypes(self, tmp_path: Path) -> None:
        """Each declared dtype goes through unchanged in type and shape."""
        for dtype in self.dtypes:
            path = models.save(models.identity(dtype), tmp_path, f"{dtype}.onnx")
            x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
            with self.open(path) as session:
                out = session.run({"x": x})["y"]
            assert out.dtype == x.dtype, dtype
            assert out.shape == x.shape, dtype
            if "computes" not in self.unsupported:
                np.testing.assert_array_equal(out, x)

    def test_nan_is_allowed(self, mlp: Path) -> None:
        """NaN in the input is the caller's business; an engine that would make numbers of it refuses it."""
        x = self._x()
        x[0, 0] = np.nan
        with self.open(mlp) as session:
            try:
                made = session.run({"x": x})["y"]
            except xrt.InputError as error:
                assert "'x' holds NaN" in str(error)  # noqa: PT017 - either is right
            else:
                assert made.shape == (4, 64)
            assert np.isfinite(session.run({"x": self._x()})["y"]).all()

    def test_two_inputs_share_a_symbol(self, tmp_path: Path) -> None:
        """Sizes of one symbol that the model cannot combine are refused, and the session goes on."""
        path = models.save(models.two_inputs(), tmp_path)
        a, b = np.ones((2, 4), np.float32), np.full((2, 4), 3, np.float32)
        with self.open(path) as session:
            out = session.run({"b": b, "a": a})
            assert set(out) == {"total", "product"}
            with pytest.raises(xrt.XpuRuntimeError):
                session.run({"a": a, "b": np.ones((3, 4), np.float32)})
            for name, again in session.run({"b": b, "a": a}).items():
                np.testing.assert_array_equal(again, out[name])

    @pytest.mark.parametrize(
        ("feeds", "message"),
        [
            ({"xx": np.ones((1, 64), np.float32)}, r"no input 'xx'; did you mean 'x'\?"),
            ({}, r"input 'x' is missing"),
            ({"x": np.ones((1, 64))}, r"dtype float64, the model expects float32"),
            ({"x": np.ones((1, 64), ">f4")}, r"float32"),
            ({"x": np.ones(64, np.float32)}, r"rank 1 \(shape \[64\]\), the model expects rank 2"),
            ({"x": np.ones((1, 63), np.float32)}, r"shape \[1, 63\], the model expects \[SYMBOL, 64\]"),
            ({"x": [[1.0] * 64]}, r"is a list, not an array"),
            ({"x": None}, r"is a NoneType, not an array"),
        ],
        ids=["name", "missing", "dtype", "byte-order", "rank", "shape", "list", "none"],
    )
    def test_bad_inputs_are_refused(self, mlp: Path, feeds: dict[str, Any], message: str) -> None:
        """The message names the input, what was expected and what was got; the session still works."""
        with self.open(mlp) as session:
            with pytest.raises(xrt.InputError, match=message.replace("SYMBOL", self.symbol)):
                session.run(feeds)
            assert session.run({"x": self._x()})["y"].shape == (4, 64)

    def test_inputs_not_a_dict(self, mlp: Path) -> None:
        """An array instead of a dict is refused with the form that works."""
        with self.open(mlp) as session, pytest.raises(xrt.InputError, match="dict of name to array"):
            session.run(self._x())  # type: ignore[call-overload]

    def test_non_contiguous(self, mlp: Path) -> None:
        """Copied once and said so; refused under strict."""
        x = np.asfortranarray(self._x())
        with self.open(mlp) as session:
            got = session.run({"x": x})["y"]
            np.testing.assert_array_equal(got, session.run({"x": np.ascontiguousarray(x)})["y"])
            report = session.explain({"x": x}, runs=1)
            assert any("'x' copied" in c.what for c in report.conversions)
        with (
            self.open(mlp, policy={"mode": "strict"}) as session,
            pytest.raises(xrt.InputError, match="not C-contiguous"),
        ):
            session.run({"x": x})

    def test_read_only(self, mlp: Path) -> None:
        """A read-only array is read, not copied, and stays as it was."""
        x = self._x()
        before = x.copy()
        x.flags.writeable = False
        with self.open(mlp, policy={"mode": "strict"}) as session:
            got = session.run({"x": x})["y"]
            np.testing.assert_array_equal(got, session.run({"x": before})["y"])
        np.testing.assert_array_equal(x, before)

    def test_results_are_the_callers(self, mlp: Path) -> None:
        """A result is not overwritten by the next run, and outlives the session."""
        with self.open(mlp) as session:
            first = session.run({"x": self._x(seed=1)})["y"]
            kept = first.copy()
            session.run({"x": self._x(seed=2)})
            np.testing.assert_array_equal(first, kept)
        gc.collect()
        np.testing.assert_array_equal(first, kept)

    def test_bind(self, mlp: Path) -> None:
        """Bound buffers keep their addresses and give what `run` gives; wrong ones are refused."""
        with self.open(mlp) as session:
            x = self._x()
            shape: Any = (4, 64)
            binding = session.bind({"x": shape})
            self._write(binding.inputs["x"], x)
            binding.run()
            np.testing.assert_array_equal(self._read(binding.outputs["y"]), session.run({"x": x})["y"])
            self._write(binding.inputs["x"], 2 * x)
            binding.run()
            np.testing.assert_array_equal(self._read(binding.outputs["y"]), session.run({"x": 2 * x})["y"])
            binding.close()
            with pytest.raises(xrt.XpuRuntimeError, match="closed"):
                binding.run()
            with pytest.raises(xrt.InputError, match="free dimensions"):
                session.bind()
            with pytest.raises(xrt.InputError, match="no input 'xx'"):
                session.bind({"xx": shape})
            with pytest.raises(xrt.InputError, match=r"shape \[4, 63\]"):
                session.bind({"x": (4, 63)})
            with pytest.raises(xrt.InputError, match="no output 'z'"):
                session.bind({"x": shape}, {"z": x})

    def test_closed(self, mlp: Path) -> None:
        """Closing twice is fine; using a closed session is not."""
        session = self.open(mlp)
        session.close()
        session.close()
        for call in (lambda: session.run({"x": self._x()}), session.explain, session.bind, session.memory):
            with pytest.raises(xrt.XpuRuntimeError, match="closed"):
                call()
        assert "closed" in repr(session)

    def test_run_outlives_its_session_object(self, mlp: Path) -> None:
        """`run` kept alone works until the session is closed; a dropped session is freed without the collector."""
        import weakref

        session = self.open(mlp)
        run, loaded = session.run, weakref.ref(session._open())
        want = session.run({"x": self._x()})["y"]
        del session
        np.testing.assert_array_equal(run({"x": self._x()})["y"], want)
        del run
        assert loaded() is None
        session = self.open(mlp)
        run = session.run
        session.close()
        with pytest.raises(xrt.XpuRuntimeError, match="closed"):
            run({"x": self._x()})

    def test_many_threads(self, mlp: Path) -> None:
        """Sixteen threads on one session get their own answers."""
        failures: list[str] = []
        with self.open(mlp) as session:
            want = {seed: session.run({"x": self._x(seed=seed)})["y"] for seed in range(_THREADS)}

            def work(seed: int) -> None:
                for _ in range(_RUNS):
                    got = session.run({"x": self._x(seed=seed)})["y"]
                    if not np.array_equal(got, want[seed]):
                        failures.append(f"thread {seed} got another answer")
                        return

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(_THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures

    def test_closed_while_running(self, mlp: Path) -> None:
        """Closing under running threads ends them with an XpuRuntimeError or a result, never a crash."""
        session = self.open(mlp)
        outcomes: list[str] = []
        started = threading.Barrier(5)

        def work() -> None:
            started.wait()
            try:
                for _ in range(2000):
                    session.run({"x": self._x()})
            except xrt.XpuRuntimeError as error:
                outcomes.append(str(error))
            else:
                outcomes.append("finished")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        session.close()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 4
        assert all(text == "finished" or "closed" in text for text in outcomes), outcomes

    def test_keyboard_interrupt(self, mlp: Path) -> None:
        """Ctrl-C in a loop of runs leaves the session usable."""
        ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores Ctrl-C
        try:
            with self.open(mlp) as session:
                before = session.run({"x": self._x()})["y"]
                timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    self._run_forever(session)
                timer.join()
                np.testing.assert_array_equal(session.run({"x": self._x()})["y"], before)
        finally:
            signal.signal(signal.SIGINT, ignored)

    def test_deterministic(self, mlp: Path) -> None:
        """Ten runs of one session, and a second session, give the same bits."""
        x = self._x()
        with self.open(mlp) as file, self.open(mlp) as two:
            want = file.run({"x": x})["y"].tobytes()
            assert all(file.run({"x": x})["y"].tobytes() == want for _ in range(10))
            assert two.run({"x": x})["y"].tobytes() == want

    def test_arithmetic_of_the_program_is_left_alone(self, mlp: Path) -> None:
        """Opening, running and explaining leave subnormal numbers as they are in the calling thread."""
        least = np.float64(5e-324)
        with self.open(mlp) as session:
            session.run({"x": self._x()})
            session.explain(runs=1)
            assert least * np.float64(1) > 0
        assert least * np.float64(1) > 0

    def test_evidence_is_complete(self, tmp_path: Path) -> None:
        """Every source node is accounted for exactly once, and the report round-trips."""
        path = models.save(models.conv(batch=2), tmp_path)
        with self.open(path) as session:
            report = session.explain(runs=2)
            names = sorted(node.name for node in session.model.nodes)
        told = sorted(name for unit in report.units for name in unit.source_nodes)
        assert told == names
        assert not report.partial, report.notes
        assert report.honoured, report.headline
        assert all(unit.engine == self.registry().get(self.engine).name for unit in report.units)
        assert xrt.Report.load(report.save(tmp_path / "report.json") or tmp_path / "report.json") == report

    def test_external_data(self, tmp_path: Path) -> None:
        """Weights beside the model give the answer of weights inside it."""
        inside = models.save(models.mlp(), tmp_path, "inside.onnx")
        outside = models.save(models.mlp(), tmp_path, "outside.onnx", external=True)
        x = self._x()
        with self.open(inside) as file, self.open(outside) as two:
            np.testing.assert_array_equal(file.run({"x": x})["y"], two.run({"x": x})["y"])

    def test_nameless_nodes(self, tmp_path: Path) -> None:
        """Nodes without names are named before the engine sees them, so that evidence can speak of them."""
        model = models.mlp()
        for node in model.graph.node:
            node.name = ""
        path = models.save(model, tmp_path)
        with self.open(path) as session:
            report = session.explain(runs=1)
            assert len({name for unit in report.units for name in unit.source_nodes}) == 3

    def test_prefer_warns_once_and_strict_refuses(self, mlp: Path) -> None:
        """A key that cannot be enforced: one warning under prefer, an error under strict."""
        policy = {"kernels": {"matmul": "cuda_raw.skinny"}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with self.open(mlp, policy=policy) as session:
                assert session.plan.control("kernels.matmul").enforceability != "enforced"  # type: ignore[union-attr]
        ours = [w for w in caught if issubclass(w.category, xrt.XpuRuntimeWarning)]
        assert len(ours) == 1
        assert "kernels.matmul" in str(ours[0].message)
        with pytest.raises(xrt.UnsupportedOperationError, match=r"kernels\.matmul"):
            self.open(mlp, policy={**policy, "mode": "strict"})

    def _run_forever(self, session: InferenceSession) -> None:
        while True:
            session.run({"x": self._x()})

    def _write(self, buffer: Any, values: np.ndarray[Any, Any]) -> None:
        """Fill a bound buffer. Override for engines whose buffers are not NumPy."""
        buffer[...] = values

    def _read(self, buffer: Any) -> np.ndarray[Any, Any]:
        """Return a copy of a bound buffer as NumPy. Override for engines whose buffers are not NumPy."""
        return np.array(buffer)
