"""Tools of an MCP server: `--tools mcp:URL` (Streamable HTTP) or `--tools mcp:COMMAND` (its stdin and stdout).

The official SDK talks to the server. A server's tool has a name, a description and a JSON schema of its arguments; from
these the prompt explains it, and the arguments that the policy writes are checked here before they are sent.

Every rank has its own connection and, of a command, its own process, which sees no keys of ours: the SDK passes on
PATH, HOME and the like alone.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shlex
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from plumbing.faults import Fault, ToolDown
from plumbing.outside import printable, without_secrets
from tasks.functions import SchemaTool

PATIENCE = 60.0  # seconds for a server to start and to tell its tools
PROBE = 10.0  # seconds for one that has failed to tell them again


@functools.cache
def tools_of(target: str, where: str) -> Sequence[ServerTool]:
    """Returns the tools of the server at a URL or behind a command; raises Fault, which begins with `where`."""
    where = without_secrets(where)
    try:
        import mcp  # noqa: F401
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
    except ImportError as e:
        raise Fault(f"{where}: the SDK is missing ({e}): pip install mcp jsonschema") from None
    server = Server(target, where)
    for tool in server.start():
        parameters, name = tool.input_schema, tool.name
        try:
            validator_for(parameters).check_schema(parameters)
            if parameters.get("type") != "object":
                raise SchemaError("its type is not object")
        except (SchemaError, AttributeError) as e:
            raise Fault(f"{where}: the schema of its tool {name} is none ({_first(e)})") from None
        if not (tool.description or "").strip():
            raise Fault(f"{where}: its tool {name} has no description, so the policy cannot know what it does")
        schema = {"name": name, "description": tool.description, "parameters": parameters}
        server.tools.append(ServerTool(schema, server, validator_for(parameters)(parameters)))
    if not server.tools:
        raise Fault(f"{where}: the server has no tools")
    return server.tools


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process's connections, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _begun(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    return asyncio.run_coroutine_threadsafe(work, _loop())


class ServerTool(SchemaTool):
    """One tool of a server."""

    def __init__(self, schema: dict[str, Any], server: Server, validator: Any):
        super().__init__(schema)
        self.server, self.validator = server, validator

    def read(self, arguments: str) -> dict[str, Any]:
        given = json.loads(arguments)
        for error in self.validator.iter_errors(given):
            raise ValueError(": ".join([*map(str, error.absolute_path), error.message[:200]]))
        return given  # type: ignore[no-any-return]  # its schema is an object's

    async def call(self, arguments: dict[str, Any]) -> str:
        text: str = await asyncio.wrap_future(_begun(self.server.call(self.name, arguments)))
        return text

    @property
    def faults(self) -> int:
        """Restarts of the server, counted once for all its tools."""
        return self.server.restarts if self is self.server.tools[0] else 0


class Server:
    """A connection that is opened again when it breaks, and whose calls run side by side."""

    def __init__(self, target: str, where: str):
        self.target, self.where, self.restarts = target, where, 0
        self.tools: list[ServerTool] = []
        self.client: Any = None
        self.lost = asyncio.Event()  # set when the connection is given up
        self.opening = asyncio.Lock()

    def start(self) -> list[Any]:
        """Connects; returns the server's tools as the SDK has them. Raises Fault."""

        async def tools() -> list[Any]:
            await self.open()
            found, cursor = [], None
            while True:
                page = await self.client.list_tools(cursor=cursor)
                found += page.tools
                if not (cursor := page.next_cursor):
                    return found

        try:
            return _begun(asyncio.wait_for(tools(), PATIENCE)).result()  # type: ignore[no-any-return]
        except Exception as e:
            why = f"it did not answer in {PATIENCE:g} s" if isinstance(e, asyncio.TimeoutError) else _first(e)
            raise Fault(f"{self.where}: no MCP server answers there ({why})") from None

    async def open(self) -> None:
        """Connects. The connection lives in a task of its own, since the SDK closes it where it was opened."""
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        lost = self.lost = asyncio.Event()

        async def hold() -> None:
            with tempfile.TemporaryFile("w+") as log:  # servers write on every request
                try:
                    async with _client(self.target, log) as client:
                        ready.set_result(client)
                        await lost.wait()
                except BaseException as e:
                    if not ready.done():
                        log.seek(0)
                        last = (log.read().strip().splitlines() or [""])[-1]
                        ready.set_exception(ConnectionError(printable(last) or _first(e)))

        self.task = asyncio.create_task(hold())
        try:
            self.client = await ready
        except asyncio.CancelledError:  # it took too long
            self.task.cancel()
            raise

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Returns a tool's result as text.

        A call whose connection breaks is repeated once over a new one. If that breaks too, the call is at fault and
        its reply says so. Raises ToolDown if no new one can be had.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        for _ in range(2):
            client = self.client
            try:
                result = await client.call_tool(name, arguments)
            except MCPError as e:
                if e.code != CONNECTION_CLOSED and not await self.gone(client):
                    return f"{name} failed: {e.message}"
            except Exception:  # of a transport
                pass
            else:
                texts = [getattr(part, "text", None) or f"({part.type})" for part in result.content]
                if not texts and result.structured_content is not None:
                    return json.dumps(result.structured_content, ensure_ascii=False)
                return "\n".join(texts)
            await self.restart(client)
        return f"{name} failed: the server ended during the call"

    async def gone(self, client: Any) -> bool:
        """Returns whether a connection is of no more use."""
        try:
            await asyncio.wait_for(client.list_tools(cache_mode="bypass"), PROBE)
            return False
        except Exception:
            return True

    async def restart(self, broken: Any) -> None:
        """Replaces a broken connection, once for all calls that it broke. Raises ToolDown."""
        async with self.opening:
            if self.client is not broken:
                return
            self.restarts += 1
            self.lost.set()
            try:
                await asyncio.wait_for(self.open(), PATIENCE)
            except Exception as e:
                raise ToolDown(f"{self.where}: the MCP server ended and does not start again ({_first(e)})") from None


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
    """Returns the first line of an exception, of a group's first one."""
    while inner := getattr(e, "exceptions", ()):
        e = inner[0]
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
