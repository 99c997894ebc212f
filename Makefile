# Everything runs in .venv, made on first use from pinned requirements: requirements.txt, and for the targets that test
# or lint requirements-dev.txt too. `make help` lists the targets.

PYTHON ?= python3
RANKS  ?= 2
STAGE  ?= 2
DTYPE  ?=
STEPS  ?=
DATA   ?=
OUT    ?=
ARGS   ?=
SECONDS ?= 600
WORKERS ?= 2

BIN      := .venv/bin
SOURCES  := setup.py pyproject.toml $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu)
TRAINING := --ranks $(RANKS) --stage $(STAGE) $(if $(DTYPE),--dtype $(DTYPE)) $(if $(STEPS),--steps $(STEPS)) \
            $(if $(DATA),--data "$(DATA)") $(if $(OUT),--out "$(OUT)") $(ARGS)

DEVELOPED := .venv/built .venv/developed
# To compile all of torch takes a minute, and most of it is never imported: COMPILED is. It is compiled even where
# PYTHONDONTWRITEBYTECODE keeps Python from it: each command would take 8 seconds of a core more.
PIP      := $(BIN)/python -m pip install --no-compile --quiet
COMPILED := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c "import torch._dynamo, torch.distributed.fsdp, tqdm, matplotlib.pyplot, torch.utils.tensorboard"

export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DELETE_ON_ERROR:

.PHONY: train
train: .venv/built  ## train a GPT on RANKS ranks; RANKS STAGE DTYPE STEPS DATA OUT, and other flags in ARGS
	@echo "starting zero-optim train"
	@$(BIN)/zero-optim train $(TRAINING)

.PHONY: test
test: $(DEVELOPED)  ## run the test suite, a file at a time on each of WORKERS (2) workers; ARGS goes to pytest
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: test-all
test-all:  ## the test suite with its slow tests (every cell of every table) and those of CUDA and Triton code
	@$(MAKE) --no-print-directory test ARGS='-m "" $(ARGS)'

.PHONY: fuzz
fuzz: $(DEVELOPED)  ## random programs on 1 to 4 ranks against plain torch, for SECONDS; a failure prints as a text
	@cd tests && PYTHONPATH=helpers ../$(BIN)/python -m random_programs --seconds $(SECONDS) $(ARGS)

.PHONY: race-check
race-check: $(DEVELOPED)  ## the order of everything launched, on simulated GPUs; ARGS="--only programs" is quicker
	@cd tests && PYTHONPATH=helpers ../$(BIN)/python -m simulated_gpu $(ARGS)

.PHONY: cuda-check
cuda-check: $(DEVELOPED)  ## the tests of CUDA and Triton code, for every architecture; needs no GPU
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m kernels tests/cuda tests/triton_backend $(ARGS)

.PHONY: lint
lint: $(DEVELOPED)  ## ruff, clang-format and mypy, as CI runs them
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $$(find csrc tests -name '*.cpp' -o -name '*.cu' -o -name '*.h')
	@$(BIN)/mypy

.PHONY: format
format: $(DEVELOPED)  ## rewrite the sources as `make lint` wants them
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $$(find csrc tests -name '*.cpp' -o -name '*.cu' -o -name '*.h')

.PHONY: bench
bench: .venv/built  ## time the kernels against torch and the memory; ARGS goes to zero-optim bench
	@$(BIN)/zero-optim bench $(ARGS)

.PHONY: gpu-check
gpu-check:  ## on a GPU, with PYTHON as it is: ARGS="--part a" (kernels), b (bits), c (NCCL), d (training) or e (Muon), 9 minutes each
	@OUT="$(OUT)" $(PYTHON) "$(CURDIR)/benchmarks/gpu_check.py" $(ARGS)

.PHONY: doctor
doctor: .venv/built  ## say what is installed, what is active, and why the rest is not
	@$(BIN)/zero-optim doctor

.PHONY: browser
browser:  ## Debian's chromium, for the test that opens a run's page in it; needs root, and without it that is skipped
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium chromium-driver; }

.PHONY: wheel
wheel: .venv/installed  ## dist/: a wheel for Linux, any torch >= 2.10 and Python >= 3.10, with the CUDA library where nvcc is; and an sdist
	@$(PIP) --requirement requirements-wheel.txt
	@rm -rf build/wheel && mkdir -p build/wheel
	@ZERO_KERNELS_CUDA=1 $(BIN)/python -m build --no-isolation --outdir build/wheel .
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --exclude 'libtorch*' \
	  --plat manylinux_2_28_$$(uname -m) --only-plat --wheel-dir dist build/wheel/*.whl
	@cp build/wheel/*.tar.gz dist/ && ls dist

.PHONY: clean
clean:  ## remove the environment, builds and caches; runs/ stays
	rm -rf .venv build dist *.egg-info python/*.egg-info .pytest_cache .ruff_cache .mypy_cache
	rm -f zero_kernels/*.so zero_kernels/*.dylib zero_kernels/build_error_*.txt
	find . -name __pycache__ -not -path './runs/*' -prune -exec rm -rf {} +

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

.venv/installed: requirements.txt
	@echo "set-up, 1 of 3: an empty environment in .venv (once)"
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) on the PATH; name one with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -m venv .venv
	@echo "set-up, 2 of 3: torch and what training needs (torch is large: minutes)"
	@$(PIP) --requirement requirements.txt
	@$(COMPILED)
	@touch $@

.venv/built: .venv/installed $(SOURCES)
	@echo "set-up, 3 of 3: compiling the kernels"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@test ! -e zero_kernels/build_error_cpu.txt || \
	  echo "the CPU library was not built, so the slower reference backend runs: make doctor says why"
	@touch $@

.venv/developed: requirements-dev.txt .venv/installed
	@echo "set-up for development: what tests and lint need (once)"
	@$(PIP) --requirement requirements-dev.txt
	@touch $@
