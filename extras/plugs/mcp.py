"""Tools of an MCP server: `--tools mcp:URL` (Streamable HTTP) or `--tools mcp:COMMAND` (its stdin
and stdout).

The official SDK talks to the server. A server's tool has a name, a description and a JSON schema of
its arguments; from these the prompt explains it, and the arguments that the policy writes are
checked here before they are sent.

Every rank has its own connection and, of a command, its own process, which sees no keys of ours:
the SDK passes on PATH, HOME and the like alone.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import shlex
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from plumbing.faults import Fault, ToolDown, first_line
from plumbing.outside import printable, without_secrets
from plumbing.stop import leads
from tasks.functions import Failed, SchemaTool
from tasks.tools import Tool, check_words

PATIENCE = 60.0  # seconds for a server to start and to list its tools
PROBE = 10.0  # seconds for one that has failed to list them again
RETRIES = 6  # attempts to reach it again after the first, as of the search tool
ROUNDS = 6  # of calls of a tool, each begun after the last went unserved, that stop the run


def tools_of(target: str, where: str, others: Sequence[Tool]) -> list[Tool]:
    """Returns the tools of the server at a URL or behind a command that the policy can call beside
    others. Raises Fault if there is none."""
    return choose_fitting(where, others, list_tools(target, where))


def choose_fitting(where: str, others: Sequence[Tool], found: Sequence[Tool | Fault]) -> list[Tool]:
    """Returns the tools that the policy can call beside others, and tells which are left out; a
    Fault is one of a server that cannot be offered. Raises Fault if none fits."""
    fitting: list[Tool] = []
    faults = []
    for tool in found:
        try:
            if isinstance(tool, Fault):
                raise tool
            check_words(without_secrets(where), [*others, *fitting, tool])
            fitting.append(tool)
        except Fault as e:
            faults.append(e)
    if not fitting:
        raise faults[0]
    if leads():
        for fault in faults:
            print(printable(f"note: {fault}; it is left out"), flush=True)
    return fitting


@functools.cache
def list_tools(target: str, where: str) -> Sequence[Tool | Fault]:
    """Returns the tools of the server at a URL or behind a command, a Fault for each that cannot be
    offered.

    Raises Fault, which begins with `where`.
    """
    where = without_secrets(where)
    try:
        import jsonschema_rs  # noqa: F401
        import mcp  # noqa: F401
    except ImportError as e:
        raise Fault(
            f"{where}: the SDK is missing ({first_line(e)}): pip install mcp jsonschema-rs"
        ) from None
    # its tracebacks; what it cannot do becomes a reply
    logging.getLogger("mcp").setLevel(logging.CRITICAL + 1)
    server = Server(target, where)
    found = make_tools(ServerTool, where, server.start())
    if not found:
        raise Fault(f"{where}: the server has no tools")
    for tool in found:
        if isinstance(tool, ServerTool):
            tool.server = server
    return found


def make_tools(kind: Callable[..., Tool], where: str, listed: Sequence[Any]) -> list[Tool | Fault]:
    """Returns a tool of this kind for each that a server lists, and a Fault for one that the policy
    could not call."""
    made = list[Tool | Fault]()
    for tool in listed:
        try:
            made.append(kind(where, tool.name, tool.description, tool.input_schema))
        except Fault as e:
            made.append(e)
    return made


def back_off(round: int) -> float:
    """Returns the seconds to wait after a round of attempts that has failed; the first one is 1."""
    return min(60.0, 2.0 ** (round - 1))


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} lies outside the schema")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process's connections, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _begun(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    return asyncio.run_coroutine_threadsafe(work, _loop())


class CheckedTool(SchemaTool):
    """A tool with a JSON schema of its arguments, which are checked here before they are sent.

    Raises Fault, which begins with `where`, if the policy could not call it.
    """

    def __init__(self, where: str, name: str, description: str | None, parameters: dict[str, Any]):
        import jsonschema_rs

        try:
            # Not Python's jsonschema: its regular expressions can take hours, in which no other
            # thread runs.
            self.validator = jsonschema_rs.validator_for(parameters, retriever=_refuse)
            if parameters.get("type") != "object":
                raise ValueError("its type is not object")
        except ValueError as e:
            raise Fault(
                f"{where}: the schema of its tool {name} is invalid ({_first(e)})"
            ) from None
        if not (description or "").strip():
            raise Fault(
                f"{where}: its tool {name} has no description, so the policy cannot know what it does"
            )
        parameters.pop("$schema", None)
        super().__init__({"name": name, "description": description, "parameters": parameters})

    def read_arguments(self, arguments: str) -> dict[str, Any]:
        given = json.loads(arguments)
        for error in self.validator.iter_errors(given):
            raise ValueError(": ".join([*map(str, error.instance_path), error.message[:200]]))
        return given  # type: ignore[no-any-return]  # the SDK sends nothing but an object


class ServerTool(CheckedTool):
    """One tool of a server."""

    grace = 3600.0  # its calls wait while the server is replaced, which takes minutes
    server: Server
    rounds = 0

    def call(self, arguments: dict[str, Any]) -> str:
        """Raises Failed if there is no result, and ToolDown if the server is gone, or serves no
        call of it."""
        round = self.rounds + 1
        text, served = _begun(self.server.call(self.name, arguments, self.timeout)).result()
        self.rounds = 0 if served else max(round, self.rounds)
        if not served and round >= ROUNDS:  # or the policy would learn not to use it
            raise ToolDown(f"{self.server.where}: {text}; it has served no call in {round} rounds")
        if isinstance(text, Failed):
            raise text
        return text  # type: ignore[no-any-return]


class Server:
    """A connection that is opened again when it breaks, and whose calls run side by side."""

    def __init__(self, target: str, where: str):
        self.target, self.where = target, where
        self.client: Any = None
        self.lost = asyncio.Event()  # set when the connection is given up
        self.renewal: asyncio.Task[None] | None = None

    def start(self) -> list[Any]:
        """Connects; returns the server's tools as the SDK has them. Raises Fault."""

        async def tools() -> list[Any]:
            await self.open()
            page = await self.client.list_tools()
            listed = page.tools
            while page.next_cursor:
                page = await self.client.list_tools(cursor=page.next_cursor)
                listed += page.tools
            return listed  # type: ignore[no-any-return]

        try:
            return _begun(asyncio.wait_for(tools(), PATIENCE)).result()  # type: ignore[no-any-return]
        except asyncio.TimeoutError:
            why = f"it did not answer in {PATIENCE:g} s"
        except Exception as e:
            why = _first(e)
        raise Fault(f"{self.where}: no MCP server answers there ({why})")

    async def open(self) -> None:
        """Connects. The connection lives in a task of its own, since the SDK closes it where it was
        opened."""
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        lost = self.lost = asyncio.Event()

        async def hold() -> None:
            # servers write on every request
            with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
                try:
                    async with _client(self.target, log) as client:
                        client.session.validate_tool_result = _accept
                        ready.set_result(client)
                        await lost.wait()
                except BaseException as e:
                    if not ready.done():
                        log.seek(0)
                        lines = log.read().strip().splitlines()
                        # npm's last line names a file
                        said = [line for line in lines if "npm error 4" in line] or lines[-1:]
                        ready.set_exception(
                            ConnectionError(printable("".join(said[:1])) or _first(e))
                        )

        self.task = asyncio.create_task(hold())
        try:
            self.client = await ready
        except asyncio.CancelledError:  # it took too long
            self.task.cancel()
            raise

    async def call(
        self, name: str, arguments: dict[str, Any], timeout: float
    ) -> tuple[str | Failed, bool]:
        """Returns a tool's result as text, or the server's error; and whether the call was served.

        A call whose connection breaks, or whose server has frozen, is repeated once over a new one.
        Raises ToolDown if none can be had.
        """
        for _ in range(2):
            client = self.client
            try:
                result = await asyncio.wait_for(client.call_tool(name, arguments), timeout)
                text = _read(result.content, result.structured_content)
                return Failed(text or f"{name} failed") if result.is_error else text, True
            except asyncio.TimeoutError:
                served, why = False, f"took longer than {timeout:g} s"
            except Exception as e:  # of the server, of the SDK, of a transport
                served, why = True, f"failed: {getattr(e, 'message', '') or _first(e)}"
            if not await self.renew(client):
                return Failed(f"{name} {why}"), served
        return Failed(f"{name} failed: the server ended during the call"), False

    async def renew(self, broken: Any) -> bool:
        """Returns whether a broken connection has been replaced, once for all the calls that it
        broke.

        Raises ToolDown.
        """
        if self.client is broken and (not self.renewal or self.renewal.done()):
            self.renewal = asyncio.create_task(self.replace(broken))
        if self.client is broken and self.renewal:
            await asyncio.shield(self.renewal)
        return self.client is not broken

    async def replace(self, client: Any) -> None:
        """Connects again unless the server answers. Raises ToolDown."""
        try:
            await asyncio.wait_for(client.list_tools(cache_mode="bypass"), PROBE)
            return
        except Exception:
            self.lost.set()
        for round in range(1, RETRIES + 2):
            try:
                return await asyncio.wait_for(self.open(), PATIENCE)
            except Exception as e:
                why = _first(e)
            if round <= RETRIES:
                await asyncio.sleep(back_off(round))
        raise ToolDown(f"{self.where}: the MCP server ended and does not start again ({why})")


