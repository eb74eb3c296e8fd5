#!/bin/bash
# datasets 5.2.0: Dataset.to_json writes ten digits after the point, as pandas does: probabilities below 5e-11 become 0,
# so that their logs are -inf, and those below 1e-15 are kept, so that an order by probability changes; log-probs,
# embeddings and weights come back rounded, a seventh digit of 1e-4 is gone. to_parquet and to_csv return what was put
# in. double_precision=15, the most that is allowed, moves the border; json.dumps of each row keeps all.
#
# Seen on 2026-11-28, Python 3.11, Linux:
#     put in            1e-09   1e-12   1e-16   0.00012345678901
#     back from JSON    1e-09   0.0     1e-16   0.0001234568
#     back from CSV, Parquet    what was put in
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1
HF_HOME="$folder" venv/bin/python - <<'EOF'
import datasets

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
given = [1e-09, 1e-12, 1e-16, 0.00012345678901]
rows, back = datasets.Dataset.from_dict({"p": given}), {}
for name in ("json", "csv", "parquet"):
    getattr(rows, f"to_{name}")(f"rows.{name}")
    back[name] = list(datasets.load_dataset(name, data_files=f"rows.{name}", split="train")["p"])
    print(name, back[name])
assert back["json"] == [1e-09, 0, 1e-16, 0.0001234568]
assert back["csv"] == back["parquet"] == given
EOF
