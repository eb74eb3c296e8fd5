#!/bin/bash
# math-verify 0.9.0: e-notation is no number. From plain text the parser takes what stands before the e: the answer
# 1.5e9 is right where the gold answer is 1.5, and wrong where it is 1500000000. In LaTeX and \boxed{} e is Euler's
# number: 1e-5 is e - 5, which equals neither 0.00001 nor 10^{-5}. A policy that answers as Python prints is never
# rewarded for small or large numbers, and no flag changes it: write mantissa and power of ten before parse().
#
# Seen on 2026-11-28, Python 3.11, Linux:
#     gold 1.5, answer 1.5e9: True     gold 1500000000, answer 1.5e9: False
#     gold $10^{-5}$, answer \boxed{1e-5}: False, parsed as -5 + E
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0
venv/bin/python - <<'EOF'
from importlib.metadata import version

from math_verify import parse, verify


def judge(gold, answer):
    found = parse(answer)
    verdict = verify(parse(gold), found)
    print(f"gold {gold}, answer {answer}: {verdict}, parsed as {found[0]}")
    return verdict


print("math-verify", version("math-verify"))
assert judge("1500000000", "The answer is 1500000000")
assert judge("1.5", "The answer is 1.5e9")
assert not judge("1500000000", "The answer is 1.5e9")
assert judge("$10^{-5}$", r"\boxed{1 \times 10^{-5}}")
assert judge("$10^{-5}$", r"\boxed{0.00001}")
assert not judge("$10^{-5}$", r"\boxed{1e-5}")
assert judge("$e - 5$", r"\boxed{1e-5}")
EOF
