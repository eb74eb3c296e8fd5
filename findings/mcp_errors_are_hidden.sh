#!/bin/bash
# mcp 2.3.0: a client of a server of the SDK does not learn why a tool failed. Of a ValueError it gets "Error executing
# tool NAME"; the message stays in the server's log. Only what is raised as ToolError arrives. An agent that should
# correct its arguments sees nothing that it could act on.
#
# Seen on 2026-11-27, Python 3.11, Linux:
#     plain -> Error executing tool plain
#     told  -> Error executing tool told: the year must be after 1900
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile mcp==2.3.0
venv/bin/python - <<'EOF'
import asyncio
import logging

from mcp import Client
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

logging.disable()
server = MCPServer("example")


@server.tool()
def plain(year: int) -> str:
    """Raises a ValueError."""
    raise ValueError("the year must be after 1900")


@server.tool()
def told(year: int) -> str:
    """Raises a ToolError."""
    raise ToolError("the year must be after 1900")


async def ask(name):
    async with Client(server) as client:
        result = await client.call_tool(name, {"year": 1800})
        print(name, result.is_error, result.content[0].text)
        assert result.is_error
        return result.content[0].text


assert "1900" not in asyncio.run(ask("plain"))
assert "1900" in asyncio.run(ask("told"))
EOF
