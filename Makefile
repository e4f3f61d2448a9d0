# Everything runs in .venv, which is created on first use with the versions pinned in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
WORLD_SIZE ?= 2
# Processes of pytest-xdist. The tests do not depend on each other or on their order.
WORKERS ?= 3
# torch looks up a name for each connection of a TCPStore; a DNS that does not answer costs 5 s each, and so 1 s.
export RES_OPTIONS ?= timeout:1 attempts:1
# Containers often set it; then each of the many interpreters of a test run compiles torch's modules again.
unexport PYTHONDONTWRITEBYTECODE

# Pinned, and installed first: given a version range, pip would install the newest build with gigabytes of CUDA.
TORCH := torch==2.13.0
RELEASE_TOOLS := build check-wheel-contents twine

# Creates an environment, if torch has a build for this Python: pip would only say that there is no matching distribution.
VENV = @$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info[:2] <= (3, 14) else "needs Python 3.10 to 3.14, but $(PYTHON) is \
%d.%d: pass another one, for example make PYTHON=python3.11" % sys.version_info[:2])' && $(PYTHON) -m venv

RAY := .venv-ray/bin

SYSTEMS := $(notdir $(patsubst %/requirements.txt,%,$(wildcard conformance/systems/*/requirements.txt)))

# Those that have a recipe.
WILD := $(sort $(patsubst test_%.py,%,$(notdir $(wildcard examples/frameworks/test_*.py))))

.PHONY: help conformance test slow nightly lint check check-pins wheel downstream matrix verdicts field fields versions bench bench-catalogue bench-worlds bench-faults power soak gpu gpu-bundle format pins docs site browser pictures clean ray systems wild $(SYSTEMS:%=system-%)

help:
	@echo "make conformance  install, then check on real ranks (GPUs if there are enough, else CPU) that conforming loaders pass"
	@echo "                  and that a defect of each check fails it"
	@echo "make test         install, then lint, type-check and run all tests but the slow and the nightly ones"
	@echo "make check        the same without lint"
	@echo "make slow         the other tests: a form of each kind of sharding by every check, the module where a step departs, pages of docs"
	@echo "make nightly      what CI runs each night: every further defect and form, also on the stand-in device, and the whole matrix"
	@echo "make lint         run ruff, mypy and import-linter, compare sizes with limits.json, and resolve the pins in constraints.txt for the oldest and newest Python"
	@echo "make format       format and fix with ruff"
	@echo "make pins         write constraints.txt: a version of each dependency for each Python (UPGRADE=1: the newest ones)"
	@echo "make systems      judge released third-party packages, each in its own environment: $(SYSTEMS:%=system-%)"
	@echo "make wild         judge those with a recipe in examples/frameworks, and write the tables in results/released.md: $(WILD)"
	@echo "make ray          install Ray in a separate environment and run the tests of worlds on several machines"
	@echo "make gpu          run the tests that need a GPU, step by step; results and gpu.md in \$$OUT or build/gpu-results"
	@echo "                  (continues an interrupted run; on the CPU, to try the steps: make gpu GPU_OPTIONS=--dry-run)"
	@echo "make gpu-bundle   the same for a machine without a network, in build/gpu: python3 build/gpu --help"
	@echo "make wheel        build the distribution into dist and check its contents"
	@echo "make downstream   run examples/downstream in a new environment with that wheel"
	@echo "make matrix       judge every loader by every check: build/matrix.json, .md and .svg"
	@echo "make verdicts     judge the recorded evidence of all defects and forms: write conformance/verdicts.txt, and what is said of"
	@echo "                  each defect beside its true cause in conformance/causes.json (RECORD=NAME: record these loaders again)"
	@echo "make field        judge transformers' own FSDP2 loader on all its causal language models: results/field.md"
	@echo "                  (LOADER=transformers-uneven: with a vocabulary and sizes that two ranks do not divide;"
	@echo "                  LOADER=transformers-tp or transformers-fsdp-tp: tensor-parallel)"
	@echo "make fields       the same for its other classes of models, and all ways to shard them: results/field-modes.md"
	@echo "make versions     run README's example, a defect of each check and a loader of each form with each torch in a table,"
	@echo "                  each in a new environment: results/versions.md (ROWS=newest: only this row, printed; AGAIN=1: also rows"
	@echo "                  that ran today; KEEP=1: keep the environments, 6 GB each)"
	@echo "make bench        measure checks, weight verification, worlds and faults next to other tools: benchmarks/results"
	@echo "                  (one part: make bench-catalogue, make bench-worlds, make bench-faults)"
	@echo "make power        count false findings of right trainings, and find the smallest errors that are found (an hour)"
	@echo "make soak         run four workers on eight slots for ten minutes; no slot may be shared and nothing left behind;"
	@echo "                  then 1000 worlds on one fork server, whose memory and descriptors may not grow"
	@echo "make docs         generate docs/catalogue.md and docs/report.schema.json from the code"
	@echo "make site         build docs/ as a site that works offline: build/site/index.html"
	@echo "make pictures     run broken loaders and take the screenshots of their report: docs/images"
	@echo "make browser      install Chromium, in which the report page is tested, if it is missing and apt-get is available"
	@echo "make clean        remove environments and build output"
	@echo "variables: PYTHON=$(PYTHON) WORLD_SIZE=$(WORLD_SIZE) WORKERS=$(WORKERS)"

# Not what was recorded elsewhere, which says nothing about this machine; make check judges it.
conformance: .venv/judging
	$(PYTEST) -n $(WORKERS) -rfE -m "not slow and not nightly" conformance examples --fsdp-world-size=$(WORLD_SIZE) \
	  --ignore=conformance/test_recorded.py --say-it-works

test: lint check

check: .venv/installed browser
	$(PYTEST) -n $(WORKERS) -m "not slow and not nightly" tests conformance examples

# Apart from the others because they take as long as all of these, and a change breaks them last. CI runs both.
slow: .venv/installed
	$(PYTEST) -n $(WORKERS) -m "slow and not nightly" tests conformance examples

# Worth keeping, but not worth every change. GitHub runs it each night; run it before you close an issue.
nightly: .venv/installed browser matrix
	$(PYTEST) -n $(WORKERS) -m nightly tests conformance examples

# The report page is tested in a real browser. If none can be installed here, say how to get one.
browser:
	@found=; for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do \
	  found=$$found$$(command -v $$name || true); done; \
	if [ -z "$$found" ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core > /dev/null; \
	  found=$$(command -v chromium || true); fi; \
	[ -n "$$found" ] || echo "no Chromium for tests/reports/test_page_browser.py: install the package chromium, or run $(BIN)/playwright install chromium"

# The screenshots in README and docs come from a real run.
pictures: .venv/installed browser
	$(BIN)/python -m tests.reports.report_picture docs/images

# The wheel is built from the source distribution, so a file missing from the latter fails here.
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

# Each is judged even if another one has unknown findings; the table has them all.
wild:
	rm -rf build/wild
	failed=; for system in $(WILD); do \
	  PYTHON=$(PYTHON) conformance/systems/run.sh $$system --fsdp-report=build/wild/$$system || failed="$$failed $$system"; \
	done; \
	$(PYTHON) -m conformance.released build/wild && [ -z "$$failed" ] || { echo "not as known:$$failed"; exit 1; }

# Without pytest-xdist, because each module starts its own Ray clusters.
ray: .venv-ray/installed
	$(RAY)/python -m pytest tests/ray/test_ray.py tests/ray/test_same_as_local.py tests/ray/test_hosted_ranks.py tests/worlds/test_process_groups.py tests/ray/test_namespaces.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.limits
	@$(MAKE) --no-print-directory check-pins

# Resolves the pins, from metadata alone, for first releases, because some packages need a later patch release of Python, and
# for the newest Python that torch has a build for. uv exits with status 1 if there is no solution, and with 2 for other errors.
check-pins: .venv-pins/bin/uv
	@for python in 3.10.0 3.11.0 3.14.0; do \
	  $(RESOLVE) --python-version $$python --only-binary :all: --constraints constraints.txt --output-file /dev/null; \
	  case $$? in \
	    0) ;; \
	    1) echo "constraints.txt cannot be installed with Python $$python: run make pins"; exit 1;; \
	    *) echo "constraints.txt was not resolved, which needs PyPI: connect to a network, or run make check instead"; exit 1;; \
	  esac; \
	done

# Keeps the versions in constraints.txt that still fit. Not those of CUDA, which only some builds of torch have.
pins: .venv-pins/bin/uv
	$(RESOLVE) --universal --python-version 3.10 $(if $(UPGRADE),--upgrade) --no-annotate --output-file constraints.txt \
	  --custom-compile-command "make pins: the versions that this repository is tested with; pyproject.toml has the ranges for users"
	sed -i -E '/^(cuda|nvidia|triton)/d' constraints.txt

RESOLVE = printf '%s\n' $(TORCH) $(RELEASE_TOOLS) | .venv-pins/bin/uv pip compile --quiet --system-certs \
  --python .venv-pins/bin/python --all-extras pyproject.toml -
# uv does not read pip's settings.
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)

.venv-pins/bin/uv:
	$(VENV) .venv-pins
	.venv-pins/bin/python -m pip install --quiet uv==0.13.9

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Python compiles the modules that are used when they are first imported: compiling all of torch and transformers while
# installing takes longer than the rest of it.
.venv/judging: pyproject.toml constraints.txt
	$(VENV) .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[conformance]'
	@touch $@

.venv/installed: .venv/judging
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test]'
	@touch $@

# Without torch, so that a machine that only builds the wheel installs this in seconds.
.venv-release/installed: constraints.txt
	$(VENV) .venv-release
	.venv-release/bin/python -m pip install --quiet -c constraints.txt $(RELEASE_TOOLS)
	@touch $@

# A separate environment, so that Ray's dependencies affect nothing else.
.venv-ray/installed: pyproject.toml constraints.txt
	$(VENV) .venv-ray
	$(RAY)/python -m pip install --quiet -c constraints.txt $(TORCH)
	$(RAY)/python -m pip install --quiet -c constraints.txt -e '.[test,ray]'
	@touch $@

# Fails if a cause that is named is wrong, or has to be graded by reading because what is said has changed.
verdicts: .venv/installed
	$(if $(RECORD),$(BIN)/python -m conformance.matrix --record -k $(RECORD))
	$(BIN)/python -m conformance.recorded
	$(BIN)/python -m conformance.causes

# Every loader judged by every check, as JSON, Markdown and SVG.
matrix: .venv/installed
	$(BIN)/python -m conformance.matrix --out build

# Fails on differences from the known results. An interrupted run continues where it stopped. A conforming loader must give
# no findings on the same models: python -m conformance.field --loader plain
# LOADER is another class or way to load, with its page in build: transformers-uneven (sizes are primes), ...
field: .venv/installed
	$(BIN)/python -m conformance.field $(if $(LOADER),--loader $(LOADER) --page build/field-$(LOADER).md,--page results/field.md)

# All classes and ways to load, in about an hour on two cores.
fields: .venv/installed
	$(BIN)/python -m conformance.field --loader all --page results/field-modes.md

# Creates its own environments, with pip as users call it. Rows that ran today on this commit are not run again. The page is
# written only by a run of all rows.
versions:
	$(PYTHON) -m conformance.versions $(if $(ROWS),$(ROWS),--page results/versions.md) --workers $(WORKERS) \
	  $(if $(AGAIN),--again) $(if $(KEEP),--keep)

# Speed and memory next to the same work without the plugin and next to other tools; files are named by date.
DATED := benchmarks/results/$(shell date +%F)
TESTS ?= 20

bench: bench-catalogue bench-worlds bench-faults

bench-catalogue: .venv/installed
	$(BIN)/python -m benchmarks.catalogue > $(DATED)-catalogue.txt
	$(BIN)/python -m benchmarks.verification > $(DATED)-verification.txt
	$(BIN)/python -m benchmarks.sizes > $(DATED)-sizes.txt
	$(BIN)/python -m benchmarks.localising > $(DATED)-localising.txt
	$(BIN)/python -m benchmarks.simulation > $(DATED)-simulation.txt

power: .venv/installed
	$(BIN)/python -m benchmarks.power --json $(DATED)-power.json --out $(DATED)-power.md

bench-worlds: .venv-peers/installed
	.venv-peers/bin/python -m benchmarks.worlds --tests $(TESTS) --out $(DATED)-worlds.md

bench-faults: .venv-peers/installed
	.venv-peers/bin/python -m benchmarks.faults --out $(DATED)-faults.md

# Only the tools that are on PyPI are installed: see the file.
.venv-peers/installed: benchmarks/peers/requirements.txt
	$(VENV) .venv-peers
	.venv-peers/bin/python -m pip install --quiet $(TORCH)
	.venv-peers/bin/python -m pip install --quiet -r benchmarks/peers/requirements.txt
	@touch $@

soak: .venv/installed
	$(BIN)/python -m benchmarks.soak --seconds 600
	$(BIN)/python -m benchmarks.many_worlds --worlds 1000

# Exits with status 2 without a GPU. torch 2.13.0 from PyPI includes CUDA and NCCL.
gpu: .venv/installed
	$(BIN)/python -m benchmarks.gpu $(GPU_OPTIONS)

# What that machine must have is a CUDA build of torch with what torch needs, for the Python that is named here. The wheels
# of everything else are used where it lacks them.
GPU_PYTHON ?= 3.12
GPU_WHEELS := accelerate annotated-doc annotated-types anyio certifi click cloudpickle execnet h11 hf-xet httpcore2 httpx2 huggingface_hub \
  hypothesis idna iniconfig markdown-it-py mdurl numpy packaging peft pluggy psutil pydantic pydantic_core Pygments pytest \
  pytest-xdist PyYAML regex rich safetensors shellingham sortedcontainers tokenizers tqdm transformers truststore typer \
  typing-inspection

gpu-bundle: .venv-release/installed
	rm -rf build/gpu && mkdir -p build/gpu
	git ls-files -z --cached --others --exclude-standard -- benchmarks conformance examples fixtures tests pyproject.toml \
	  | tar c --null -T - | tar x -C build/gpu
	printf 'import sys\n\nfrom benchmarks.gpu import main\n\nsys.exit(main())\n' > build/gpu/__main__.py
	.venv-release/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/gpu/wheels .
	.venv-release/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
	  -c constraints.txt --dest build/gpu/wheels $(GPU_WHEELS)
	@size=$$(du -sm build/gpu | cut -f1); echo "build/gpu: $$size MiB"; [ $$size -le 64 ] || { echo "more than 64 MiB"; exit 1; }

# Files generated from the code.
docs: .venv/installed
	$(BIN)/python -m tests.docs.catalogue_page > docs/catalogue.md
	$(BIN)/python -m tests.docs.report_schema > docs/report.schema.json

# Sphinx warnings, such as broken links and pages missing from the table of contents, are errors.
site: docs
	$(BIN)/python -m sphinx -q -W --keep-going docs build/site

clean:
	rm -rf .venv .venv-pins .venv-ray .venv-release .venv-systems .venv-versions build dist
