# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# Everything happens in $(VENV); stamp files there make second runs quick. All paths are relative, so the checkout
# may lie in a folder with spaces in its name.
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Processes of pytest. Each may take 2 GB, and files of tests are not split among them, so more than 8 gain little.
TEST_JOBS ?= $(shell [ "$(JOBS)" -lt 8 ] && echo "$(JOBS)" || echo 8)
# ON, OFF, or AUTO: build the CUDA core when nvcc is found.
XPURUNTIME_CUDA ?= AUTO
# ON: a warning of a C++ compiler is an error. CI sets it; a user's compiler may warn of more than those that CI has.
XPURUNTIME_DEVELOPER ?= OFF
export XPURUNTIME_DEVELOPER
# Options for pytest: make test PYTEST="-k policy"
PYTEST ?=
# make's own default for CXX is g++, set or not; only a CXX that somebody chose is handed on.
ifeq ($(origin CXX),default)
CXX :=
else
export CXX
endif

PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
PIP := $(PY) -m pip --disable-pip-version-check
# For commands that look for cmake, ninja or clang-tidy themselves.
IN_VENV := PATH="$(abspath $(VENV))/bin:$$PATH"
CPP_FILES := $(shell find src/cpp tests/cpp -name third_party -prune -o -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print 2>/dev/null)
BUILD_FILES := pyproject.toml CMakeLists.txt $(shell find src/cpp -type f 2>/dev/null)
# A virtual environment holds absolute paths: after a move it is made again.
MOVED := $(shell [ "$$(cat $(STAMPS)/venv 2>/dev/null)" = "$(CURDIR)" ] || echo moved)

.PHONY: help demo install cuda-headers engines test quick test-python test-cpp test-unchanged test-killed test-killed-clients test-tritonclient test-triton test-kserve test-gpu test-pytorch test-patterns sweep fuzz lint format bench bench-gpu bench-kernels bench-training docs docs-serve wheel wheel-test clean FORCE

help: ## Show this list
	@echo "xpuruntime: make <target>"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 20
	@echo
	@echo "Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  JOBS=$(JOBS)  TEST_JOBS=$(TEST_JOBS)  XPURUNTIME_CUDA=$(XPURUNTIME_CUDA)  XPURUNTIME_DEVELOPER=$(XPURUNTIME_DEVELOPER)  CXX=$(or $(CXX),(found by CMake))"

demo: $(STAMPS)/install ## Set up everything, then run the shipped model on real images
	@$(VENV)/bin/xrt demo

install: $(STAMPS)/install ## Create the environment, build the C++ core, install

cuda-headers: $(STAMPS)/cuda-headers ## Install the headers of cuBLAS and cuDNN, so that `make install` builds with them

engines: $(STAMPS)/engines ## Install OpenVINO, QNN and TensorRT-RTX, so that their tests run

# --- the environment -------------------------------------------------------------------------------------------------

$(STAMPS)/venv: $(if $(MOVED),FORCE)
	@sh tools/preflight.sh "$(PYTHON)" "$(CXX)"
	@echo "==> creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --quiet --quiet --upgrade "pip>=25.1"
	@mkdir -p $(STAMPS)
	@printf '%s\n' "$(CURDIR)" > $@

$(STAMPS)/build $(STAMPS)/test $(STAMPS)/lint $(STAMPS)/docs $(STAMPS)/wheel: pyproject.toml $(STAMPS)/venv
	@echo "==> installing the tools for $(@F)"
	@$(PIP) install --quiet --quiet --group $(@F)
	@touch $@

# Not needed where the CUDA toolkit has them. The wheels hold the libraries too, so that this is no part of `install`.
$(STAMPS)/cuda-headers: pyproject.toml $(STAMPS)/venv
	@echo "==> installing cuBLAS, cuDNN and cudnn-frontend for their headers (about 1 GB)"
	@$(PIP) install --quiet --quiet --no-deps --group cuda-headers
	@rm -f $(STAMPS)/install
	@touch $@

$(STAMPS)/install: $(BUILD_FILES) $(STAMPS)/build
	@echo "==> building the C++ core and installing xpuruntime (the first time this downloads ONNX Runtime, 255 MB)"
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --quiet --quiet --no-build-isolation \
	  --config-settings=cmake.define.XPURUNTIME_CUDA=$(XPURUNTIME_CUDA) \
	  --config-settings=cmake.define.XPURUNTIME_DEVELOPER=$(XPURUNTIME_DEVELOPER) --editable .
	@# Python starts with this module, so that pytest, which rewrites modules of plugins, would warn of it in each run.
	@for file in $(VENV)/lib/python*/site-packages/_editable_skbc_xpuruntime.py; do \
	  sed -i.before '1i """PYTEST_DONT_REWRITE"""' "$$file" && rm "$$file.before"; done
	@touch $@

$(STAMPS)/engines: pyproject.toml $(STAMPS)/venv
	@echo "==> installing OpenVINO, NNCF, TensorRT-RTX and QNN for the tests of these engines (about 400 MB)"
	@$(PIP) install --quiet --quiet --group engines
	@$(PIP) install --quiet --quiet --no-deps --group engines-no-deps
	@touch $@

# --- tests -----------------------------------------------------------------------------------------------------------

# The Python tests run the core as users have it; the sanitizers need the C++ tests.
test: test-cpp-asan test-cpp-tsan test-python ## Run all tests that need no GPU

test-python: $(STAMPS)/install $(STAMPS)/test ## Run the Python tests only
	$(PY) -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST)

# ROOM: a folder of tests/unit. FILE: a source file, of which tools/import_graph.py finds the tests.
quick: $(STAMPS)/install $(STAMPS)/test ## Run the fast tests of ROOM=engines, or those nearest to FILE=src/python/xpuruntime/errors.py
	@[ -n "$(ROOM)$(FILE)" ] || { echo "quick needs a room or a file. Fix: make quick ROOM=engines"; exit 2; }
	@tests="$(if $(FILE),$$($(PY) tools/import_graph.py "$(FILE)"),tests/unit/$(ROOM))" && printf '%s\n' "$$tests" && \
	  $(PY) -m pytest -q --quick -n $(TEST_JOBS) --dist loadfile $$tests $(PYTEST)

CPP_TESTS := test-cpp-plain test-cpp-asan test-cpp-tsan
.PHONY: $(CPP_TESTS)

test-cpp: $(CPP_TESTS) ## Run the C++ tests: plain, ASan + UBSan, TSan

$(CPP_TESTS): test-cpp-%: $(STAMPS)/build
	@$(IN_VENV) JOBS=$(JOBS) CMAKE_GENERATOR=Ninja bash tests/cpp/run.sh $*

# Seconds of each fuzzing test, or its cases; XPURUNTIME_FUZZ_SEED=N begins at other cases.
FUZZ_SECONDS ?= 300
FUZZ_CASES ?=
fuzz: $(STAMPS)/install $(STAMPS)/test ## Fuzz models, files, calls and requests for FUZZ_SECONDS each, or FUZZ_CASES; make test runs 40 cases
	XPURUNTIME_FUZZ_SECONDS=$(if $(FUZZ_CASES),,$(FUZZ_SECONDS)) XPURUNTIME_FUZZ_CASES=$(FUZZ_CASES) $(PY) -m pytest -n $(TEST_JOBS) --timeout 0 tests/unit/fuzz $(PYTEST)

test-patterns: $(STAMPS)/install $(STAMPS)/test ## Run all operator patterns, ONNX's own test cases and other long lists; make test runs a part
	XPURUNTIME_ALL_PATTERNS=1 $(PY) -m pytest -n $(TEST_JOBS) --dist loadfile --timeout 900 tests/conformance/test_operator_patterns.py \
	  tests/conformance/test_onnx_backend.py $$(grep -rl --include='test_*.py' -E '^(from|import) sampled' tests/unit) $(PYTEST)

# The engine whose operators are compared with ONNX Runtime.
SWEEP ?= openvino
sweep: $(STAMPS)/install $(STAMPS)/test $(STAMPS)/engines ## Compare every operator that the engine SWEEP takes with ONNX Runtime (30 minutes and more)
	$(PY) -W ignore tools/engine_sweep.py $(SWEEP)

# TORCH: the version to install first, such as torch==2.11.*; TORCH_INSTALL: what installs it.
TORCH_INSTALL ?= $(PIP) install
test-pytorch: $(STAMPS)/install $(STAMPS)/test ## Run the tests of PyTorch with the version TORCH, its addon built for it
	$(if $(TORCH),$(TORCH_INSTALL) '$(TORCH)')
	$(PY) -m xpuruntime.pytorch.build_addon
	$(PY) -m pytest -n $(TEST_JOBS) --dist loadfile tests/unit/pytorch $(PYTEST)

# Verifications of one unchanged model, and its openings under a lock on each engine.
VERIFY_REPEATS ?= 300
UNCHANGED_OPENS ?= 200
test-unchanged: $(STAMPS)/install $(STAMPS)/test ## Verify an unchanged model VERIFY_REPEATS times; make test does so 4 times
	XPURUNTIME_VERIFY_REPEATS=$(VERIFY_REPEATS) $(PY) -m pytest -s --timeout 0 tests/unit/locks/test_unchanged.py $(PYTEST)
	XPURUNTIME_UNCHANGED_OPENS=$(UNCHANGED_OPENS) $(PY) -m pytest --timeout 0 tests/unit/locks/test_planted_drift.py -k unchanged_opens $(PYTEST)

