# `make train` and `make test` set themselves up in .venv; nothing else is needed but Python >= 3.10.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
PY     := .venv/bin/python
ARGS   ?=
# Threads that wait for each other spin only for a moment (LOG.md): as fast alone, twice as fast beside other programs.
export GOMP_SPINCOUNT ?= 1000

.PHONY: setup train static test test-slow lint bench-world bench-learn bench-step bench-retrieval bench-kernels warm-start ask

setup: .venv/done

.venv/done: requirements.txt requirements-cpu.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-cpu.txt
	touch .venv/done

train: setup          ## the embedded default: a whole INSPO run, minutes on two cores
	$(PY) inspo.py $(ARGS)

static: setup         ## Search-R1 on the same: one fixed instruction
	$(PY) inspo.py --mode static $(ARGS)

ask: setup            ## talk to the agent of the newest run
	$(PY) ask.py $(ARGS)

test: lint            ## everything that takes minutes
	$(PY) -m pytest -m "not slow" $(ARGS)

test-slow: setup      ## whole runs: it learns; the warm start from nothing; killed and resumed
	$(PY) -m pytest -m slow $(ARGS)

lint: setup
	$(PY) -m ruff check .

bench-learn: setup    ## inspo and static, 3 seeds, 2 learning rates: the README's figure (about half an hour)
	$(PY) bench/learn.py

bench-world: setup    ## what the shipped policy makes of its instructions; how often verification is wrong
	$(PY) bench/world.py

bench-step: setup     ## rollouts, update and start-up time of the embedded default
	$(PY) bench/step.py

bench-retrieval: setup ## the search server: queries/s and latency by clients; memory by corpus size (20 minutes)
	$(PY) bench/retrieval.py $(ARGS)

bench-kernels: setup  ## the GRPO head beside its peers, on a GPU (elsewhere small shapes, to test the script)
	$(PY) bench/kernels.py $(ARGS)

warm-start: setup     ## rebuild world/files from nothing: the policy that the run starts from
	$(PY) -m world.warm_start