async def _accept(*_: Any) -> None:
    """Checks no result against its schema: the policy reads it as text, and a pattern in it could
    take hours."""


def _read(content: list[Any], data: Any) -> str:
    """Returns a result's parts, and after them its structured data, unless the parts say these."""
    texts = [_text(part) for part in content]
    values = [_value(text) for text in texts]
    # servers wrap what is no object, and make each item of a list a part
    bare = data["result"] if isinstance(data, dict) and [*data] == ["result"] else data
    text, said = "\n".join(texts), (*texts, *values, texts, values)
    if data is None or (texts and any(part in (data, bare) for part in said)):
        return text
    return "\n".join(filter(str.strip, [text, json.dumps(data, ensure_ascii=False)]))


def _value(text: str) -> Any:
    """Returns what a JSON text says, or another text."""
    with suppress(ValueError):
        return json.loads(text)
    return text


def _text(part: Any) -> str:
    """Returns the text of a part of a result, also that of a resource; else what it is, and its
    address."""
    held = getattr(part, "resource", part)
    if (text := getattr(held, "text", None)) is not None:
        return str(text)
    about = (
        [getattr(held, name, None) for name in ("name", "uri", "mime_type")]
        if hasattr(held, "uri")
        else []
    )
    return f"({' '.join([part.type, *(str(x) for x in about if x)])})"


def _client(target: str, log: Any) -> Any:
    """Returns the SDK's client of a URL or a command, whose stderr goes to `log`."""
    from mcp import Client, StdioServerParameters, stdio_client

    if target.startswith(("http://", "https://")):
        return Client(target)
    words = shlex.split(target)
    if not words:
        raise ValueError("no URL and no command after mcp:")
    return Client(stdio_client(StdioServerParameters(command=words[0], args=words[1:]), errlog=log))


def _first(e: BaseException) -> str:
    """Returns an exception's message on one line, of a group's first one: pydantic's second line
    names the field."""
    while inner := getattr(e, "exceptions", ()):
        e = inner[0]
    return " ".join(str(e).split())[:200] or type(e).__name__
