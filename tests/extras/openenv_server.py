"""OpenEnv's own server with an environment: python openenv_server.py PORT KIND SESSIONS

Runs where the package `openenv` is; it knows nothing of this project.
"""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

port, kind, sessions = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])


class Dial(Action):
    """Dials a digit of the code."""

    digit: int = Field(description="From 0 to 9", ge=0, le=9)


class Door(Observation):
    text: str = ""


class Vault(Environment):
    """Opens at the last digit of its code, which is the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.code, self.tries = "", 0

    def reset(self, seed=0, episode_id=None, hint="", **row):
        self.code, self.tries = str(seed), 0
        return Door(text=f"A vault of {len(self.code)} digits.{hint}", reward=5.0)

    def step(self, action, timeout_s=None, **kw):
        if action.digit == 9:
            raise ValueError("The dial has no 9.")
        right = action.digit == int(self.code[self.tries % len(self.code)])
        self.tries += 1
        done = right and self.tries == len(self.code)
        return Door(
            text="It opens." if done else "Nothing.", reward=0.5 if right else None, done=done
        )

    @property
    def state(self):
        return State(step_count=self.tries)


class Counter(MCPEnvironment):
    """Counts up to the seed by a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("counter")

        @server.tool
        def add(n: int) -> str:
            """Adds to the count."""
            self.count += n
            return f"{self.count} of {self.seed}"

        @server.tool
        def ask(word: str) -> dict:
            """Says what a word means."""
            if word == "nothing":
                raise ValueError("It means nothing.")
            return {"word": word, "means": "ä"}

        super().__init__(server)
        self.seed = self.count = 0

    def reset(self, seed=0, episode_id=None, **row):
        self.seed, self.count = seed, 0
        return Observation(metadata={"message": f"Count to {seed}.", "episode_id": id(row)})

    async def step_async(self, action, timeout_s=None, **kw):
        seen = await super().step_async(action, timeout_s, **kw)
        if isinstance(seen, CallToolObservation):
            seen.reward, seen.done = 0.25, self.count >= self.seed > 0
        return seen

    def _step_impl(self, action, timeout_s=None, **kw):
        raise ValueError("no such action")

    @property
    def state(self):
        return State(step_count=self.count)


if kind == "vault":
    app = create_app(Vault, Dial, Door, env_name="vault", max_concurrent_envs=sessions)
else:
    app = create_app(Counter, CallToolAction, CallToolObservation, max_concurrent_envs=sessions)
uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
