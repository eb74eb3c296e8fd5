#!/bin/bash
# trl 1.16.0: accuracy_reward and its relatives grade the first message of a completion. A GRPOTrainer with tools hands
# them the whole exchange: the message that calls the tool, the tool's answer, the message with the result. The result
# is never read. A policy that answers right by its tool gets 0, one that guesses beforehand is paid for the guess, and
# the reward teaches it not to use the tool. Wrap them: pass [completion[-1:] for completion in completions].
#
# Seen on 2026-11-28, Python 3.11, Linux, gold answer 12:
#     the tool is called, then \boxed{12}: accuracy_reward 0.0, the last message alone 1.0
#     \boxed{12} is guessed with the call, then \boxed{7}: 1.0, the last message alone 0.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile trl==1.16.0 transformers==5.24.0 torch==2.13.0 numpy==2.3.5 \
    math-verify==0.9.0 latex2sympy2_extended==1.11.0
HF_HOME="$folder" venv/bin/python - <<'EOF'
import trl
from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward

print("trl", trl.__version__)
call = [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}}]


def exchange(first, last):
    """One completion as GRPOTrainer(tools=...) hands it to its reward functions."""
    return [
        {"role": "assistant", "content": first, "tool_calls": call},
        {"role": "tool", "name": "multiply", "content": "12"},
        {"role": "assistant", "content": last},
    ]


completions = [
    exchange("I multiply.", r"<think>12.</think> \boxed{12}"),
    exchange(r"<think>12?</think> \boxed{12}, I check.", r"\boxed{7}"),
]
for reward in (accuracy_reward, reasoning_accuracy_reward, think_format_reward):
    whole = reward(completions, solution=["$12$"] * 2)
    last = reward([completion[-1:] for completion in completions], solution=["$12$"] * 2)
    print(reward.__name__, whole, "the last message alone", last)
    assert whole == [0, 1] and last == [1, 0]
EOF
