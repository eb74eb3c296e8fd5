#!/bin/bash
# scipy 1.17.1: nct.cdf, the noncentral t distribution's, is often NaN where its value is practically 0. The textbook
# power of a two-sided t test adds this tail, nct.cdf(-t), to nct.sf(t): for an effect of one standard deviation and 100
# pairs the power is then not 1 but NaN, and a table of sample sizes has holes. 1 - nct.sf(-t), the same number, is 0.
#
# Seen on 2026-11-27, Python 3.11, Linux:
#     pairs  20  power 0.98859  lower tail 2.3e-10
#     pairs 100  power nan      lower tail nan, 1 - sf 0.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile scipy==1.17.1 numpy==2.3.5
venv/bin/python - <<'EOF'
from math import isnan, sqrt

from scipy.stats import nct, t


def power(pairs, effect=1.0):
    df, shift = pairs - 1, effect * sqrt(pairs)
    bound = t.ppf(0.975, df)
    lower, same = nct.cdf(-bound, df, shift), 1 - nct.sf(-bound, df, shift)
    result = nct.sf(bound, df, shift) + lower
    print("pairs", pairs, "power", result, "lower tail", lower, "1 - sf", same)
    return result, same


few, many = power(20), power(100)
assert 0.98 < few[0] < 0.99
assert isnan(many[0]) and many[1] == 0
EOF
