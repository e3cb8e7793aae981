# make demo   a first answer: its own environment, the default model, a generated text
# make test   all tests that need no GPU, those on real weights included
# make check  lint, types, and the built wheel outside the checkout
PYTHON ?= python3
SPECRUN_TEST_HOME ?= $(CURDIR)/.cache/specrun-test
export SPECRUN_TEST_HOME
# Whatever is installed or set around us must not leak into the environments made here.
unexport PYTHONPATH PYTHONHOME

DEMO = .venv/bin/specrun generate --stats "Write a Python class for a stack with push, pop and peek."
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help:
	@sed -n 's/^# make/make/p' Makefile

demo: .venv/.installed
	@.venv/bin/specrun models pull smollm2-135m >/dev/null
	@echo '$(DEMO)'
	@$(DEMO)
	@echo 'Go on with: . .venv/bin/activate && specrun chat   (or .venv/bin/specrun --help)'

test: .venv-test/.installed .venv-optimum/.installed
	.venv-test/bin/python -m pytest
	.venv-test/bin/python -m pytest -m weights
	.venv-optimum/bin/python -m pytest -m optimum tests/export/test_reward_optimum.py

check: .venv-test/.installed
	.venv-test/bin/python -m ruff check .
	.venv-test/bin/python -m ruff format --check .
	PYTHON="$(CURDIR)/.venv-test/bin/python" scripts/typecheck
	PYTHON="$(CURDIR)/.venv-test/bin/python" scripts/check-wheel

clean:
	rm -rf .venv .venv-test .venv-optimum build dist

.venv/.installed: pyproject.toml
	@scripts/python-version "$(PYTHON)"
	@echo "Making .venv and installing specrun with ONNX Runtime; this takes a minute ..."
	@"$(PYTHON)" -m venv .venv
	@.venv/bin/python $(PIP_INSTALL) --editable '.[cpu]'
	@touch $@

.venv-test/.installed: pyproject.toml tests/constraints.txt
	@scripts/python-version "$(PYTHON)"
	@echo "Making .venv-test and installing what the tests need; this takes some minutes ..."
	@"$(PYTHON)" -m venv .venv-test
	@.venv-test/bin/python $(PIP_INSTALL) --constraint tests/constraints.txt --editable '.[cpu,test,dev]'
	@touch $@

# optimum-onnx wants an older transformers than the other tests do.
.venv-optimum/.installed: pyproject.toml tests/constraints.txt
	@scripts/python-version "$(PYTHON)"
	@echo "Making .venv-optimum and installing what exporting reward models needs; this takes some minutes ..."
	@"$(PYTHON)" -m venv .venv-optimum
	@.venv-optimum/bin/python $(PIP_INSTALL) --constraint tests/constraints.txt --editable '.[cpu,optimum]' 'pytest>=8.3'
	@touch $@
