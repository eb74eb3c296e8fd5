"""An MCP server for the tests, made with the official SDK: `python mcp_server.py` speaks on stdin
and stdout, with a port by HTTP. `--more JSON` are changed copies of `add`."""

import argparse
import json
import os
import time

from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import EmbeddedResource, ImageContent

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def shout(text: str) -> str:
    """Says a text in capitals."""
    return text.upper()


@server.tool()
def fail(text: str) -> str:
    """Raises what it is told."""
    raise ToolError(text)


@server.tool()
def sleep(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def secret(name: str) -> str:
    """Tells a variable of its environment."""
    return os.environ.get(name, "none")


@server.tool()
def refuse(times: int) -> str:
    """Raises an error of the protocol, with a code of the server's own."""
    raise MCPError(-32000, f"quota exceeded {times} times")


@server.tool(structured_output=False)
def show(uri: str) -> list:
    """Shows a resource and a picture."""
    resource = {"type": "resource", "resource": {"uri": uri, "text": "what it holds"}}
    picture = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
    return [EmbeddedResource.model_validate(resource), ImageContent.model_validate(picture)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--more", type=json.loads, default=[])
    args = parser.parse_args()
    tools = server._tool_manager._tools
    for k, change in enumerate(args.more):
        tools[f"more {k}"] = tools["add"].model_copy(update=change)
    if args.port:
        server.run("streamable-http", port=args.port)
    else:
        server.run()
