"""`--task openenv:URL`: the environment of an OpenEnv server, a WebSocket an episode at a time.

The tools are the environment's MCP tools, or else one, `step`, whose arguments are its action. The
reward is the sum of the steps' rewards, and `done` ends an episode.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import time
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace
from typing import Any, ClassVar

from extras.plugs.environment import EnvironmentTask, close
from extras.plugs.mcp import RETRIES, CheckedTool, back_off, choose_fitting, make_tools
from plumbing.client import Client
from plumbing.faults import Fault, ToolDown, first_line
from plumbing.outside import join_url, without_secrets
from plumbing.stop import count_ranks
from tasks import Question, Trajectory
from tasks.functions import Failed
from tasks.tools import Tool

PATIENCE = 60.0  # seconds for a reply
SESSIONS = 256  # at most, of one run
REFUSED = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")  # errors that end a session


class Session:
    """A session on the server at `url`, which plays one episode after another.

    Its methods raise ConnectionError when it is lost or refused, and Failed with the server's error
    where there is one.
    """

    url: ClassVar[str]

    def __init__(self) -> None:
        from websockets.sync.client import connect

        self.total, self.done, self.connection = 0.0, False, contextlib.ExitStack()
        try:
            address = "ws" + join_url(self.url, "/ws").removeprefix("http")
            opening = connect(address, open_timeout=10, max_size=1 << 26)
            self.socket = self.connection.enter_context(opening)
        except Exception as e:  # of the network, of HTTP, of the handshake
            raise ConnectionError(first_line(e)) from None
        with contextlib.suppress(Failed):
            self.ask("state")

    def ask(self, kind: str, **data: Any) -> Any:
        """Returns the data of the server's reply to a message."""
        from websockets.exceptions import ConnectionClosed

        try:
            with contextlib.suppress(ConnectionClosed):  # why it was can still be read
                self.socket.send(json.dumps({"type": kind} | data))
            reply = json.loads(self.socket.recv(PATIENCE))
            answer = reply["data"]
            error = answer["message"] if reply["type"] == "error" else ""
            lost = error and answer["code"] in REFUSED
        except (ConnectionClosed, OSError) as e:
            self.close()  # a late reply would be taken for that of the next message
            raise ConnectionError(first_line(e)) from None
        except (LookupError, TypeError, ValueError):
            raise ConnectionError("its replies are not OpenEnv's") from None
        if error:
            raise ConnectionError(error) if lost else Failed(error)
        return answer

    def reset(self, seed: int | None = None, **row: Any) -> str:
        self.total, self.done = 0.0, False
        given = row if seed is None else row | {"seed": seed}
        return text_of(self.ask("reset", data=given)["observation"])

    def step(self, action: dict[str, Any]) -> str:
        answer = self.ask("step", data=action)
        self.total += float(answer.get("reward") or 0)
        self.done = bool(answer.get("done"))
        return text_of(answer["observation"])

    def get_reward(self) -> float:
        return self.total

    def close(self) -> None:
        self.connection.close()


def text_of(observation: Any) -> str:
    """Returns what the policy reads of an observation; raises Failed where a tool has failed.

    That is an MCP tool's result, or else what fields say, as text where it is one text; `metadata`
    only where no other does.
    """
    if not isinstance(observation, dict):
        observation = {"text": observation}
    if isinstance(error := observation.get("error"), dict):
        raise Failed(str(error.get("message")))
    if "tool_name" in observation:
        result = observation["result"]
        if isinstance(result, dict) and "content" in result:  # as fastmcp has it
            texts = [part["text"] for part in result["content"] if "text" in part]
            result = "\n".join(texts) if texts else result.get("data")
        fields = {"result": result}
    else:
        said = {name: x for name, x in observation.items() if x not in (None, "", [], {})}
        about = said.pop("metadata", {})
        fields = said or {name: x for name, x in about.items() if name != "episode_id"}
    values = list(fields.values()) or [""]
    one = len(values) == 1 and isinstance(values[0], str)
    return values[0] if one else json.dumps(fields, ensure_ascii=False)


class Step(CheckedTool):
    """A tool of the environment, and in an episode that of its session."""

    def bind(self, tau: Trajectory) -> Step:
        bound = copy.copy(self)
        bound.tau = tau
        return bound

    def call(self, arguments: dict[str, Any]) -> str:
        """Makes a step; the episode is over when the environment, or the connection, is."""
        assert self.tau
        session: Session = self.tau.state
        try:
            return session.step(self.action(arguments))
        except ConnectionError as e:
            session.done = True
            raise Failed(f"the environment is gone ({e})") from None
        finally:
            if session.done:
                self.tau.stop = "over"

    def action(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments


class Call(Step):
    """An MCP tool."""

    def action(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "call_tool", "tool_name": self.name, "arguments": arguments}


class OpenEnvTask(EnvironmentTask):
    """Plays as many episodes at once as the server allows sessions."""

    unmade = "no OpenEnv environment answers there"

    def offer(self, episode: Session) -> Sequence[Tool]:
        where = without_secrets(f"--task {self.cfg.task}")
        with contextlib.suppress(Failed, LookupError):
            listed = episode.ask("step", data={"type": "list_tools"})["observation"]["tools"]
            if listed:
                tools = make_tools(Call, where, [SimpleNamespace(**tool) for tool in listed])
                return choose_fitting(where, [], tools)
        client = Client(episode.url, 10, 0)
        action = client.ask("/schema", None, lambda answer: dict(answer["action"]))
        action.setdefault("properties", {}).pop("metadata", None)
        about = action.get("description") or "Makes a step in the environment."
        return [Step(where, "step", about, action)]

    def start(self, serve: Callable[..., str]) -> str:
        """Opens as many sessions as are needed and allowed, and keeps this rank's share of them."""
        wanted = min(self.cfg.batch * self.cfg.G, SESSIONS)
        with ThreadPool(32) as pool:
            self.idle += filter(None, pool.imap(self.open, range(wanted - len(self.idle))))
        self.connect(self.address())
        close(self.idle[self.at_once :])
        del self.idle[self.at_once :]
        more = "; it allows no more (its max_concurrent_envs)" * (self.at_once < wanted)
        return f"{super().start(serve)}\nepisodes at once: {self.at_once}{more}"

    def open(self, _: int) -> Session | None:
        with contextlib.suppress(ConnectionError):
            return self.environments[""]()  # type: ignore[no-any-return]
        return None

    def address(self) -> int:
        return len(self.idle)

    def connect(self, address: int) -> None:
        self.at_once = max(1, address // count_ranks())

    def reset(self, question: Question) -> Any:
        """Begins an episode, over a new connection where those at hand are lost. Raises ToolDown."""
        where = without_secrets(f"--task {self.cfg.task}")
        for round in range(RETRIES + 1):
            time.sleep(back_off(round) if round else 0)
            try:
                return super().reset(question)
            except ConnectionError as e:
                why = e
                close(self.idle)
                self.idle.clear()
            except Failed as e:
                raise Fault(f"{where}: question {question.id} cannot begin ({e})") from None
        raise ToolDown(f"{where}: the environment does not answer ({why})")


def task_of(url: str) -> type[OpenEnvTask]:
    """Returns the task of the server at a URL."""
    gc.collect()  # the sessions of an earlier run, which cycles keep
    environment = type("Environment", (Session,), {"url": url})
    return type(
        "OpenEnv", (OpenEnvTask,), {"environments": {"": environment}, "__module__": __name__}
    )
