#!/bin/bash
# pandas 3.1.1 and pyarrow 26.0.1, so datasets 5.2.0, too: strings of a JSON Lines file change their type.
# pandas.read_json makes numbers of a column whose strings are all digits: "007" is 7. pyarrow's reader and
# load_dataset("json") make points in time of a column whose strings are all ISO dates; each leaves the other column
# alone. A benchmark's gold answers then equal no text. dtype=False in pandas and an explicit_schema in pyarrow help;
# features that say string do not bring a date back in datasets: they print the point in time.
#
# Seen on 2026-11-27, Python 3.11, Linux, for the strings "007" and "1969-07-20":
#     pandas                       7, '1969-07-20'
#     pyarrow                      '007', datetime.datetime(1969, 7, 20, 0, 0)
#     datasets                     '007', datetime.datetime(1969, 7, 20, 0, 0)
#     datasets, features of texts  '007', '1969-07-20 00:00:00'
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1
HF_HOME="$folder" venv/bin/python - <<'EOF'
from datetime import datetime
from pathlib import Path

import pandas
import pyarrow.json
from datasets import Features, Value, disable_progress_bars, load_dataset

disable_progress_bars()
Path("rows.jsonl").write_text('{"agent": "007", "day": "1969-07-20"}\n{"agent": "42", "day": "1815-06-18"}\n')
found = {
    "pandas": pandas.read_json("rows.jsonl", lines=True).iloc[0].to_dict(),
    "pyarrow": pyarrow.json.read_json("rows.jsonl").to_pylist()[0],
    "datasets": load_dataset("json", data_files="rows.jsonl", split="train")[0],
}
texts = Features({"agent": Value("string"), "day": Value("string")})
found["datasets, features of texts"] = load_dataset("json", data_files="rows.jsonl", split="train", features=texts)[0]
for reader, row in found.items():
    print(reader, row)
landing = datetime(1969, 7, 20)
assert found["pandas"] == {"agent": 7, "day": "1969-07-20"}
assert found["pyarrow"] == found["datasets"] == {"agent": "007", "day": landing}
assert found["datasets, features of texts"]["day"] == "1969-07-20 00:00:00"
as_they_are = pandas.read_json("rows.jsonl", lines=True, dtype=False)
assert as_they_are.agent[0] == "007"
EOF
