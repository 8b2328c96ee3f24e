# make demo | test | lint | bench : each sets up what it needs (.venv, plug-in) and then runs.
# Works with nothing but make, a CPython 3.10 and PyPI; with a C++ compiler the CPU kernels too.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PEER := .venv-peer
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LIBAI := libai==0.1.1
# Without its dependencies: of them torchvision has no CPU build.
TIMM := timm==1.0.31
# Two stamps, so that a compiler installed later is noticed.
COMPILER := $(shell command -v $${CXX:-c++})
PLUGIN := $(VENV)/.plugin$(if $(COMPILER),,-without-compiler)
PLUGIN_SOURCES := CMakeLists.txt setup.py $(shell find oneflow_accel/csrc -type f)
REQUIREMENTS := requirements/build.txt requirements/runtime.txt requirements/libai.txt \
                requirements/test.txt

.PHONY: help setup plugin demo test lint bench bench-compare clean
help:
	@echo "make demo    train a small ResNet on real images, about 2 minutes"
	@echo "make test    the whole test suite"
	@echo "make lint    ruff, mypy, codespell, file sizes, device names"
	@echo "make bench   speed against PyTorch; the table goes to benchmarks/results (ARGS=--help)"
	@echo "make bench-compare  the same again; fails where a ratio fell by more than 10 %"
	@echo "make setup   only the environment in $(VENV) and the C++ plug-in"
	@echo "make clean   remove $(VENV), $(PEER) and build results"

setup: plugin
plugin: $(PLUGIN)

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

$(PLUGIN): $(VENV)/.requirements pyproject.toml $(PLUGIN_SOURCES)
	@echo "$(if $(COMPILER),Building the C++ plug-in,No C++ compiler: everything runs on stock \
	  kernels, slowly. Debian: apt-get install g++, then call make again)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.lint: $(VENV)/.requirements requirements/lint.txt
	@$(PIP) install -r requirements/lint.txt
	@touch $@

demo: plugin
	@$(BIN)/python -m resnet50_imagenet.demo

test: plugin
	@$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.lint $(PLUGIN)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@git ls-files -z | xargs -0 $(BIN)/codespell
	@$(BIN)/python scripts/check_device_literals.py
	@$(BIN)/python scripts/check_file_size.py
	@echo "lint: all clean"

# PyTorch is a peer to measure against, in an environment of its own (it needs another Python).
$(PEER)/.requirements: requirements/peer.txt
	@python=$$(scripts/find_python.sh 3.11) && "$$python" -m venv --clear $(PEER)
	@$(PEER)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/peer.txt
	@$(PEER)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps $(TIMM)
	@touch $@

bench: plugin $(PEER)/.requirements
	@$(BIN)/python -m benchmarks --peer $(PEER)/bin/python $(ARGS)

bench-compare: plugin $(PEER)/.requirements
	@$(BIN)/python -m benchmarks --peer $(PEER)/bin/python --compare $(ARGS)

clean:
	rm -rf $(VENV) $(PEER) build oneflow_accel/_lib *.egg-info
