#!/bin/bash
# mcp 2.3.0: a server of the SDK decodes a string argument that looks like JSON before it checks its type, unless the
# type is exactly str. For "text: str | None" the text null arrives as None, and a text that is a JSON object or list is
# refused, though the schema that the server publishes allows any string. An agent that puts JSON into an optional
# argument is told that its string should be a string. "text: str = ''" takes all of them as they are.
#
# Seen on 2026-11-27, Python 3.11, Linux:
#     str          'null' -> 'null'   '{"a": 1}' -> '{"a": 1}'
#     str | None   'null' -> None     '{"a": 1}' -> error: ... Input should be a valid string ... input_type=dict
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

logging.disable()
server = MCPServer("example")


@server.tool()
def required(text: str) -> str:
    """Returns what it got."""
    return repr(text)


@server.tool()
def optional(text: str | None = None) -> str:
    """Returns what it got."""
    return repr(text)


async def ask(tool, text):
    async with Client(server) as client:
        result = await client.call_tool(tool, {"text": text})
    print(tool, repr(text), "->", result.content[0].text)
    return result.is_error, result.content[0].text


async def main():
    for text in ("null", '{"a": 1}'):
        assert await ask("required", text) == (False, repr(text))
    assert await ask("optional", "plain") == (False, "'plain'")
    assert await ask("optional", "null") == (False, "None")
    refused, why = await ask("optional", '{"a": 1}')
    assert refused and "input_type=dict" in why


asyncio.run(main())
EOF
