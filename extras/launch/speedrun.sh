#!/usr/bin/env bash
# From a blank Linux machine with an NVIDIA GPU to the page of a run. The same command again continues where it stopped.
#
#     export OPENAI_API_KEY=...; extras/launch/speedrun.sh     # Qwen2.5-0.5B on HotpotQA, on all GPUs (docs/real.md)
#     extras/launch/speedrun.sh world 1 --T 20                 # PRESET PROCESSES FLAGS...: the world, without a GPU
#
# Not run on a GPU yet; a test runs it on the world.
set -euo pipefail
cd "$(dirname "$0")/../.."
preset=${1:-qwen2.5-0.5b} venv=.venv ranks=1 resume=()
run=runs/speedrun-$preset flags=(--model "$preset")
fail() { echo "speedrun: $*" >&2; exit 1; }

stage() { # stage NAME RESULT COMMAND...: runs a command unless its result is there
    local name=$1 result=$2 start=$SECONDS
    if [ -e "$result" ]; then echo "== $name: $result is there"; return; fi
    echo "== $name: ${*:3}"
    "${@:3}" || fail "$name failed after $((SECONDS - start)) s; the same command continues here"
    echo "== $name: $result, $((SECONDS - start)) s"
}
check_card() {  # a part that fails is in its table, and no reason to stop
    make gpu PYTHON=$venv/bin/python || [ -e runs/gpu/gpu.json ]
}

install_gpu() {
    export PATH=$PATH:$HOME/.local/bin
    command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh || return
    uv venv --quiet --allow-existing --python 3.12 $venv || return
    uv pip install --quiet --python $venv/bin/python -r requirements.txt -r requirements/guests.txt \
        -c requirements/lock-gpu.txt && touch $venv/done
}

if [[ $preset == qwen* ]]; then
    nvidia-smi -L > /dev/null 2>&1 || fail "no NVIDIA driver (nvidia-smi -L fails); $0 world needs none"
    [[ ${OPENAI_API_KEY-}${OPENAI_BASE_URL-} || $* == *"--mode static"* ]] || fail "set OPENAI_API_KEY, or --mode static"
    venv=.venv-gpu ranks=gpu data=data/hotpotqa
    flags+=(--T 150 --T_e 75 --eval_n 500 --train "$data/train.jsonl" --test "$data/test.jsonl")
    flags+=(--corpus "$data/corpus.jsonl")
    stage install $venv/done install_gpu
    stage card runs/gpu/gpu.json check_card
    stage questions $data/train.jsonl $venv/bin/python extras/hotpot.py $data
else
    stage install $venv/done make setup
fi
if [ -e "$run/config.json" ]; then resume=(--resume); fi
stage training "$run/summary.json" $venv/bin/torchrun --standalone --nproc_per_node="${2:-$ranks}" inspo.py \
    "${flags[@]}" "${@:3}" --out "$run" "${resume[@]}"
stage page "$run/report.html" $venv/bin/python -m extras.page "$run"
