#!/bin/bash
# dspy 3.4.1: answer_exact_match and EM normalize as SQuAD does, and its punctuation holds the decimal point and the
# sign: 1.5 and 15 are the same answer, and so are -5 and 5, C++ and C. A single letter A is an article and becomes the
# empty text: a multiple-choice key of A is matched by no answer at all, by "the" and by ".", and "Hepatitis A" by
# "hepatitis". Who optimizes a prompt on such a metric is paid for silence. Compare numbers and letters as they are.
#
# Seen on 2026-11-28, Python 3.11, Linux, exact match:
#     gold 1.5, answer 15: True    gold -5, answer 5: True    gold A, answer "": True    gold B, answer "": False
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile dspy==3.4.1
DSPY_CACHEDIR="$folder" venv/bin/python - <<'EOF'
from importlib.metadata import version

import dspy
from dspy.evaluate import answer_exact_match

print("dspy", version("dspy"))


def match(gold, answer):
    found = answer_exact_match(dspy.Example(answer=gold), dspy.Prediction(answer=answer))
    print(f"gold {gold!r}, answer {answer!r}: {found}")
    return found


for gold, answer in (("1.5", "15"), ("-5", "5"), ("C++", "C"), ("Hepatitis A", "hepatitis")):
    assert match(gold, answer)
for answer in ("", "the", "."):
    assert match("A", answer) and not match("B", answer)
assert not match("1.5", "1.6")
EOF
