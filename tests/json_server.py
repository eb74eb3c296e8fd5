"""A real HTTP server that follows a script, for the tests of clients."""

import contextlib
import json
import random
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def free_port():
    """Returns a port on which nobody listens, below those that systems give to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)  # in a run `random` has its seed
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class JsonServer(ThreadingHTTPServer):
    """Answers every request with the next entry of its `script`, the last one again and again;
    keeps the requests.

    An entry is a dict (sent as JSON with status 200), (status, headers, text or bytes), or a
    function of the handler, which returns one of these or None if it has answered itself.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *script, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.script, self.requests, self.closing = list(script), [], threading.Event()
        self.clients = set()  # a connection each
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def stop(self):
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        pass  # a client that no longer waits


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.body = body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        script = self.server.script
        self.server.requests.append((self.path, dict(self.headers), body))
        self.server.clients.add(self.client_address)
        entry = script.pop(0) if len(script) > 1 else script[0]
        if callable(entry):
            entry = entry(self)
        if entry is None:
            return
        status, headers, text = (200, {}, json.dumps(entry)) if isinstance(entry, dict) else entry
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        content = text.encode() if isinstance(text, str) else text
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST

    def log_message(self, *_):
        pass


def hang_up(handler):
    """Closes the connection without an answer."""
    handler.close_connection = True


def break_off(handler):
    """Closes the connection in the middle of the body."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"half":')
    handler.close_connection = True


def too_slow(handler):
    """Never answers."""
    handler.server.closing.wait(60)


def passages(find):
    """Returns an answer to POST /retrieve: the passages `find(query)` for every query."""

    def answer(handler):
        queries = json.loads(handler.body)["queries"]
        return {
            "result": [
                [{"document": {"contents": text}, "score": 1.0} for text in find(q)]
                for q in queries
            ]
        }

    return answer


class ChatServer(JsonServer):
    """Speaks chat completions, as an optimizer or judge; stops after a with block.

    `answer(messages)` returns a reply, or (status, text) of an answer that is none; `asked` keeps
    all messages.
    """

    def __init__(self, answer):
        self.answer, self.asked = answer, []
        super().__init__(self.complete)
        self.url += "/v1"

    def complete(self, handler):
        if handler.command == "GET":
            return {"data": [{"id": "any"}]}
        self.asked.append(json.loads(handler.body)["messages"])
        answer = self.answer(self.asked[-1])
        if isinstance(answer, tuple):
            return answer[0], {}, answer[1]
        return {
            "choices": [
                {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
            ]
        }

    def __exit__(self, *_):
        self.stop()


@contextlib.contextmanager
def json_servers():
    """Yields a function that starts servers; they stop at the end."""
    started = []

    def start(*script, **kwargs):
        started.append(JsonServer(*script, **kwargs))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            server.stop()