# Clients of a server that are killed, and models that are reloaded, while others ask.
CLIENT_KILLS ?= 50
SERVE_RELOADS ?= 20
test-killed-clients: $(STAMPS)/install $(STAMPS)/test ## Kill CLIENT_KILLS clients and reload SERVE_RELOADS times under load; make test: 3 and 2
	XPURUNTIME_CLIENT_KILLS=$(CLIENT_KILLS) XPURUNTIME_SERVE_RELOADS=$(SERVE_RELOADS) $(PY) -m pytest -s tests/unit/serving/test_killed_clients.py $(PYTEST)

# Searches that are killed at random moments and resumed.
TUNE_KILLS ?= 50
test-killed: $(STAMPS)/install $(STAMPS)/test ## Kill searches of xrt tune TUNE_KILLS times and resume them; make test does so 3 times
	XPURUNTIME_TUNE_KILLS=$(TUNE_KILLS) $(PY) -m pytest -s --timeout 0 tests/unit/tuning/test_killed.py $(PYTEST)

# Another protobuf than ours, so an environment of its own.
TRITONCLIENT ?= tritonclient[http,grpc]==2.73.0
test-tritonclient: $(STAMPS)/install $(STAMPS)/test ## Run the server against Triton's own client
	@$(PY) -m venv $(VENV)/tritonclient
	@$(VENV)/tritonclient/bin/python -m pip install --quiet --disable-pip-version-check '$(TRITONCLIENT)'
	TRITONCLIENT_PYTHON=$(abspath $(VENV))/tritonclient/bin/python $(PY) -m pytest tests/unit/serving/test_tritonclient.py $(PYTEST)

# Triton Inference Server with its Python backend, of a wheel that has them; it reads no arrays of NumPy 2.
TRITON ?= nvidia-pytriton==0.7.0
test-triton: $(STAMPS)/install $(STAMPS)/test ## Run exports for Triton in Triton itself, on the CPU
	@$(PY) -m venv $(VENV)/triton
	@$(VENV)/triton/bin/python -m pip install --quiet --disable-pip-version-check '$(TRITONCLIENT)'
	@$(VENV)/triton/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/triton/numpy1 'numpy==1.26.4'
	@$(VENV)/triton/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(TRITON)'
	TRITON_FOLDER=$(abspath $(VENV))/triton $(PY) -m pytest tests/unit/locks/export/test_triton_server.py $(PYTEST)

KSERVE ?= kserve==0.21.0
test-kserve: $(STAMPS)/install $(STAMPS)/test ## Compare manifests for KServe with the models of its Python package
	@$(PY) -m venv $(VENV)/kserve
	@$(VENV)/kserve/bin/python -m pip install --quiet --disable-pip-version-check '$(KSERVE)'
	KSERVE_PYTHON=$(abspath $(VENV))/kserve/bin/python $(PY) -m pytest tests/unit/locks/export/test_portable.py -k kserve $(PYTEST)

test-gpu: $(STAMPS)/install $(STAMPS)/test ## Run the tests that need an NVIDIA GPU; there a skip is a failure
	$(PY) -m pytest tests/gpu --fail-on-skip $(PYTEST)

# --- checks ----------------------------------------------------------------------------------------------------------

# The longest first, and the others beside it.
LINTS := lint-clang-tidy lint-mypy lint-repo lint-ruff lint-format lint-clang-format
.PHONY: $(LINTS)

lint: $(STAMPS)/install $(STAMPS)/lint ## Run every check below, and say at the end which failed
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) --output-sync=target $(LINTS)

$(LINTS): $(STAMPS)/install $(STAMPS)/lint $(STAMPS)/test

lint-repo: ## The repository's own rules: lengths, headers, paths, writing, generated pages
	$(PY) tools/check_repo.py
	$(PY) tools/writing.py
	$(PY) tools/option_tables.py --check
	$(PY) tools/engine_tables.py --check
	$(PY) tools/report_schema.py --check
	$(PY) tools/diagrams.py --check
	$(PY) benchmarks/report.py --check

lint-ruff: ## ruff
	$(PY) -m ruff check --output-format concise .

lint-format: ## ruff's formatter
	$(PY) -m ruff format --check .

lint-mypy: ## mypy --strict
	$(PY) -m mypy

lint-clang-format: ## clang-format
	@$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES) && echo "clang-format: no findings"

