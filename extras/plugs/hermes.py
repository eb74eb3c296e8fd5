"""`--format hermes`: calls in `<tool_call>`, as JSON or as Qwen 3.5's XML, schemas and results where
the model's own chat template has them.

The instruction is the system message, the question the user's. A turn ends with one of `turn_ends`.
What has been sampled is never rendered again: its ids stay, and those that follow come from a dummy
conversation, rendered once for each template.

With `--format hermes_tools` the descriptions of the tools evolve, too: an instruction then ends
with `<tool_NAME>what it does</tool_NAME>` for each, and the optimizer, which is asked to keep tags,
revises both in one text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from plumbing.chat import rendered, template_of, turn_ends
from plumbing.client import without_thoughts
from plumbing.faults import Fault
from plumbing.outside import clean, escape_markup, match_markup
from tasks.functions import SchemaTool
from tasks.search_qa import SEARCH_R1
from tasks.tools import (
    ANSWER,
    TOKEN_CHARACTERS,
    Action,
    Tags,
    Tool,
    encode,
    find_answer,
    find_lost_tag,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from tasks import Message, Question, Task

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.S)
PARAMETER = re.compile(r"<parameter=([^<>]+)>\n?((?:(?!</?parameter).)*?)\n?</parameter>\s*", re.S)
XML = re.compile(rf"\s*<function=([^<>]+)>\s*((?:{PARAMETER.pattern})*)</function>\s*", re.S)
OURS = ("tool_call", "tool_response")  # such tags are no section
NAME = r"tool_(?!(?:call|response)>)([\w-]+)"
SECTION = re.compile(rf"<{NAME}>((?:(?!</?tool_[\w-]+>).)*)</tool_\1>", re.S)  # tag, description
MARK = re.compile(rf"</?{NAME}>")
END = re.compile(r"\n\Z")
IN_TEMPLATE = SEARCH_R1.replace(
    "call a search engine by <search> query </search>", "call the search tool"
).replace(" between <information> and </information>", "")
REMEDY = "take --format tags, or a model whose template calls tools so (Qwen, Hermes)"
# of the dummy conversation
ASKED: dict[str, Any] = {"role": "user", "content": "What is it?"}
RESULT = 'a "result"\n<b> é'  # with what a template could escape


class Hermes(Tags):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` calls, or the XML that the chat
    template asks for; a turn that calls nothing is the answer."""

    evolves_tools = False  # whether an instruction ends with the tools' descriptions
    opened = ""  # <think> where the template writes it
    begin, end, form = "", "", "JSON"

    def __init__(self, task: Task, tokenizer: Tokenizer | None = None):
        """Raises Fault, in one line, where the tokenizer's chat template cannot do this."""
        super().__init__(task, tokenizer)
        if not tokenizer:
            return
        self.ends = tokenizer.convert_ids_to_tokens(turn_ends(tokenizer))
        self.pattern = match_markup(tokenizer, self.reserved_tags())
        self.opened = "<think>" * rendered(tokenizer, [ASKED]).rstrip().endswith("<think>")
        for function in self.template_options("")["tools"] or ():
            check_printed(tokenizer, function)
        if task.tools:
            self.begin, self.end, self.form = frame(tokenizer)

    def stop_strings(self) -> tuple[str, ...]:
        return ()

    def reserved_tags(self) -> tuple[str, ...]:
        return "think", ANSWER, *OURS

    def adapt_instruction(self, instruction: str) -> str:
        """Says the paper's instruction without tags. With --format hermes_tools the tools'
        descriptions follow."""
        task = self.task
        if instruction == SEARCH_R1:
            instruction = IN_TEMPLATE
        where = (
            f"--instruction {task.cfg.instruction}"
            if task.cfg.instruction
            else f"--task {task.cfg.task}"
        )
        for tool in task.tools:
            if f"<{tool.tag}>" in instruction:
                raise Fault(
                    f"{where}: its instruction calls with <{tool.tag}>, which is --format tags; say it in words"
                )
        if not self.evolves_tools:
            return instruction
        if not task.tools:
            raise Fault(
                f"--format hermes_tools: the task has no tools (--tools {task.cfg.tools}); take hermes"
            )
        if not SECTION.search(instruction):
            described = [
                f"<tool_{tool.tag}>{schema_of(tool)['description']}</tool_{tool.tag}>"
                for tool in task.tools
            ]
            instruction = "\n".join([f"{instruction}\n", *described])
        if reason := malformed(instruction, task.tools):
            raise Fault(f"{where}: its instruction {reason}; fix it, or take --format hermes")
        return instruction

    def find_unfit(self, candidate: str, parent: str) -> str:
        if "<tool_response>" in candidate and "<tool_response>" not in parent:
            return "holds a result of its own"
        reason = malformed(candidate, self.task.tools) if self.evolves_tools else ""
        return reason or find_lost_tag(candidate, parent, [ANSWER])

    def messages(self, instruction: str, question: Question) -> list[Message]:
        """Returns the instruction as the system's message, and what the task asks without one."""
        messages = [
            {**message, "content": message["content"].strip()}
            for message in self.task.prompt("", question)
        ]
        rules = [message["content"] for message in messages if message["role"] == "system"]
        system = "\n\n".join(filter(None, [without_sections(instruction), *rules]))
        others = [
            message for message in messages if message["role"] != "system" and message["content"]
        ]
        return [{"role": "system", "content": system}, *others]

    def template_options(self, instruction: str) -> Mapping[str, Any]:
        """Returns the tools' schemas, with the descriptions that the instruction has of them."""
        descriptions = dict(SECTION.findall(instruction))
        tools = self.task.tools
        schemas = [schema_of(tool, descriptions.get(tool.tag, "").strip()) for tool in tools]
        return {"tools": [{"type": "function", "function": schema} for schema in schemas] or None}

    def parse_turn(self, text: str, ended: bool = True) -> Action:
        """Returns what the text of a turn says. Of several calls the first counts; a call counts
        before an answer.

        The answer is what `<answer>` holds, or else all of a turn that has ended, but for its
        thoughts.
        """
        body = without_thoughts(f"{self.opened}{text}\n", END)
        if calls := CALL.findall(body):
            try:
                tool, argument = call_of(calls[0], self.task.tools, self.form)
            except ValueError as e:
                return Action(text, ended=ended, note=f"This call cannot be served: {e}.")
            more = f"Of your {len(calls)} calls the first is served: write one at a time.\n" * (
                len(calls) > 1
            )
            return Action(text, None, tool, argument, ended, more)
        answer = find_answer(body)
        if answer is None and ended:
            answer = body.strip() or None
        why = "was empty" if ended else "was cut off before it ended"
        note = (
            f"Your turn {why}. Call a tool, or write the answer inside <{ANSWER}> and </{ANSWER}>."
        )
        return Action(text, answer, ended=ended, note="" if answer is not None else note)

    def read_turn(self, ids: Sequence[int]) -> Action:
        ended = bool(ids) and ids[-1] in turn_ends(self.tokenizer)
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        return self.parse_turn(text, ended)

    def encode_result(self, action: Action, result: list[str], limit: int) -> list[int]:
        assert action.tool
        return self._message(
            action, action.tool.show([escape_markup(text, self.pattern) for text in result]), limit
        )

    def encode_reminder(self, action: Action) -> list[int]:
        return self._message(action, "", TOKEN_CHARACTERS * len(action.note))

    def _message(self, action: Action, text: str, limit: int) -> list[int]:
        """Returns the ids of the tool's message, `limit` at most, and of what opens the next
        turn."""
        begin = ("" if action.ended else self.ends[0]) + self.begin
        note = escape_markup(action.note, match_markup(self.tokenizer, OURS))  # it names <answer>
        shown = note + text[: limit * TOKEN_CHARACTERS]
        ids = encode(self.tokenizer, begin + shown + self.end)
        if len(ids) <= limit:
            return ids
        head, first, last = (
            encode(self.tokenizer, part) for part in (begin + shown, begin, self.end)
        )
        return head[: max(len(first), limit - len(last))] + last

    def decode_response(self, ids: Sequence[int]) -> str:
        """Returns a text without the template's control tokens, whoever reads it: results are in
        <tool_response>."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        for end in self.ends:
            text = text.removesuffix(end).replace(end + self.begin, "\n<tool_response>\n")
        return text.replace(self.end, "\n</tool_response>\n") if self.end.strip() else text


# ---- turns


def call_of(text: str, tools: Sequence[Tool], form: str) -> tuple[Tool, str]:
    """Returns the tool that a call in JSON or XML names, and its argument; a ValueError says what
    is wrong with it, or the `form` that the template's calls have."""
    named = {tool.tag: tool for tool in tools}
    try:
        if xml := XML.fullmatch(text):
            name, arguments = xml[1], dict(PARAMETER.findall(xml[2]))
        else:
            call = json.loads(text)
            name, arguments = call["name"], call["arguments"]
            if isinstance(arguments, str):  # Granite 4 writes their JSON text
                arguments = json.loads(arguments or "{}")
        tool, arguments = named.get(name), dict(arguments)
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"it is not of the form {form}") from None
    if not tool:
        raise ValueError(
            f"there is no tool {str(name)[:40]!r}; there are {', '.join(named) or 'none'}"
        )
    if isinstance(tool, SchemaTool):  # it looks at them
        properties = tool.schema["parameters"].get("properties", {})
        for key, value in arguments.items():
            # XML has no types: the schema says what is a text
            if xml and properties.get(key, {}).get("type") != "string":
                with suppress(ValueError):
                    arguments[key] = json.loads(value)
        return tool, clean(json.dumps(arguments, ensure_ascii=False))
    key = tool.argument
    if list(arguments) != [key] or not isinstance(arguments[key], str):
        raise ValueError(f'the arguments of {name} are {{"{key}": a text}}')
    return tool, clean(arguments[key].strip())


