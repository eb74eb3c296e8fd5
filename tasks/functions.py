"""Python functions as tools: `--tools module:function`.

Any function with types and a docstring will do, `async` or not. Its schema comes from both, as transformers reads them
for chat templates (`get_json_schema`: Google's format, an `Args:` section). The policy writes the arguments as a JSON
object, or as bare text where the function has one argument and that is text; pydantic checks them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from plumbing.faults import Fault
from plumbing.outside import clean
from tasks import load
from tasks.tools import WORDS, Tool

MAX_RESULT = 100_000  # characters of a result that are read and kept


class SchemaTool(Tool):
    """A tool whose arguments have names and types; a subclass has `read` and `call`.

    `schema`: name, description and parameters (a JSON schema). The five words are made of the name.
    """

    timeout: float = 30.0  # seconds a call may take

    def __init__(self, schema: dict[str, Any]):
        self.schema, self.name = schema, str(schema["name"])
        properties = schema["parameters"].get("properties", {})
        self.bare = next(iter(properties)) if [p.get("type") for p in properties.values()] == ["string"] else ""
        types = ", ".join(f'"{name}": {_name_type(p)}' for name, p in properties.items())
        self.argument = self.bare or f"{{{types}}}"
        self.tag = re.sub(r"[^\w-]", "_", self.name)
        self.noun, self.plural, self.result_tag = f"a call of {self.name}", f"{self.tag}_calls", "result"

    @abstractmethod
    def read(self, arguments: str) -> dict[str, Any]:
        """Returns the arguments in a JSON text; ValueError says what is wrong with them."""

    @abstractmethod
    def call(self, arguments: dict[str, Any]) -> Any:
        """Returns the result, or an awaitable of it. An exception becomes a reply, but for a Fault."""

    def usage(self) -> str:
        about, parameters = self.schema["description"], self.schema["parameters"]
        lines = [f"<{self.tag}> {self.argument} </{self.tag}>: {' '.join(about.split())}"]
        for name, p in parameters.get("properties", {}).items():
            choices = f"; one of {', '.join(map(json.dumps, p['enum']))}" if "enum" in p else ""
            optional = "" if name in parameters.get("required", ()) else "; may be left out"
            lines.append(f"  {name}: {' '.join(p.get('description', _name_type(p)).split())}{choices}{optional}")
        return "\n".join(lines)

    def submit(self, argument: str) -> Future[list[str]]:
        """Returns a Future of the result: a text as it is, anything else as JSON.

        Wrong arguments, exceptions and calls that take longer than `timeout` become replies, since the policy may write
        anything. A Fault of the tool's is raised: ToolDown stops the run, which can be resumed.
        """
        result: Future[list[str]] = Future()

        def settle(reply: str | Fault) -> None:
            with contextlib.suppress(InvalidStateError):  # the other one was first
                if isinstance(reply, Fault):
                    result.set_exception(reply)
                else:
                    result.set_result([clean(reply[:MAX_RESULT])])

        # Daemons, so that a call that hangs does not keep the program from ending.
        timer = threading.Timer(self.timeout, settle, [f"{self.name} took longer than {self.timeout:g} s"])
        timer.daemon = True
        result.add_done_callback(lambda _: timer.cancel())
        timer.start()
        threading.Thread(target=lambda: settle(self._answer(argument)), daemon=True).start()
        return result

    def _answer(self, argument: str) -> str | Fault:
        try:
            arguments = self.read(json.dumps({self.bare: argument}) if self.bare else argument or "{}")
        except Exception as e:  # the policy may write anything
            return f"wrong arguments of {self.name}: {e}"
        try:
            result = self.call(arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(asyncio.wait_for(result, self.timeout + 1))  # cancels it, once it is answered
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Fault as e:
            return e
        except BaseException as e:  # also SystemExit: the episode waits for a reply
            return f"{self.name} failed: {type(e).__name__}: {e}"


class TypedFunction(SchemaTool):
    """A function as a tool. Its attributes `timeout` and those named as WORDS replace the tool's.

    Raises Fault, which begins with `where`, if its signature or docstring leaves out what the policy must know.
    """

    def __init__(self, function: Callable[..., Any], where: str):
        from transformers.utils import get_json_schema  # here: it takes seconds, and few runs have such a tool

        try:
            super().__init__(get_json_schema(function)["function"])
            self.function, self._arguments = function, _make_reader(function)
            if not (self.schema["description"] or "").strip():
                raise TypeError("its docstring does not say what it does")
        except Exception as e:  # of transformers, of pydantic, and what evaluating an annotation raises
            why = str(e).partition("\n")[0].rstrip("!.")
            remedy = "a tool has a type for every argument and a docstring that describes each under Args:"
            raise Fault(f"{where}: {why}; {remedy}") from None
        for word in (*WORDS, "timeout"):
            setattr(self, word, getattr(function, word, getattr(self, word)))

    def read(self, arguments: str) -> dict[str, Any]:
        from pydantic import ValidationError

        try:
            return dict(self._arguments.validate_json(arguments))
        except ValidationError as e:  # without a link, and without repeating them
            errors = e.errors(include_url=False, include_context=False, include_input=False)
            raise ValueError("; ".join(": ".join([*map(str, x["loc"]), x["msg"]]) for x in errors)) from None

    def call(self, arguments: dict[str, Any]) -> Any:
        return self.function(**arguments)


def load_tools(spec: str, where: str) -> list[TypedFunction]:
    """Returns the function that --tools names; raises Fault, which begins with `where`."""
    return [TypedFunction(load(where, spec, "function"), where)]


def _make_reader(function: Callable[..., Any]) -> Any:
    """Returns pydantic's reader of a function's arguments: a dictionary of names that it has, each of its type."""
    from pydantic import ConfigDict, TypeAdapter, with_config
    from typing_extensions import NotRequired, TypedDict, get_type_hints  # noqa: UP035 (pydantic takes no older ones)

    hints, fields = get_type_hints(function, include_extras=True), {}
    for name, p in inspect.signature(function).parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise TypeError(f"its argument {name} has no name to call it by")
        fields[name] = hints[name] if p.default is p.empty else NotRequired[hints[name]]
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(TypedDict("arguments", fields)))  # type: ignore[operator]


def _name_type(schema: dict[str, Any]) -> str:
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
