# Everything a fresh machine needs is Python 3.11 or newer, and make.
#
#   make demo        the real command on a real model, against a Hub on this machine
#   make test        lint, types, and every test but the slow ones
#   make test-all    the slow ones too: minutes, gigabytes
#   make deploy-test builds the image and runs it with the compose file, in a Docker engine of its own; as root
#   make bench       ours beside others, about 45 minutes; writes build/bench.json and docs/benchmarks.md
#   make bench-quick a tenth of it in three minutes; writes nothing
#   make test-lowest the tests with the lowest version of each requirement; test-newest with the newest of all
#   make test-pythons the tests on each of Python 3.11 to 3.14 that is on PATH
#   make fuzz        fuzzes every parser for a minute (SECONDS=3600 for an hour); Linux only
#   make lint        ruff and mypy
#   make docs        writes the generated parts of docs/ again, pictures of the page where Chromium is there
#   make docs-site   the documentation as a site, in build/site
#   make dist        wheel and sdist of the last commit, in dist/; REPOSITORY=URL is where their page's links lead
#   make sbom        what a worker of that wheel consists of, in build/sbom.cdx.json
#   make clean       removes what the others made

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-lowest test-newest test-pythons deploy-test bench bench-quick fuzz lint docs docs-site dist sbom clean

# Each of the processes that tests start would compile all modules again where an environment forbids to keep them.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Three processes for the 2 cores that the suite is made for: its tests often wait for what they started. One file's tests
# stay together, because they share its servers, and the files come in the order of tests/conftest.py, which says of which
# each test may go anywhere. What fails is shown at once, because a run may be ended before its summary.
PYTEST := python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --instafail --durations 20 --durations-min 5

help:
	@sed -n 's/^#   //p' Makefile

# Redone only when what should be installed changed.
$(READY): pyproject.toml constraints.txt
	@python=$${PYTHON:-}; \
	for name in $$python python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$name; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "reshard needs Python 3.11 or newer, and none was found on PATH: install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	if ! $$found -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "$$found cannot make virtual environments: install its venv package (Debian: apt install python3-venv)" >&2; \
	  exit 1; \
	fi; \
	echo "setting up $(VENV) with $$($$found --version); the first time takes minutes"; \
	test -x $(BIN)/python || $$found -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/python -m demo

lint: $(READY)
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

QUICK := --hypothesis-profile=quick -m "not slow"
test: lint
	$(BIN)/$(PYTEST) $(QUICK)

test-all: lint
	$(BIN)/$(PYTEST)

# Each in an environment of its own, with nothing pinned. What those versions ask for in their turn need not be.
test-lowest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-lowest test-newest: OWN = $(VENV)-$(RESOLUTION)
test-lowest test-newest: $(READY)
	$(BIN)/uv venv -q --clear --seed --python $(BIN)/python $(OWN)
	$(BIN)/uv pip install -q --python $(OWN) --resolution $(RESOLUTION) -e '.[dev]'
	$(OWN)/bin/$(PYTEST) $(QUICK) --deselect tests/test_packaging.py::test_everything_that_reshard_depends_on_is_pinned

PYTHONS := 3.11 3.12 3.13 3.14
test-pythons:
	@for version in $(PYTHONS); do \
	  if command -v python$$version >/dev/null; then \
	    $(MAKE) --no-print-directory test VENV=.venv-$$version PYTHON=python$$version || exit 1; \
	  else echo "not tested: python$$version is not on PATH"; fi; \
	done

# What it needs it takes from Debian, into build/deploy; where it cannot, it says what is missing.
deploy-test: $(READY)
	$(BIN)/python -m pytest tests/deploy

bench bench-quick: $(READY)
	$(BIN)/python -m tests.benchmarks $(if $(filter bench-quick,$@),--quick)

# Not among what every test needs: atheris has wheels for Linux only.
$(VENV)/.fuzz: $(READY)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,fuzz]'
	@touch $@

SECONDS := 60
fuzz: $(VENV)/.fuzz
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/record.py
	$(BIN)/python docs/screenshots.py

docs-site: $(READY)
	$(BIN)/mkdocs build --strict --quiet

dist: $(READY)
	rm -rf build/sources dist
	mkdir -p build/sources
	git archive HEAD | tar -x -C build/sources
	$(if $(REPOSITORY),$(BIN)/python docs/links.py build/sources $(REPOSITORY))
	$(BIN)/python -m build --outdir dist build/sources
	$(BIN)/uv tool run twine check --strict dist/*

sbom: dist
	$(BIN)/uv venv -q --clear --python $(BIN)/python build/wheel
	$(BIN)/uv pip install -q --python build/wheel -c constraints.txt "$$(echo dist/*.whl)[worker,web]"
	$(BIN)/uv tool run --from cyclonedx-bom cyclonedx-py environment build/wheel --output-file build/sbom.cdx.json

clean:
	rm -rf $(VENV) $(VENV)-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