# ---- schemas


def schema_of(tool: Tool, description: str = "") -> dict[str, Any]:
    """Returns name, description and parameters (a JSON schema) of a tool; `description`, if there
    is one, replaces its own. A tool without a schema has one text as its argument."""
    if isinstance(tool, SchemaTool):
        own = tool.schema | {"name": tool.tag}
        return own | ({"description": description} if description else {})
    parameter = {"type": "string", "description": f"The {tool.argument}"}
    parameters = {
        "type": "object",
        "properties": {tool.argument: parameter},
        "required": [tool.argument],
    }
    about = description or tool.description or f"Makes {tool.noun}."
    return {"name": tool.tag, "description": about, "parameters": parameters}


def without_sections(instruction: str) -> str:
    return SECTION.sub("", instruction).strip()


def malformed(instruction: str, tools: Sequence[Tool]) -> str:
    """Returns why an instruction does not end with one section per tool; "" if it does."""
    tags = [tool.tag for tool in tools]
    described = [tag for tag, text in SECTION.findall(instruction) if text.strip()]
    if sorted(described) != sorted(tags):
        return f"describes {', '.join(described) or 'no tool'} in sections <tool_...>, not {', '.join(tags)}"
    rest = without_sections(instruction)
    stray = MARK.search(rest)
    if stray:
        return f"has {stray[0]} without its other half"
    if not rest or not instruction.strip().startswith(rest):
        return "does not end with its tools' descriptions, after what it says"
    return ""


