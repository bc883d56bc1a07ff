PYTHON ?= python3.11
STEPS ?= 60
RECIPE ?= cpu_grpo
RESUME ?=
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
TRINITY_RFT := .venv/trinity-rft

# Two processes share the files of tests; those that start engines stay in one of them.
PYTEST := $(BIN)/python -m pytest -n 2 --no-loadscope-reorder

.PHONY: help setup train compare audit trinity-rft check-gpu soak test test-ci test-all lint format lines clean

help:
	@echo "make setup             install everything into .venv (quick when up to date)"
	@echo "make train             train a toy model on the CPU: STEPS=60 RESUME=1 RECIPE=cpu_megatron ARGS='hydra overrides'"
	@echo "make compare           one step with this loss and one with verl's, side by side: ARGS='hydra overrides'"
	@echo "make trinity-rft       Trinity-RFT's own trainer on the CPU, stock and scaled, in 4 minutes: ARGS='--algorithm dpo'"
	@echo "make test              run the tests, and each engine once, in 5 to 8 minutes: ARGS='pytest arguments'"
	@echo "make test-ci           and every way to run the engines, in 15 to 25 minutes"
	@echo "make test-all          all tests, in 40 to 60 minutes: those too that train every recipe, break runs and build"
	@echo "make soak              train again and again, then for long: does it leave anything, does memory grow?"
	@echo "make audit             audit the first step of the toy run in FSDP2 and in Megatron: ARGS='hydra overrides'"
	@echo "make check-gpu         on a machine with GPUs: what a CPU cannot show, in ten minutes"
	@echo "make lint | format     check | fix the style"
	@echo "make lines             lines of the package by part"
	@echo "make clean             remove caches, builds and runs"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/constraints.txt requirements/no-deps.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c requirements/constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/no-deps.txt
	touch $@

train: setup
	$(BIN)/python recipes/train_cpu.py --recipe $(RECIPE) --steps $(STEPS) $(if $(filter-out 0,$(RESUME)),--resume) $(ARGS)

compare: setup
	$(BIN)/python recipes/compare_with_verl.py $(ARGS)

audit: setup
	$(BIN)/python recipes/audit.py $(ARGS)

trinity-rft: $(TRINITY_RFT)/.installed
	$(TRINITY_RFT)/bin/python recipes/trinity_rft_cpu/train.py $(ARGS)

# What .venv has is seen there too, so that verl and torch are installed once.
$(TRINITY_RFT)/.installed: $(STAMP) requirements/trinity-rft.txt
	$(BIN)/python -m venv --clear --without-pip $(TRINITY_RFT)
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		echo "import site; site.addsitedir('$$site')" > $$($(TRINITY_RFT)/bin/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(BIN)/python -m pip --python $(TRINITY_RFT)/bin/python install --quiet --no-deps --ignore-installed \
		-r requirements/trinity-rft.txt
	touch $@

test: setup
	$(PYTEST) $(ARGS)

test-ci: setup
	$(PYTEST) -m "not slow" $(ARGS)

test-all: setup
	$(PYTEST) -m "" $(ARGS)

check-gpu: setup
	$(BIN)/python recipes/gpu/check.py $(ARGS)

soak: setup
	$(BIN)/python recipes/soak.py $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lines:
	@$(PYTHON) tests/lines.py $(ARGS)

clean:
	rm -rf build dist runs .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
