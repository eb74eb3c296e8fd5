"""A real HTTP server with a folder's files at the Hugging Face hub's addresses, for the tests of
what is fetched."""

import contextlib
import hashlib
import re

from json_server import JsonServer

COMMIT = "c0ffee" + "0" * 34


class Hub(JsonServer):
    """Serves ROOT/datasets/OWNER/NAME/FILE and ROOT/OWNER/NAME/FILE, at any revision; keeps what
    was asked for."""

    def __init__(self, root):
        self.root, self.asked = root, []
        super().__init__(self.answer)

    def fetched(self):
        """Returns the files whose bytes were sent, as often as they were."""
        return [path for method, path in self.asked if method == "GET"]

    def answer(self, handler):
        place = re.fullmatch(
            r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/([^?]+).*", handler.path
        )
        file = self.root / place[1] / place[3] if place else None
        if not (file and file.is_file()):
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = file.read_bytes()
        self.asked.append((handler.command, f"{place[1]}/{place[3]}"))
        commit = place[2] if len(place[2]) == 40 else COMMIT
        return (
            200,
            {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'},
            content,
        )


@contextlib.contextmanager
def hub_of(root):
    """Yields a Hub over a folder; stops it at the end."""
    server = Hub(root)
    try:
        yield server
    finally:
        server.stop()
