#!/bin/bash
# huggingface_hub 2.4.0: one hf_hub_download of a file that is not cached, with a hub that refuses connections, tries
# six times: 23 s and eleven lines of warnings before its exception. A program that looks for several files waits that
# long for each of them: ask for the host once, first.
#
# Seen on 2026-11-27, Python 3.11, Linux:
#     LocalEntryNotFoundError after 23.9 s, 11 lines
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile huggingface_hub==2.4.0
cat > fetch.py <<'EOF'
import os
import socket
import time

with socket.create_server(("127.0.0.1", 0)) as closed:  # its port is free afterwards
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}", "HF_HOME": os.getcwd()}
import huggingface_hub

began = time.time()
try:
    huggingface_hub.hf_hub_download("owner/name", "config.json")
except Exception as e:
    print(type(e).__name__, f"after {time.time() - began:.1f} s")
    assert time.time() - began > 20
else:
    raise AssertionError("it was fetched")
EOF
venv/bin/python fetch.py 2> warnings
echo "$(wc -l < warnings) lines"
grep -c "Retrying in" warnings | grep -qx 5
