#!/bin/bash
# litellm 1.110.2: the key of its cache leaves out api_base, and every setting that is not OpenAI's: min_p,
# repetition_penalty, extra_body with its chat_template_kwargs. Two checkpoints served under one name at two ports get
# one set of answers, the second's from the first, and so do thinking on and off: an evaluation finds no difference
# between runs of which one never took place. Give each server a model name of its own, or each run a namespace.
#
# Seen on 2026-11-28, Python 3.11, Linux, two servers that answer with their own names, asked one after the other:
#     without a cache first, second   with a cache first, first, and the second server is never asked
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile litellm==1.110.2 fastapi==0.165.0 orjson==3.13.0 \
    soundfile==0.14.0  # a hit in the cache imports them
cat > ask.py <<'EOF'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import litellm

print("litellm", version("litellm"))
asked = []


class Server(BaseHTTPRequestHandler):
    """A model server that answers every request with its own name."""

    def do_POST(self):
        request = self.rfile.read(int(self.headers["Content-Length"]))
        asked.append((self.server.name, "enable_thinking" in request.decode()))
        message = {"role": "assistant", "content": self.server.name}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": choices}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
        pass


def serve(name):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.name = name
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def ask(address, **settings):
    messages = [{"role": "user", "content": "Who are you?"}]
    reply = litellm.completion("openai/policy", messages, api_base=address, api_key="none", **settings)
    return reply.choices[0].message.content


first, second = serve("first"), serve("second")
plain = [ask(first), ask(second)]
litellm.cache = litellm.Cache(type="local")
asked.clear()
cached = [ask(first), ask(second)]
no_thoughts = {"chat_template_kwargs": {"enable_thinking": False}}
ask(first, extra_body=no_thoughts)
print("without a cache", plain, "with", cached, "asked", asked)
assert plain == ["first", "second"]
assert cached == ["first", "first"] and asked == [("first", False)]
litellm.cache = None
ask(first, extra_body=no_thoughts)
assert asked[1:] == [("first", True)]
EOF
LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python ask.py 2> warnings || (cat warnings && false)
