# make demo | test | lint | bench : each sets up what it needs (.venv, plug-in) and then runs.
# Works with nothing but make, a python3 with venv and PyPI (scripts/find_python.sh fetches a
# CPython 3.10 where there is none); with a C++ compiler the CPU kernels too.

SHELL := /bin/bash
COMMA := ,
VENV := .venv
BIN := $(VENV)/bin
PEER := .venv-peer
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LIBAI := libai==0.1.1
# Without its dependencies: of them torchvision has no CPU build.
TIMM := timm==1.0.31
# The compiler is $CXX, else the one of the last build, else c++. Each has a stamp of its own, so
# that another one, or one that is installed later, is noticed.
LAST_CXX = $(shell last=$$(cat $(VENV)/.compiler 2>&-) && command -v $$last >&- && echo $$last)
override CXX := $(or $(if $(filter default,$(origin CXX)),$(LAST_CXX),$(CXX)),c++)
COMPILER := $(shell command -v $(firstword $(CXX)))
STAMP_OF_COMPILER = $(filter-out -c++,-$(subst /,_,$(firstword $(CXX))))
PLUGIN := $(VENV)/.plugin$(if $(COMPILER),$(STAMP_OF_COMPILER),-without-compiler)
GO_ON := "All else is installed and runs, slowly, on stock OneFlow: ONEFLOW_ACCEL_PLUGIN=off make"
PLUGIN_SOURCES := CMakeLists.txt setup.py $(shell find oneflow_accel/csrc oneflow_accel/emulated -type f)
REQUIREMENTS := requirements/build.txt requirements/runtime.txt requirements/libai.txt \
                requirements/test.txt

# What finds most mistakes in the time: the order of the floors, checkpoints, optimizers, each kernel
# once, layers and projection, sampling, and each trainer from its command line.
CHECKED := tests/test_floors.py tests/flow_train/checkpoint tests/flow_train/optim \
           tests/flow_train/metrics tests/monarch_flow/layers tests/monarch_flow/projection \
           tests/oneflow_accel/kernels/test_records.py::test_eager \
           tests/libai_projects/generation tests/monarch_flow/engine/test_engine_finish.py \
           tests/resnet50_imagenet/test_runs.py::test_run_leaves_metrics_curves_tensorboard_and_checkpoints \
           tests/libai_projects/train/test_from_text_to_prompts.py

# On the emulated device: steps eager and under nn.Graph, on several processes, cut and sharded, and
# generation.
EMULATED := tests/monarch_flow/engine/test_graph_steps.py \
            tests/monarch_flow/engine/test_training_engine.py \
            tests/monarch_flow/models/test_global_models.py \
            tests/vit_10b/test_vit_training.py::test_every_mode_trains_as_the_whole_model \
            tests/libai_projects/llama/test_llama_parity.py tests/libai_projects/pipeline/test_stages.py \
            tests/libai_projects/pipeline/test_generate_api.py

LANES := -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help setup plugin demo check test test-emulated test-release lint bench bench-compare \
        llama clean
help:
	@echo "make demo    train a small ResNet on real images, about 2 minutes"
	@echo "make check   lint and the tests that find most mistakes, 4 minutes: before each commit"
	@echo "make test    the test suite, 25 minutes"
	@echo "make test-release  what it leaves out, 10 minutes: before a release"
	@echo "make test-emulated  its tests of models and trainers on the emulated device"
	@echo "make lint    ruff, mypy, codespell, sizes, device names"
	@echo "make bench   speed against PyTorch; the table goes to benchmarks/results (ARGS=--help)"
	@echo "make bench-compare  the same again; fails where a ratio fell by more than 10 %"
	@echo "make llama   llama.cpp as a peer of generation and serving: python -m benchmarks.serving"
	@echo "make setup   only the environment in $(VENV) and the C++ plug-in"
	@echo "make clean   remove $(VENV), $(PEER), .python and build results (ONEFLOW_ACCEL_CACHE stays)"

setup: plugin
plugin: $(if $(filter off,$(ONEFLOW_ACCEL_PLUGIN)),$(VENV)/.package,$(PLUGIN))

# One install after the other: flowvision and libai are source packages that build with what is
# already installed, and oneflow has to be there before the plug-in can be built.
$(VENV)/.python:
	@python=$$(scripts/find_python.sh 3.10) && echo "Creating $(VENV) with $$python" && \
	  "$$python" -m venv --clear $(VENV)
	@touch $@

