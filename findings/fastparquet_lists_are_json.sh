#!/bin/bash
# fastparquet 2026.9.0 writes a pandas column of lists as JSON text; it reads lists back, so that a round trip hides it.
# pyarrow 26.0.1 returns the texts: the type of the column is arrow.json, and a loop over "the list" visits characters.
# A file of questions with a list of answers in each row changes its meaning with who reads it.
#
# Seen on 2026-11-27, Python 3.11, Linux, for [["x", "y"], ["z"]]:
#     fastparquet [['x', 'y'], ['z']]
#     pyarrow     extension<arrow.json> ['["x","y"]', '["z"]']
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile fastparquet==2026.9.0 pyarrow==26.0.1 pandas==3.1.1
venv/bin/python - <<'EOF'
import fastparquet
import pandas
import pyarrow.parquet

lists = [["x", "y"], ["z"]]
fastparquet.write("lists.parquet", pandas.DataFrame({"id": ["a", "b"], "answers": lists}))
own = fastparquet.ParquetFile("lists.parquet").to_pandas().answers.tolist()
table = pyarrow.parquet.read_table("lists.parquet")
other = table.column("answers").to_pylist()
print(own, table.schema.field("answers").type, other)
assert own == lists
assert other == ['["x","y"]', '["z"]']
EOF
