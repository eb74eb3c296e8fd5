"""A real HTTP server with a folder's files at the Hugging Face hub's addresses, for the tests of what is fetched."""

import contextlib
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """Serves ROOT/datasets/OWNER/NAME/FILE and ROOT/OWNER/NAME/FILE, at any revision; keeps what was asked for."""

    daemon_threads = True

    def __init__(self, root):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.asked = root, []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def fetched(self):
        """Returns the files whose bytes were sent, as often as they were."""
        return [path for method, path in self.asked if method == "GET"]


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        return self.answer(body=False)

    def do_GET(self):
        return self.answer(body=True)

    def answer(self, body):
        found = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/([^?]+).*", self.path)
        file = self.server.root / found[1] / found[3] if found else None
        if not (file and file.is_file()):
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        content = file.read_bytes()
        self.server.asked.append((self.command, f"{found[1]}/{found[3]}"))
        self.send_response(200)
        self.send_header("X-Repo-Commit", found[2] if len(found[2]) == 40 else COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def hub_of(root):
    """Yields a Hub over a folder; stops it at the end."""
    server = Hub(root)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
