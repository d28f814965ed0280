PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# A worker a core, each with one thread; an idle one takes tests from the other's end, so files stay together.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: install demo test test-long test-all test-cuda coverage mutate lint docs clean

install: $(STAMP)
	@$(BIN)/python -m quickbeam.models.native.build

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12")'
	@PYTHONPATH=src $(PYTHON) -m quickbeam.models.native.build --compiler
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@

demo: install
	$(BIN)/quickbeam demo

test: install
	$(PYTEST) -m 'not long'

# what `make test` leaves out
test-long: install
	$(PYTEST) -m long

test-all: install
	QUICKBEAM_TESTS=all $(PYTEST)

# those that use a GPU where there is one
test-cuda: install
	CUDA_VISIBLE_DEVICES=0 $(PYTEST) tests/test_fused_attention.py tests/test_fused_product.py tests/test_torch_passes.py \
		tests/test_same_bits.py tests/test_gathered.py tests/test_pinned.py tests/test_shortlist_fused.py tests/test_train_device.py

coverage: install
	$(PYTEST) -m 'not long' --cov --cov-report term --cov-report html:build/coverage

mutate: install
	OMP_NUM_THREADS=1 $(BIN)/mutmut run
	$(BIN)/mutmut results

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist mutants .coverage* .pytest_cache .hypothesis .mypy_cache .ruff_cache