# Nodes of a function that the analyzer looks at; clang's default is 225000, and takes nearly twice the time.
TIDY_NODES ?= 75000
lint-clang-tidy: ## clang-tidy over the C++ that builds without CUDA
	@$(IN_VENV) cmake -S . -B build/tidy -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Debug -DXPURUNTIME_CUDA=OFF -DXPURUNTIME_DEVELOPER=ON -DXPURUNTIME_UNITY=OFF -DSKBUILD=ON \
	  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DPython_EXECUTABLE="$(abspath $(PY))" -Dpybind11_DIR="$$($(PY) -m pybind11 --cmakedir)" >/dev/null
	@$(PY) $(VENV)/bin/run-clang-tidy.py -quiet -j $(JOBS) -clang-tidy-binary $(VENV)/bin/clang-tidy -extra-arg=-Wno-unknown-warning-option \
	  -extra-arg=-Xclang -extra-arg=-analyzer-config -extra-arg=-Xclang -extra-arg=max-nodes=$(TIDY_NODES) -p build/tidy "src/cpp/.*\.cpp" \
	  >build/tidy/log 2>&1 && echo "clang-tidy: no findings" || { grep -E 'error:|warning:' build/tidy/log | sort -u; exit 1; }

format: $(STAMPS)/lint ## Rewrite the sources in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

# --- measurements and documentation ----------------------------------------------------------------------------------

bench: $(STAMPS)/install $(STAMPS)/test ## Run the tests that time decides and the CPU benchmarks; JSON goes to benchmarks/results/
	$(PY) -m pytest --timed tests/unit
	$(PY) benchmarks/run.py cpu

bench-gpu: $(STAMPS)/install $(STAMPS)/test ## Run the GPU benchmarks; JSON goes to benchmarks/results/
	$(PY) benchmarks/run.py gpu

bench-kernels: $(STAMPS)/install $(STAMPS)/test ## Run the benchmarks of single operations on a GPU; needs PyTorch and CuPy
	$(PY) benchmarks/run.py kernels

bench-training: $(STAMPS)/install $(STAMPS)/test ## Run the benchmarks of PyTorch training and of collectives; needs PyTorch, a GPU, for collectives two
	$(PY) benchmarks/run.py training

docs: $(STAMPS)/install $(STAMPS)/docs ## Build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

docs-serve: $(STAMPS)/install $(STAMPS)/docs ## Serve the documentation while you write it
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

# Interpreters to build wheels for, such as "python3.11 python3.13"; default: that of $(VENV).
WHEEL_PYTHONS ?= $(PY)
# In the name of a wheel without CUDA kernels: xpuruntime-0.1.0-0cpu-cp311-...
WHEEL_TAG := $(if $(filter ON,$(XPURUNTIME_CUDA)),,$(if $(filter OFF,$(XPURUNTIME_CUDA)),0cpu,$(if $(or $(CUDACXX),$(shell command -v nvcc)),,0cpu)))
# Without the addon for PyTorch, which serves one version of it: whoever installs the wheel builds that by one command.
# Linked for the glibc of manylinux_2_28, whatever glibc is here; WHEEL_LDFLAGS= links for that of this system.
WHEEL_LDFLAGS ?= $(if $(filter Linux,$(shell uname -s)),$$(tools/old_glibc.sh build/old_glibc $(abspath $(PY))))
wheel: $(STAMPS)/build $(STAMPS)/wheel ## Build wheels into dist/ for WHEEL_PYTHONS, with CUDA kernels where nvcc is
	@flags="$(WHEEL_LDFLAGS)" && for python in $(WHEEL_PYTHONS); do \
	  rm -rf build/wheel && echo "==> building a wheel for $$python" && \
	  CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) "$$python" -m pip --disable-pip-version-check wheel --quiet --quiet \
	    $$([ "$$python" != "$(PY)" ] || echo --no-build-isolation) --no-deps --wheel-dir build/wheel \
	    --config-settings=cmake.define.XPURUNTIME_CUDA=$(XPURUNTIME_CUDA) \
	    --config-settings=cmake.define.XPURUNTIME_DEVELOPER=$(XPURUNTIME_DEVELOPER) \
	    --config-settings=cmake.define.XPURUNTIME_TORCH=OFF \
	    "--config-settings=cmake.define.CMAKE_MODULE_LINKER_FLAGS=$$flags" \
	    $(if $(WHEEL_TAG),--config-settings=wheel.build-tag=$(WHEEL_TAG)) . && \
	  $(IN_VENV) $(PY) -m auditwheel repair --wheel-dir dist build/wheel/*.whl || exit; \
	done
	@ls -l dist/*.whl | awk '{print $$NF ": " $$5 " bytes"}'

wheel-test: wheel ## Install the newest wheel in a fresh environment without a compiler; run the demo, README and the quickstart
	@bash tests/wheel.sh "$$(ls -t dist/xpuruntime-*.whl | head -n 1)"

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
