"""HTTP servers: binds a port, serves an app on it, and runs a server as a child process of a run."""

import contextlib
import errno
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from plumbing.faults import Fault


def listen(host: str, port: int) -> socket.socket:
    """Returns a TCP socket that listens on host:port (port 0: any free one); raises Fault if it cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # "" would bind every address of the machine: an unset shell variable must not publish the server.
        sock = socket.create_server((host or "127.0.0.1", port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as e:
        remedy = "give an address of this machine as --host and a port from 0 to 65535 as --port"
        if isinstance(e, OSError) and e.errno == errno.EADDRINUSE:
            remedy = "stop the process that uses it or choose another --port (0 takes a free one)"
        reason = str(getattr(e, "strerror", None) or e).partition(" (while")[0].rstrip(".")
        raise Fault(f"cannot listen on {host}:{port}: {reason}; {remedy}") from None
    # asyncio leaves Nagle's algorithm on for sockets made like this, so a short response takes 44 ms instead of 1.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


READ_TIMEOUT = 30.0  # seconds in which a request must arrive, from its connection or its first byte on
MAX_CONNECTIONS = 512  # of a server; more are closed at once


def patient(protocol: Any) -> Any:
    """Returns uvicorn's protocol class with a limit on connections, and a deadline for a request to arrive."""

    class Patient(protocol):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.deadline: Any = None
            if len(self.connections) > MAX_CONNECTIONS:
                transport.abort()
            else:
                self.await_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.deadline:
                self.deadline.cancel()

        def await_request(self) -> None:
            """Starts the clock if a request has begun and is not complete; stops it otherwise."""
            cycle = self.cycle
            arrived = cycle is not None and not cycle.response_complete and not cycle.more_body
            if arrived and self.deadline:
                self.deadline.cancel()
                self.deadline = None
            elif not arrived and not self.deadline:
                self.deadline = self.loop.call_later(READ_TIMEOUT, self.transport.abort)

    return Patient


def serve(app: Any, sock: socket.socket, child: bool) -> None:
    """Serves an ASGI app on a listening socket until interrupted, or, as a child, until standard input ends."""
    import uvicorn  # here, because the trainer imports this module too
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    # 120 s: a trainer's connections stay open during its update step.
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=120, http=patient(AutoHTTPProtocol)
    )
    server = uvicorn.Server(config)
    if child:
        # A cluster may signal every process of a job, but the parent needs this server until it has saved, and stops
        # it when it is done. uvicorn would install its own handlers instead.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    host, port = sock.getsockname()[:2]
    print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[sock])


def _exit_with_stdin() -> None:
    while os.read(0, 4096):  # the kernel closes the pipe however the parent ends, even by kill -9
        pass
    os._exit(0)


# What a child sees of the environment: where programs, caches and devices are. Not keys, nor anything it does not need.
INHERITED = re.compile(
    "PATH|HOME|USER|LANG|TZ|TE?MP|TMPDIR|VIRTUAL_ENV|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|HF_ENDPOINT|"
    "(LC|LD|PYTHON|OMP|GOMP|MKL|CUDA|NVIDIA|XDG)_?[A-Z_]+"
)


class Child:
    """Runs a server script as `python *argv --port N --child`, ready at `.url`; raises Fault if it never is.

    It ends with this process, however this process ends; its standard error is appended to the file `log`. Of the
    environment it gets what is INHERITED.
    """

    def __init__(self, argv: list[str], log: str | Path, deadline: float = 60.0, port: int = 0):
        command = [sys.executable, *argv, "--port", str(port), "--child"]
        root = str(Path(__file__).parents[1])  # for `-m module`, whatever the working directory
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        env = {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}  # one thread: the trainer needs the cores
        pipe = subprocess.PIPE
        with open(log, "ab") as stderr:
            log_start = stderr.tell()
            # a session of its own: a terminal's Ctrl-C and hang-up do not reach it
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=stderr, env=env, start_new_session=True
            )
        self.url = ""
        threading.Thread(target=self._read_stdout, daemon=True).start()
        end = time.monotonic() + deadline
        try:
            while not (self.url and self._healthy()):
                if not self.alive() or time.monotonic() > end:
                    problem = f"not ready after {deadline:g} s" if self.alive() else "stopped while starting"
                    raise Fault(f"{argv[0]} {problem}: {_last_line(log, log_start)}")
                time.sleep(0.02)
        except BaseException:  # Ctrl-C too
            self.stop()
            raise

    def _read_stdout(self) -> None:
        with cast(IO[bytes], self._process.stdout) as lines:
            for line in lines:  # to the end: a child that prints more would block on a full pipe
                if line.startswith(b"listening on ") and not self.url:
                    self.url = line.split()[-1].decode()

    def _healthy(self) -> bool:
        # http.client, because urllib and requests obey proxy settings in the environment
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def alive(self) -> bool:
        """Returns whether the process is still running."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the process, which has nothing to save, and waits for it."""
        with contextlib.suppress(OSError):
            cast(IO[bytes], self._process.stdin).close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Servers:
    """The servers that a run starts for itself; `servers(*argv)` starts one unless it is running, and returns its URL.

    `deadline`: seconds after which one that is not ready is a Fault.

    A server that has died restarts on its old port, the only one that the clients of other ranks know.
    """

    def __init__(self, log: str | Path):
        self.log = log
        self._running: dict[tuple[str, ...], Child] = {}

    def __call__(self, *argv: str, deadline: float = 60.0) -> str:
        last = self._running.get(argv)
        if last is None or not last.alive():
            port = urlsplit(last.url).port or 0 if last else 0
            try:
                self._running[argv] = Child([*argv], self.log, deadline, port)
            except Fault as e:  # a run that has begun keeps its log
                raise Fault(f"{e} (log: {self.log})" if last else str(e)) from None
        return self._running[argv].url

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._running.values():
            child.stop()


def _last_line(log: str | Path, start: int) -> str:
    with open(log, "rb") as f:
        f.seek(start)  # earlier lines are from earlier processes
        lines = f.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it printed no error")
