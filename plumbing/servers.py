"""HTTP servers: binds a port, serves an app on it, and runs a server as a child process of a
run."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from plumbing.faults import Fault

# a server prints it once it accepts connections
LISTENING = re.compile(r"^listening on (http://\S+)$", re.M)


def listen(host: str, port: int) -> socket.socket:
    """Returns a TCP socket that listens on host:port (port 0: any free one); raises Fault if it
    cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # "" would bind every address of the machine: an unset shell variable must not publish the
        # server.
        sock = socket.create_server((host or "127.0.0.1", port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as e:
        remedy = "give an address of this machine and a free port (0 takes any)"
        raise Fault(f"cannot listen on {host}:{port}: {e}; {remedy}") from None
    # asyncio leaves Nagle's algorithm on for sockets made like this, so a short response takes 44
    # ms instead of 1.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def serve_app(app: Any, sock: socket.socket, child: bool) -> None:
    """Serves an ASGI app on a listening socket until interrupted, or, as a child, until standard
    input ends."""
    import uvicorn  # here, because the trainer imports this module too

    # 120 s: a trainer's connections stay open during its update step.
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=120)
    server = uvicorn.Server(config)
    # uvicorn's own handlers would wait for clients, however slow: a server has nothing to save.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    if child:
        # A cluster may signal every process of a job, but the parent needs this server until it has
        # saved, and stops it when it is done.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    host, port = sock.getsockname()[:2]
    print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    server.run(sockets=[sock])


def _exit_with_stdin() -> None:
    while os.read(0, 4096):  # the kernel closes the pipe however the parent ends, even by kill -9
        pass
    os._exit(0)


class Child(contextlib.AbstractContextManager["Child"]):
    """Runs a server as `python *argv --port N --child`, ready at `.url`; raises Fault if it
    never is.

    It ends with this process, however this process ends. What it prints is appended to the file
    `log`.
    """

    def __init__(self, argv: list[str], log: str | Path, deadline: float = 60.0, port: int = 0):
        program = argv[1] if argv[0] == "-m" else argv[0]
        command = [sys.executable, *argv, "--port", str(port), "--child"]
        root = str(Path(__file__).parents[1])  # for `-m module`, whatever the working directory
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        # one thread: the trainer needs the cores
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._log = Path(log)
        with open(log, "ab") as output:
            self._log_start = output.tell()
            # a session of its own: a terminal's Ctrl-C and hang-up do not reach it
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        end = time.monotonic() + deadline
        try:
            while not (ready := LISTENING.search(self._printed())):
                if not self.alive() or time.monotonic() > end:
                    problem = "stopped while starting"
                    if self.alive():
                        problem = f"not ready after {deadline:g} s"
                    last_line = self._printed().strip().rpartition("\n")[2] or "it printed nothing"
                    raise Fault(f"{program} {problem}: {last_line} (log: {log})")
                time.sleep(0.02)
        except BaseException:  # Ctrl-C too
            self.stop()
            raise
        self.url = ready[1]

    def _printed(self) -> str:
        # without that of earlier processes
        return self._log.read_bytes()[self._log_start :].decode(errors="replace")

    def alive(self) -> bool:
        """Returns whether the process is still running."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the process, which has nothing to save, and waits for it."""
        self._process.kill()
        self._process.communicate()

    def __exit__(self, *_: object) -> None:
        self.stop()


class Servers(contextlib.AbstractContextManager["Servers"]):
    """The servers that a run starts for itself; `servers(*argv)` starts one unless it is running,
    and returns its URL.

    `deadline`: seconds after which one that is not ready is a Fault. A server that has died
    restarts on its old port, the only one that the clients of other ranks know.
    """

    def __init__(self, log: str | Path):
        self.log = log
        self._running: dict[tuple[str, ...], Child] = {}

    def __call__(self, *argv: str, deadline: float = 60.0) -> str:
        last = self._running.get(argv)
        if not last or not last.alive():
            port = int(last.url.rpartition(":")[2]) if last else 0
            self._running[argv] = Child([*argv], self.log, deadline, port)
        return self._running[argv].url

    def __exit__(self, *_: object) -> None:
        for child in self._running.values():
            child.stop()