$(VENV)/.requirements: $(VENV)/.python $(REQUIREMENTS)
	@echo "Installing dependencies (some 2 GB the first time)"
	@$(PIP) install -r requirements/build.txt
	@$(PIP) install --no-build-isolation -r requirements/runtime.txt \
	  -r requirements/libai.txt -r requirements/test.txt
	@$(PIP) install --no-build-isolation --no-deps $(LIBAI)
	@touch $@

# Without the kernels: where these cannot be compiled, all else is there.
$(VENV)/.package: $(VENV)/.requirements pyproject.toml setup.py
	@ONEFLOW_ACCEL_PLUGIN=off $(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(PLUGIN): $(VENV)/.requirements $(PLUGIN_SOURCES) | $(VENV)/.package
	@rm -f $(VENV)/.plugin*
	@echo "$(if $(COMPILER),Building the C++ plug-in with $(CXX); what it prints goes to \
	  build/plugin.log,No C++ compiler: everything runs on stock kernels$(COMMA) slowly. \
	  Debian: apt-get install g++$(COMMA) then call make again)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" CXX="$(CXX)" ONEFLOW_ACCEL_PLUGIN=on \
	  ONEFLOW_ACCEL_REQUIRE_PLUGIN=$(if $(COMPILER),1) \
	  $(BIN)/python setup.py --quiet build_ext --inplace || { echo $(GO_ON) >&2; exit 1; }
	@echo "$(CXX)" > $(VENV)/.compiler
	@touch $@

$(VENV)/.lint: $(VENV)/.requirements requirements/lint.txt
	@$(PIP) install -r requirements/lint.txt
	@touch $@

# Goes on without the kernels where they cannot be compiled.
demo: $(VENV)/.package
	@$(MAKE) --no-print-directory plugin || echo "Going on without them."
	@$(BIN)/python -m resnet50_imagenet.demo

check: lint
	@$(BIN)/python -m pytest -q $(CHECKED) $(ARGS)

# Three lanes of whole files also on two cores: many wait for processes to start or end. What
# takes long and other tests have in parts is apart: options together, and commands that measure.
test: plugin
	@$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),$(LANES) -m "not release")
	@$(if $(ARGS),,$(MAKE) --no-print-directory test-emulated)

test-release: plugin
	@$(BIN)/python -m pytest $(LANES) -m release $(ARGS)

test-emulated: plugin
	@ONEFLOW_ACCEL_DEVICE=emulated $(BIN)/python -m pytest -q \
	  $(if $(ARGS),$(ARGS),$(LANES) $(EMULATED))

# mypy takes as long as all else, which goes on beside it.
lint: $(VENV)/.lint plugin
	@$(BIN)/mypy & ( $(BIN)/ruff format --check . && $(BIN)/ruff check . && \
	  git ls-files -z | xargs -0 $(BIN)/codespell && \
	  for name in check_device_literals check_agreement check_file_size size; do \
	    $(BIN)/python scripts/$$name.py || exit 1; done ); others=$$?; wait $$! && exit $$others
	@echo "lint: all clean"

# PyTorch is a peer to measure against, in an environment of its own (it needs another Python).
$(PEER)/.requirements: requirements/peer.txt
	@python=$$(scripts/find_python.sh 3.11) && "$$python" -m venv --clear $(PEER)
	@$(PEER)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/peer.txt
	@$(PEER)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps $(TIMM)
	@touch $@

# Another peer, for generation and serving: compiled for this machine in some minutes, so only where
# it is asked for. With its AMX kernels it crashed.
$(PEER)/.llama: $(PEER)/.requirements requirements/llama.txt
	@CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_TILE=OFF \
	  -DGGML_AMX_BF16=OFF" \
	  $(PEER)/bin/python -m pip --disable-pip-version-check --quiet install \
	  -r requirements/llama.txt
	@touch $@

llama: $(PEER)/.llama

bench: plugin $(PEER)/.requirements
	@$(BIN)/python -m benchmarks --peer $(PEER)/bin/python $(ARGS)

bench-compare: plugin $(PEER)/.requirements
	@$(BIN)/python -m benchmarks --peer $(PEER)/bin/python --compare $(ARGS)

clean:
	rm -rf $(VENV) $(PEER) .python build oneflow_accel/_lib *.egg-info
