# Two commands: `make demo` runs the main job, `make test` the tests. Each installs what it needs first.
# Variables: PYTHON (python3), TORCH_INDEX (package index of the torch wheel; the public default is the CUDA build),
# JOBS (processes that `make test` runs the tests in; 2: each collects all of them, which takes a processor 15 s),
# ROOM (`make test ROOM=ranking` runs the tests of wattune/ranking alone; so do nested rooms and folders of tests).

PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
FUZZ_SECONDS ?= 3600
FUZZ_SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STORAGE := wattune-studies
ROOM ?=
TESTS := $(if $(ROOM),$(wildcard $(addsuffix $(ROOM),tests/unit/ tests/) $(addprefix tests/unit/test_$(ROOM),.py _*.py)),tests)

.PHONY: setup demo test check nightly fuzz hashes reference docs notebook format clean help

help:
	@echo "make demo    run the main job on this machine (about 3 minutes after installation)"
	@echo "make test    the quick tests; set ROOM to a folder of wattune for its own alone"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make docs    build the documentation into site/"
	@echo "make nightly all other tests: every plan of every engine, long lives of Ray, bounds of speed; 400 examples a property"
	@echo "make fuzz    mutated spaces and damaged folders for an hour; set FUZZ_SECONDS and FUZZ_SEED"
	@echo "make reference  schema and page of search spaces, after the catalog or the grammar changed"
	@echo "make hashes  pins with hashes, for pip install --require-hashes"
	@echo "make setup   only install, into $(VENV)"

# An environment that is a link is another checkout's: to install into it would take it away from there.
setup: $(if $(shell test -L $(VENV) && echo linked),,$(INSTALLED))

$(INSTALLED): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "wattune needs Python 3.11 or newer; set PYTHON" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "cannot make $(VENV); on Debian: apt-get install python3-venv" >&2; exit 2; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --constraint constraints/cpu.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints/cpu.txt --editable '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/wattune run search_spaces/cpu_smoke.yaml --until-decided --storage $(STORAGE)

test: setup
	@test -n "$(TESTS)" || { echo "there are no tests of ROOM=$(ROOM); give a folder of platform/wattune, as ranking or telemetry/nvml" >&2; exit 2; }
	@$(BIN)/python tests/cpu_seconds.py $(BIN)/python -m pytest -m "not slow and not gpu" -n $(JOBS) --dist loadgroup $(TESTS)

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

nightly: setup
	@EXAMPLES=400 $(BIN)/python tests/cpu_seconds.py $(BIN)/python -m pytest -m "(slow or hypothesis) and not gpu"

fuzz: setup
	@PYTHONPATH=tests/fakes $(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

# With TORCH_INDEX set, torch's hash is that of the wheel without CUDA.
hashes: setup
	@$(BIN)/python constraints/hashes.py constraints/cpu.txt --out constraints/cpu.hashes.txt $(if $(TORCH_INDEX),-- --extra-index-url $(TORCH_INDEX))

docs: setup
	@$(BIN)/python docs/_site/rooms.py docs/pictures/rooms_after.svg
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open site/index.html"

# The schema and the page of search spaces, from the grammar.
reference: setup
	@PYTHONPATH=platform $(BIN)/python -c 'from pathlib import Path; from wattune.search import reference as r; Path("platform/wattune/search/space.schema.json").write_text(r.schema_text(names_metrics=False)); Path("docs/space_reference.md").write_text(r.reference_page())'

notebook: setup
	@$(BIN)/python docs/notebooks/make.py

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist site platform/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
