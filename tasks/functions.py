"""Python functions as tools: `--tools module:function`.

Any function with types and a docstring will do, `async` or not. transformers makes its schema of
both (`get_json_schema`, as of tools in chat templates: Google's format, an `Args:` section without
types); pydantic checks arguments and turns results into JSON. The policy writes the arguments as a
JSON object, or as bare text where the function has one argument and that is text.
"""

import asyncio
import contextlib
import inspect
import json
import re
import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from traceback import TracebackException
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict, get_type_hints  # pydantic takes no older ones

from plumbing.faults import Fault, first_line
from plumbing.outside import clean
from tasks.task import Trajectory
from tasks.tools import WORDS, Failure, Tool

Json = dict[str, Any]  # an object


class Failed(Exception):
    """A call failed; its text is the reply."""


class SchemaTool(Tool):
    """A tool whose arguments have names and types; a subclass has `read_arguments` and `call`.

    `schema`: name, description and parameters (a JSON schema). The five words are made from the
    name.
    """

    timeout: float = 30.0  # seconds a call may take
    tau: Trajectory | None = None  # the episode that it belongs to, where calls change its state
    grace: float = 0.0  # seconds more, for a subclass whose `call` keeps to the timeout itself
    # in a loop of its own: one that blocks or exits affects no other call
    run_async: Callable[[Any], Any] = staticmethod(asyncio.run)

    def __init__(self, schema: Json):
        self.schema, self.name = schema, str(schema["name"])
        properties = schema["parameters"].get("properties", {})
        kinds = [isinstance(p, dict) and p.get("type") for p in properties.values()]
        # the only argument, where that is a text
        self.bare = next(iter(properties)) if kinds == ["string"] else ""
        names = ", ".join(f'"{name}": ...' for name in properties)
        self.argument = self.bare or f"{{{names}}}"
        self.tag = re.sub(r"[^\w-]", "_", self.name)
        self.noun, self.plural = f"a call of {self.name}", f"{self.tag}_calls"
        self.result_tag = "result"

    @abstractmethod
    def read_arguments(self, arguments: str) -> Json:
        """Returns the arguments in a JSON text; ValueError says what is wrong with them."""

    @abstractmethod
    def call(self, arguments: Json) -> Any:
        """Returns the result, or an awaitable of it. An exception becomes a reply, but for a
        Fault."""

    def write_result(self, result: Any) -> str:
        """Returns a result as the policy reads it: a text as it is, anything else as JSON."""
        # arrays and numbers of numpy and torch are no JSON
        adapter = TypeAdapter(Any)
        plain = adapter.dump_python(result, mode="json", fallback=lambda x: x.tolist())
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)

    def explain(self, kind: str, why: str) -> str:
        """Returns what the policy reads of an exception."""
        return f"{self.name} failed: {kind}: {why}"

    def usage(self) -> str:
        about = self.schema["description"]
        parameters = dict(self.schema["parameters"])
        lines = [f"<{self.tag}> {self.argument} </{self.tag}>: {' '.join(about.split())}"]
        for name, p in parameters.pop("properties", {}).items():
            lines.append(f"  {name}: {json.dumps(p, ensure_ascii=False)}")
        return "\n".join([*lines, f"  {json.dumps(parameters, ensure_ascii=False)}"])

    def submit(self, argument: str) -> Future[list[str]]:
        """Returns a Future of the result.

        Wrong arguments, exceptions and calls that take longer than `timeout` become replies, since
        the policy may write anything. A tool's Fault is raised: ToolDown stops the run, which can
        be resumed.
        """
        result: Future[list[str]] = Future()
        late = Failed(f"{self.name} took longer than {self.timeout:g} s")

        def settle(reply: str | Fault | Failed) -> None:
            with contextlib.suppress(InvalidStateError):  # the other one was first
                if isinstance(reply, Fault):
                    result.set_exception(reply)
                else:
                    text = clean(str(reply))
                    if reply is late and self.tau and not result.done():
                        self.tau.stop = "over"  # the call goes on, and another would meet it
                    result.set_result(Failure([text]) if isinstance(reply, Failed) else [text])

        # Daemons, so that a call that hangs does not keep the program from ending.
        timer = threading.Timer(self.timeout + self.grace, settle, [late])
        timer.daemon = True
        result.add_done_callback(lambda _: timer.cancel())
        timer.start()
        threading.Thread(target=lambda: settle(self._answer(argument)), daemon=True).start()
        return result

    def _answer(self, argument: str) -> str | Fault | Failed:
        if self.bare and argument and not argument.startswith("{"):
            argument = json.dumps({self.bare: argument})
        try:
            arguments = self.read_arguments(argument or "{}")
        except Exception as e:  # the policy may write anything
            return f"wrong arguments of {self.name}: {e}"
        try:
            result = self.call(arguments)
            if inspect.isawaitable(result):
                # cancels it, once it is answered
                result = self.run_async(asyncio.wait_for(result, self.timeout + 1))
            return self.write_result(result)
        except (Fault, Failed) as e:
            return e
        except BaseException as e:  # also SystemExit: the episode waits for a reply
            return Failed(self.explain(type(e).__name__, str(TracebackException(type(e), e, None))))


class TypedFunction(SchemaTool):
    """A function as a tool. Its attributes `timeout` and those named as WORDS replace the tool's.

    Raises Fault, which begins with `where`, if its signature or docstring leaves out what the
    policy must know.
    """

    def __init__(self, function: Callable[..., Any], where: str):
        if not hasattr(function, "__name__"):  # a partial, an object
            raise Fault(f"{where}: it is not a function; write one with `def`")
        # here: it takes seconds, and few runs have such a tool
        from transformers.utils import get_json_schema

        try:
            schema = get_json_schema(function)["function"]
            self.function, self._arguments = function, _make_reader(function)
        except Exception as e:  # of either, and what evaluating an annotation raises
            raise Fault(f"{where}: {first_line(e)}") from None
        schema.pop("return", None)
        super().__init__(schema)
        for word in (*WORDS, "timeout"):
            setattr(self, word, getattr(function, word, getattr(self, word)))

    def read_arguments(self, arguments: str) -> Json:
        try:
            return dict(self._arguments.validate_json(arguments))
        except ValidationError as e:  # without a link, and without repeating them
            raise ValueError(
                "; ".join(": ".join([*map(str, x["loc"]), x["msg"]]) for x in e.errors())
            ) from None

    def call(self, arguments: Json) -> Any:
        return self.function(**arguments)


def _make_reader(function: Callable[..., Any]) -> Any:
    """Returns pydantic's reader of a function's arguments: a dictionary of names that it has, each
    of its type."""
    hints, types = get_type_hints(function, include_extras=True), {}
    for name, p in inspect.signature(function).parameters.items():
        types[name] = hints[name] if p.default is p.empty else NotRequired[hints[name]]
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(TypedDict("arguments", types)))  # type: ignore[operator]
