"""Python functions as tools: `--tools module:function`.

Any function with types and a docstring will do, `async` or not. Its schema comes from both, as transformers reads them
for chat templates (`get_json_schema`: Google's format, an `Args:` section). The policy writes the arguments as a JSON
object, or as bare text where the function has one argument and that is text; pydantic checks them.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from plumbing.faults import Fault
from plumbing.outside import clean
from tasks.tools import WORDS, Tool

TIMEOUT = 30.0  # seconds a call may take, unless the function has an attribute `timeout`
MAX_RESULT = 100_000  # characters of a result that are read and kept


class SchemaTool(Tool):
    """A tool whose arguments have names and types; a subclass has `read` and `call`.

    `schema`: name, description and parameters (a JSON schema). `words` replace those of WORDS that its name makes.
    """

    def __init__(self, schema: dict[str, Any], timeout: float = TIMEOUT, words: dict[str, str] | None = None):
        self.schema, self.timeout, self.name = schema, timeout, str(schema["name"])
        properties = schema["parameters"].get("properties", {})
        self.bare = next(iter(properties)) if [p.get("type") for p in properties.values()] == ["string"] else ""
        argument = self.bare or "{" + ", ".join(f'"{name}": {_kind(p)}' for name, p in properties.items()) + "}"
        tag = re.sub(r"[^\w-]", "_", self.name)
        made = (tag, f"a call of {self.name}", argument, f"{tag}_calls", "result")
        for word, default in zip(WORDS, made, strict=True):
            setattr(self, word, (words or {}).get(word, default))

    @abstractmethod
    def read(self, argument: str) -> dict[str, Any]:
        """Returns the arguments that the policy has written; ValueError says what is wrong with them."""

    @abstractmethod
    async def call(self, arguments: dict[str, Any]) -> Any:
        """Returns the result. An exception becomes a reply, but for a Fault."""

    def usage(self) -> str:
        """Returns how the policy calls this tool, for its prompt."""
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
        try:
            found = self.read(argument)
        except ValueError as e:
            done: Future[list[str]] = Future()
            done.set_result([f"wrong arguments of {self.name}: {e}"])
            return done
        return asyncio.run_coroutine_threadsafe(self._answer(found), loop())

    async def _answer(self, arguments: dict[str, Any]) -> list[str]:
        """Returns the result of one call, cut to MAX_RESULT characters. Raises Fault."""
        work = asyncio.ensure_future(self.call(arguments))
        done, _ = await asyncio.wait([work], timeout=self.timeout)
        if not done:
            work.cancel()  # a thread goes on, and nobody reads what it returns
            return [f"{self.name} took longer than {self.timeout:g} s"]
        try:
            result = work.result()
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Fault:
            raise
        except (Exception, asyncio.CancelledError) as e:
            text = f"{self.name} failed: {type(e).__name__}: {e}"
        return [clean(text[:MAX_RESULT])]


class TypedFunction(SchemaTool):
    """A function as a tool. Attributes of the function named as WORDS replace the words that are made of its name.

    Raises Fault, which begins with `where`, if its signature or docstring leaves out what the policy must know.
    """

    def __init__(self, function: Callable[..., Any], where: str):
        self.function = function
        words = {word: getattr(function, word) for word in WORDS if hasattr(function, word)}
        super().__init__(schema_of(function, where), float(getattr(function, "timeout", TIMEOUT)), words)
        self._arguments = _reader(function, where)

    def of(self, episode: object) -> TypedFunction:
        """Returns this tool as the method of that name of another object."""
        bound = copy.copy(self)
        bound.function = getattr(episode, self.name)
        return bound

    def read(self, argument: str) -> dict[str, Any]:
        try:
            if self.bare:
                return dict(self._arguments.validate_python({self.bare: argument}))
            return dict(self._arguments.validate_json(argument or "{}"))
        except ValueError as e:  # pydantic's
            raise ValueError(_wrong(e)) from None

    async def call(self, arguments: dict[str, Any]) -> Any:
        return await _called(self.function, arguments)


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


def _wrong(error: Any) -> str:
    """Returns what pydantic found wrong with arguments, without a link and without repeating them."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in found)


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process's calls, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Returns what a function returns. One that is not `async` gets a thread, so that it keeps nobody waiting; a
    daemon, so that a call that hangs does not keep the program from ending."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if not answer.done():  # cancelled: it took too long
            answer.set_result((result, error))

    def call() -> None:
        try:
            result, error = function(**arguments), None
        except BaseException as e:  # also SystemExit: whoever waits must be answered
            result, error = None, e
        loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=call, daemon=True).start()
    result, error = await answer
    if error:
        raise error if isinstance(error, Exception) else RuntimeError(repr(error))
    return await result if isinstance(result, Coroutine) else result


def equipped(kind: type[Any], functions: Sequence[SchemaTool]) -> type[Any]:
    """Returns a task that can also call these functions."""

    class Equipped(kind):  # type: ignore[misc]
        @property
        def tools(self) -> Sequence[Tool]:
            own: Sequence[Tool] = self.__dict__.get("tools", getattr(kind, "tools", ()))
            return (*own, *functions)

        @tools.setter
        def tools(self, own: Sequence[Tool]) -> None:
            self.__dict__["tools"] = own  # a task sets its tools when it likes

        def reset(self, question: Any) -> Sequence[Tool]:
            own = super().reset(question)
            return (*own, *(tool for tool in functions if tool not in own))  # by default it returns `tools`

    Equipped.__name__, Equipped.__qualname__, Equipped.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Equipped