# ---- templates


@functools.lru_cache(maxsize=16)
def frame(tokenizer: Tokenizer) -> tuple[str, str, str]:
    """Returns what the chat template writes between the end of a turn and a tool's result, and
    after that, up to the next turn; and a call.

    Raises Fault unless the template writes a call as `read_turn` reads it, ends it as
    `turn_ends` says, keeps the tool's message after it whole, and leaves what precedes a turn as it
    was.
    """
    eos = str(tokenizer.convert_ids_to_tokens(turn_ends(tokenizer)[0]))
    tool: Any = SimpleNamespace(tag="tool_name", argument="argument", description="Looks it up.")
    function = {"type": "function", "function": schema_of(tool)}
    call = {"type": "function", "function": {"name": tool.tag, "arguments": {"argument": "value"}}}
    asked = [{"role": "system", "content": "Answer."}, ASKED]
    acted: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    called = [acted, {"role": "tool", "content": RESULT}]
    prompt, one, two = (
        rendered(tokenizer, [*asked, *called * n], tools=[function]) for n in range(3)
    )
    changes = f"changes what it wrote before when a conversation goes on; {REMEDY}"
    turn, ends, rest = one.removeprefix(prompt).partition(eos)
    begin, _, end = rest.partition(RESULT)
    form, written = "".join(CALL.findall(turn)).strip(), None
    with suppress(ValueError):
        written = call_of(form, [tool], "")
    checks = [
        (one.startswith(prompt), changes),
        (written == (tool, "value"),
         f"writes a call as {turn[:80]!r}, not as JSON or <function=...> in <tool_call>; {REMEDY}"),
        (ends, f"ends a turn otherwise, and the tokenizer's EOS is {eos}; take the chat version of the model"
         " (-Instruct), or fix eos_token in its tokenizer_config.json"),
        (rest.count(RESULT) == 1, f"drops or changes a tool's message; {REMEDY}"),
        (two == f"{one}{turn}{eos}{rest}", changes),
    ]  # fmt: skip
    for right, why in checks:
        if not right:
            raise Fault(f"{template_of(tokenizer)} {why}")
    return begin, end, form


def check_printed(tokenizer: Tokenizer, function: Mapping[str, Any]) -> None:
    """Raises Fault unless the chat template prints a tool's schema."""
    schema = function["function"]
    try:
        text = rendered(tokenizer, [ASKED], tools=[function])
    except Fault as e:
        raise Fault(
            f"--format hermes: the schema of the tool {schema['name']} cannot be printed: {e}"
        ) from None
    parts = [schema["name"], schema["description"], *schema["parameters"].get("properties", {})]
    for part in parts:
        if part.strip() not in text and not any(
            json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True)
        ):
            raise Fault(
                f"{template_of(tokenizer)} prints no {part[:40]!r} of the tool {schema['name']}; {REMEDY}"
            )


class HermesTools(Hermes):
    """The same, and the tools' descriptions evolve with the instruction."""

    evolves_tools = True
