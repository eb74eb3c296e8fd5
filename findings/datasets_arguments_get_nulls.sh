#!/bin/bash
# datasets 5.2.0: Dataset.from_list gives every tool call the arguments of all calls, with None for those that it was
# not made with. A chat template then prints them, and a model learns to pass them. load_dataset of the same rows from a
# JSON Lines file returns what was put in, and so does from_list(rows, on_mixed_types="use_json").
#
# Seen on 2026-11-27, Python 3.11, Linux, the first row's arguments:
#     from_list            {'city': 'Bern', 'year': None}
#     load_dataset         {'city': 'Bern'}
#     from_list, use_json  {'city': 'Bern'}
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile datasets==5.2.0
HF_HOME="$folder" venv/bin/python - <<'EOF'
import json
from pathlib import Path

from datasets import Dataset, disable_progress_bars, load_dataset

disable_progress_bars()
rows = [
    {"call": {"name": "weather", "arguments": {"city": "Bern"}}},
    {"call": {"name": "calendar", "arguments": {"year": 1999}}},
]
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
listed = Dataset.from_list(rows)[0]["call"]["arguments"]
loaded = load_dataset("json", data_files="rows.jsonl", split="train")[0]["call"]["arguments"]
mixed = Dataset.from_list(rows, on_mixed_types="use_json")[0]["call"]["arguments"]
print("from_list", listed)
print("load_dataset", loaded)
print("from_list, use_json", mixed)
assert listed == {"city": "Bern", "year": None}
assert loaded == mixed == {"city": "Bern"}
EOF
