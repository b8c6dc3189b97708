PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test bench docs lint format clean

demo: $(VENV)/demo.installed
	$(BIN)/fsdp-guard demo

test: lint docs
	$(BIN)/python -m pytest
	$(BIN)/fsdp-guard demo

bench: $(VENV)/test.installed
	$(BIN)/python -m benchmarks.host
	$(BIN)/python -m benchmarks.load
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.agreement
	$(BIN)/python -m benchmarks.values
	$(BIN)/python -m benchmarks.step

docs: $(VENV)/test.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site fsdp-guard-demo

# Each environment is made from nothing and made again when its requirements change.
$(VENV)/%.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	touch $@
