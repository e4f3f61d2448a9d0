# Everything runs in .venv, which is made on first use from the pinned versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
WORLD_SIZE ?= 2
# Two processes by default; tests/ and conformance/ are independent of each other and of their order.
WORKERS ?= 2

RAY := .venv-ray/bin

SYSTEMS := $(notdir $(patsubst %/requirements.txt,%,$(wildcard conformance/systems/*/requirements.txt)))

.PHONY: help conformance test lint check wheel downstream matrix field bench bench-catalogue bench-worlds bench-faults soak gpu format docs site browser pictures clean ray systems $(SYSTEMS:%=system-%)

help:
	@echo "make conformance  install, then judge real loaders on real ranks (GPUs where there are enough, else CPU)"
	@echo "make test         install, then lint, types, every test, and the kit as built in a downstream repository"
	@echo "make systems      judge the real released packages, each in its own environment: $(SYSTEMS:%=system-%)"
	@echo "make ray          install Ray as well, elsewhere, then the tests of worlds over several machines"
	@echo "make lint         ruff, mypy, import-linter"
	@echo "make wheel        builds the distribution into dist, and checks what is in it"
	@echo "make downstream   judges examples/downstream elsewhere, in a new environment, with the kit from that wheel"
	@echo "make matrix       every loader against every check: build/matrix.json, .md and .svg"
	@echo "make field        transformers' own FSDP2 loader on every causal language model that it has: docs/field.md"
	@echo "make bench        what the catalogue costs, how fast weights are verified, worlds and their faults beside the peers"
	@echo "                  (alone: make bench-worlds, make bench-faults), to benchmarks/results"
	@echo "make soak         four workers on eight slots for ten minutes: no slot used twice, nothing left"
	@echo "make gpu          what only a machine with a GPU can show; writes benchmarks/results/DATE-gpu.md"
	@echo "make clean        removes the environments and what was built"
	@echo "make browser      installs Chromium where it is missing and apt-get may: the page of a report is tested in it"
	@echo "make pictures     runs broken loaders, and photographs the page of their report: docs/images"
	@echo "make format       ruff, with fixes"
	@echo "make docs         the pages that are made from the code: docs/catalogue.md"
	@echo "make site         the pages of docs/ as a site, to be read without a network: build/site/index.html"
	@echo "variables: PYTHON=$(PYTHON) WORLD_SIZE=$(WORLD_SIZE) WORKERS=$(WORKERS)"

conformance: .venv/installed
	$(PYTEST) conformance examples --fsdp-world-size=$(WORLD_SIZE)

test: lint check downstream

check: .venv/installed browser
	$(PYTEST) -n $(WORKERS) tests conformance examples

# The page of a report is tested in a real browser. Where this cannot bring one, it says what would.
browser:
	@found=; for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do \
	  found=$$found$$(command -v $$name || true); done; \
	if [ -z "$$found" ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core > /dev/null; \
	  found=$$(command -v chromium || true); fi; \
	[ -n "$$found" ] || echo "no Chromium for tests/reports/test_page_browser.py: install the package chromium, or run $(BIN)/playwright install chromium"

# The pictures of a report in README and docs, from a real run.
pictures: .venv/installed browser
	$(BIN)/python -m tests.reports.report_picture docs/images

# The wheel is built from the source distribution, so that what that lacks is missed here.
wheel: .venv-release/installed
	rm -rf dist
	.venv-release/bin/python -m build --outdir dist .
	.venv-release/bin/python -m twine check --strict dist/*
	.venv-release/bin/check-wheel-contents dist

downstream: wheel
	PYTHON=$(PYTHON) examples/downstream.sh dist/*.whl

systems: $(SYSTEMS:%=system-%)

$(SYSTEMS:%=system-%): system-%:
	PYTHON=$(PYTHON) conformance/systems/run.sh $*

# Alone, because each module starts clusters of its own.
ray: .venv-ray/installed
	$(RAY)/python -m pytest tests/ray/test_ray.py tests/ray/test_same_as_local.py tests/ray/test_hosted_ranks.py tests/worlds/test_process_groups.py tests/ray/test_namespaces.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and pinned: asked for by a range, pip would take the newest build with gigabytes of CUDA.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

# Without torch, so that a machine that only builds is done in seconds.
.venv-release/installed: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet -c constraints.txt build check-wheel-contents twine
	@touch $@

# In an environment of its own: what comes with Ray is for nobody else.
.venv-ray/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	$(RAY)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(RAY)/python -m pip install --quiet -c constraints.txt -e '.[test,ray]'
	@touch $@

# Every loader against every check, as JSON, Markdown and a picture.
matrix: .venv/installed
	$(BIN)/python -m conformance.matrix --out build

# What differs from what is known is told, and fails. A run that was broken off goes on where it was. The same on a loader
# that conforms, which must be clean: python -m conformance.field --loader plain
field: .venv/installed
	$(BIN)/python -m conformance.field --page docs/field.md

# Speed and memory, side by side with the bare work and with the peers; written to files of the day.
DATED := benchmarks/results/$(shell date +%F)
TESTS ?= 20

bench: bench-catalogue bench-worlds bench-faults

bench-catalogue: .venv/installed
	$(BIN)/python -m benchmarks.catalogue > $(DATED)-catalogue.txt
	$(BIN)/python -m benchmarks.verification > $(DATED)-verification.txt

bench-worlds: .venv-peers/installed
	.venv-peers/bin/python -m benchmarks.worlds --tests $(TESTS) --out $(DATED)-worlds.md

bench-faults: .venv-peers/installed
	.venv-peers/bin/python -m benchmarks.faults --out $(DATED)-faults.md

# Whatever else pip finds, torch comes first and pinned. Of the peers, only what an index has: see the file.
.venv-peers/installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet -r benchmarks/peers/requirements.txt
	@touch $@

soak: .venv/installed
	$(BIN)/python -m benchmarks.soak --seconds 600

# Exits with 2 where there is no GPU. torch 2.13.0 from PyPI comes with CUDA and NCCL.
gpu: .venv/installed
	$(BIN)/python -m benchmarks.gpu

# The pages that are made from the code.
docs: .venv/installed
	$(BIN)/python -m pytest_fsdp_meta.reports.catalogue_page > docs/catalogue.md
	$(BIN)/python -m pytest_fsdp_meta.reports.io > docs/report.schema.json

# Whatever Sphinx warns of (a link that leads nowhere, a page in no table of contents) is an error.
site: docs
	$(BIN)/python -m sphinx -q -W --keep-going docs build/site

clean:
	rm -rf .venv .venv-ray .venv-release .venv-systems build dist
