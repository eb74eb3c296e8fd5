"""The HTTP servers of a run: bind a port, serve an app on it, and start a server as a child process."""

import contextlib
import errno
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit


def listen(host: str, port: int) -> socket.socket:
    """Returns a TCP socket that listens on host:port (port 0: a free one); SystemExit where none can."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # "" would mean every address of the machine: an unset shell variable must not publish the server.
        sock = socket.create_server((host or "127.0.0.1", port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as e:
        todo = "give an address of this machine as --host and a port from 0 to 65535 as --port"
        if isinstance(e, OSError) and e.errno == errno.EADDRINUSE:
            todo = "stop the process that has it or choose another --port (0 takes a free one)"
        why = str(getattr(e, "strerror", None) or e).partition(" (while")[0].rstrip(".")
        raise SystemExit(f"cannot listen on {host}:{port}: {why}; {todo}") from None
    # asyncio leaves Nagle's algorithm on for a socket made like this: 44 ms a short answer instead of 1.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def serve(app, sock: socket.socket, child: bool) -> None:
    """Serves an ASGI app on a listening socket until interrupted; as a child, until standard input ends."""
    import uvicorn  # here, because the trainer imports this module too

    # 120 s: a trainer that comes back from its update step finds its connections still open.
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=120)
    server = uvicorn.Server(config)
    if child:
        # Ctrl-C in a terminal reaches the whole group; the parent may still need this server to finish its
        # work, and stops it itself. uvicorn would put its own handlers in place of this.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        server.capture_signals = contextlib.nullcontext
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    host, port = sock.getsockname()[:2]
    print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[sock])


def _exit_with_stdin() -> None:
    while os.read(0, 4096):  # the kernel closes the pipe however the parent ends, kill -9 included
        pass
    os._exit(0)


class Child:
    """A server script run as `python *argv --port N --child`, ready at `.url`; SystemExit if it never is.

    It ends when this process ends, however that happens; its standard error is appended to the file `log`.
    """

    def __init__(self, argv: list[str], log: str | Path, deadline: float = 60.0, port: int = 0):
        command = [sys.executable, *argv, "--port", str(port), "--child"]
        here = str(Path(__file__).parents[1])  # for `-m module`, wherever the parent was started
        here = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": here}  # one thread: the trainer needs the cores
        pipe = subprocess.PIPE
        with open(log, "ab") as stderr:
            log_start = stderr.tell()
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=env)
        self.url = ""
        threading.Thread(target=self._read_stdout, daemon=True).start()
        give_up = time.monotonic() + deadline
        try:
            while not (self.url and self._healthy()):
                if not self.alive() or time.monotonic() > give_up:
                    how = f"not ready after {deadline:g} s" if self.alive() else "stopped while starting"
                    raise SystemExit(f"{argv[0]} {how}: {_last_line(log, log_start)} (log: {log})")
                time.sleep(0.02)
        except BaseException:  # Ctrl-C too
            self.stop()
            raise

    def _read_stdout(self) -> None:
        with self._process.stdout as lines:
            for line in lines:  # to the end: a child that prints would block on a full pipe
                if line.startswith(b"listening on ") and not self.url:
                    self.url = line.split()[-1].decode()

    def _healthy(self) -> bool:
        # http.client, because urllib and requests would ask the proxy that the environment may name
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def alive(self) -> bool:
        """Returns whether the process still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the process and waits until it has ended; after 5 s it is killed."""
        self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_) -> None:
        self.stop()


class Servers:
    """The servers that a run starts for itself; `servers(*argv)` starts one if it does not run, and returns its URL.

    One that has died comes again on the port that it had: the clients of other ranks know no other.
    """

    def __init__(self, log: str | Path):
        self.log = log
        self._running: dict[str, Child] = {}

    def __call__(self, *argv: str) -> str:
        last = self._running.get(argv[0])
        if last is None or not last.alive():
            port = urlsplit(last.url).port if last else 0
            self._running[argv[0]] = Child([*argv], self.log, port=port)
        return self._running[argv[0]].url

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_) -> None:
        for child in self._running.values():
            child.stop()


def _last_line(log: str | Path, start: int) -> str:
    with open(log, "rb") as f:
        f.seek(start)  # what came before is from an earlier process
        lines = f.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it wrote no error")
