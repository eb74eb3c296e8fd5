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
from collections.abc import Awaitable, Callable
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
        self.argument = self.bare or "{" + ", ".join(f'"{name}": {_kind(p)}' for name, p in properties.items()) + "}"
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
            lines.append(f"  {name}: {' '.join(p.get('description', _kind(p)).split())}{choices}{optional}")
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
        timer = threading.Timer(self.timeout, settle, [self._late()])
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
                result = asyncio.run(self._awaited(result))
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Fault as e:
            return e
        except BaseException as e:  # also SystemExit: the episode waits for a reply
            return f"{self.name} failed: {type(e).__name__}: {e}"

    async def _awaited(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait([task], timeout=self.timeout)
        return task.result() if done else self._late()  # asyncio.run cancels it

    def _late(self) -> str:
        return f"{self.name} took longer than {self.timeout:g} s"


class TypedFunction(SchemaTool):
    """A function as a tool. Its attributes `timeout` and those named as WORDS replace the tool's.

    Raises Fault, which begins with `where`, if its signature or docstring leaves out what the policy must know.
    """

    def __init__(self, function: Callable[..., Any], where: str):
        super().__init__(schema_of(function, where))
        self.function, self._arguments = function, _reader(function, where)
        for word in (*WORDS, "timeout"):
            setattr(self, word, getattr(function, word, getattr(self, word)))

    def read(self, arguments: str) -> dict[str, Any]:
        from pydantic import ValidationError

        try:
            return dict(self._arguments.validate_json(arguments))
        except ValidationError as e:  # without a link, and without repeating them
            wrong = e.errors(include_url=False, include_context=False, include_input=False)
            raise ValueError("; ".join(": ".join([*map(str, error["loc"]), error["msg"]]) for error in wrong)) from None

    def call(self, arguments: dict[str, Any]) -> Any:
        return self.function(**arguments)


def tools_of(spec: str, where: str) -> list[TypedFunction]:
    """Returns the function that --tools names; raises Fault, which begins with `where`."""
    return [TypedFunction(load(where, spec, "function"), where)]


def schema_of(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Returns name, description and parameters (a JSON schema) of a function; raises Fault."""
    from transformers.utils import get_json_schema  # here: it takes seconds, and few runs have such a tool

    remedy = "a tool has a type for every argument and a docstring that describes each under Args:"
    for p in inspect.signature(function).parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise Fault(f"{where}: its argument {p.name} has no name to call it by; a tool's arguments have names")
    try:
        schema: dict[str, Any] = get_json_schema(function)["function"]
        json.dumps(schema)
    except Exception as e:  # two classes of transformers, and what evaluating an annotation raises
        why = str(e).partition("\n")[0].rstrip("!.")
        raise Fault(f"{where}: {why}; {remedy}") from None
    if not (schema["description"] or "").strip():
        raise Fault(f"{where}: its docstring does not say what it does; {remedy}")
    return schema


def _reader(function: Callable[..., Any], where: str) -> Any:
    """Returns pydantic's reader of a function's arguments: a dictionary of names that it has, each of its type."""
    from pydantic import ConfigDict, TypeAdapter, with_config
    from typing_extensions import NotRequired, TypedDict, get_type_hints  # noqa: UP035 (pydantic takes no older ones)

    hints = get_type_hints(function, include_extras=True)
    given = {
        name: hints[name] if p.default is p.empty else NotRequired[hints[name]]  # type: ignore[valid-type]
        for name, p in inspect.signature(function).parameters.items()
    }
    try:
        arguments = TypedDict("arguments", given)  # type: ignore[misc]
        return TypeAdapter(with_config(ConfigDict(extra="forbid"))(arguments))
    except Exception as e:  # a type that pydantic cannot check
        raise Fault(f"{where}: its arguments cannot be checked ({str(e).partition(chr(10))[0]})") from None


def _kind(schema: dict[str, Any]) -> str:
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
