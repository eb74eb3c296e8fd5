"""A chat endpoint for the roles of optimizer and judge.

It imports no transformers: their classes of models bring numba with them, beside which vLLM's CPU build does not start.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer(ThreadingHTTPServer):
    """Speaks chat completions: `answer(messages)` returns a reply, or (status, text) of an answer that is none.

    `asked` keeps the messages of every request.
    """

    daemon_threads, request_queue_size = True, 128

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked = answer, []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        self.server.asked.append(messages)
        answer = self.server.answer(messages)
        completion = {"choices": [{"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}]}
        self.reply(*(answer if isinstance(answer, tuple) else (200, json.dumps(completion))))

    def do_GET(self):
        self.reply(200, '{"data": [{"id": "any"}]}')

    def reply(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass
