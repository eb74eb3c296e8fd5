"""How calls, answers and results are written, between texts that a task knows and ids that the
policy reads and writes.

`Tags` is the paper's (§2.1, App. F). Another one that `--format` names is a subclass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from plumbing.chat import apply_template
from plumbing.outside import escape_markup, map_texts, match_markup
from tasks.tools import ANSWER, Tool, explain_invalid_action, find_answer

if TYPE_CHECKING:
    from tasks import Message, Question, Task

# tokens of readable text are shorter: a longer result is cut before it is tokenized
TOKEN_CHARACTERS = 128


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text, without the special tokens that a tokenizer puts around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_conversation(tokenizer: Any, messages: Sequence[Message], **options: Any) -> list[int]:
    """Returns the ids of messages in the chat template, up to where the policy's turn begins.

    `options`: what else the template is given. No text in either can spell a control token.
    """
    escape = partial(escape_markup, pattern=match_markup(tokenizer, simple=True))
    messages = [message | {"content": escape(message["content"])} for message in messages]
    options = map_texts(options, escape)
    return encode(tokenizer, apply_template(tokenizer, messages, **options))


def find_lost_tag(candidate: str, parent: str, names: Sequence[str]) -> str:
    """Returns which tag of these names a candidate instruction lacks and its parent has, as a
    reason; "" if none."""
    for name in names:
        for tag in (f"<{name}>", f"</{name}>"):
            if tag in parent and tag not in candidate:
                return f"lost {tag}"
    return ""


@dataclass(frozen=True)
class Action:
    """What a turn does: it answers, calls a tool, or neither."""

    text: str
    answer: str | None = None
    tool: Tool | None = None
    argument: str = ""
    ended: bool = True  # it ended as a turn does; False: it was cut off
    note: str = ""  # what the policy is told about it, besides a result


class Tags:
    """`<search> query </search>` calls, `<information>...</information>` returns, `<answer> it
    </answer>` ends.

    A subclass is another format. What takes or returns ids needs the policy's tokenizer.
    """

    def __init__(self, task: Task, tokenizer: Any = None):
        self.task, self.tokenizer = task, tokenizer

    # ---- texts

    def stop_strings(self) -> tuple[str, ...]:
        """Returns the strings that end a turn, besides EOS."""
        return tuple(f"</{tag}>" for tag in [*(tool.tag for tool in self.task.tools), ANSWER])

    def reserved_tags(self) -> tuple[str, ...]:
        """Returns the names of tags that only the policy and the loop write: of thoughts, tools and
        answers."""
        names = ["think", ANSWER]
        for tool in self.task.tools:
            names += [tool.tag, tool.result_tag]
        return tuple(names)

    def result_tags(self) -> list[str]:
        """Returns the names of the tags around tools' results."""
        return [tool.result_tag for tool in self.task.tools]

    def adapt_instruction(self, instruction: str) -> str:
        """Returns the first instruction of a run as it evolves. Raises Fault if the policy could
        not act under it."""
        return instruction

    def find_unfit(self, candidate: str, parent: str) -> str:
        """Returns why the policy could not act under a revision of an instruction; "" if it can."""
        names = [tool.tag for tool in self.task.tools]
        return find_lost_tag(candidate, parent, [*names, ANSWER])

    def messages(self, instruction: str, question: Question) -> list[Message]:
        """Returns the conversation that the policy continues.

        How the task's functions are called follows the instruction and is no part of it: whatever
        the optimizer revises, the policy knows its tools.
        """
        tools = [tool for tool in self.task.tools_of(question) if tool.usage()]
        if tools:
            tags = sorted({f"<{tool.result_tag}> and </{tool.result_tag}>" for tool in tools})
            heading = f"Tools, whose results come between {' or '.join(tags)}:"
            usages = dict.fromkeys(tool.usage() for tool in tools)
            instruction = "\n".join([f"{instruction}\n\n{heading}", *usages])
        return self.task.prompt(instruction, question)

    def template_options(
        self, instruction: str, question: Question | None = None
    ) -> Mapping[str, Any]:
        """Returns what else the chat template is given."""
        return {}

    def parse_turn(self, text: str, ended: bool = True) -> Action:
        """Returns what the text of a turn says: the first call that is complete, and the answer,
        which counts before a call. `ended`: as turns do."""
        action, first = Action(text, find_answer(text), ended=ended), len(text)
        for tool in self.task.tools:
            call = re.search(rf"<{tool.tag}>((?:(?!<{tool.tag}>).)*?)</{tool.tag}>", text, re.S)
            if call and call.start() < first:
                action, first = replace(action, tool=tool, argument=call[1].strip()), call.start()
        return action

    # ---- ids

    def encode_prompt(self, instruction: str, question: Question) -> list[int]:
        """Returns the ids of the prompt in the chat template.

        Neither instruction nor question can spell a control token, nor the question one of the
        agent's tags.
        """
        # the instruction may name the agent's tags
        instruction = escape_markup(instruction, match_markup(self.tokenizer, simple=True))
        text = escape_markup(question.text, match_markup(self.tokenizer, self.reserved_tags()))
        messages = self.messages(instruction, replace(question, text=text))
        options = self.template_options(instruction, question)
        return encode_conversation(self.tokenizer, messages, **options)

    def read_turn(self, ids: Sequence[int]) -> Action:
        """Returns what a sampled turn says."""
        return self.parse_turn(self.read_response(ids))

    def encode_result(self, action: Action, result: list[str], limit: int) -> list[int]:
        """Returns the ids between a call and the next turn: the result in its tool's tag, as `limit`
        tokens at most. A long one loses its end, not its closing tag.

        The result cannot close the tag, nor spell another of the agent's or a control token.
        """
        tool = action.tool
        assert tool
        pattern = match_markup(self.tokenizer, (tool.result_tag, *self.reserved_tags()))
        shown = tool.show([escape_markup(text, pattern) for text in result])
        shown = shown[: limit * TOKEN_CHARACTERS]
        head = encode(self.tokenizer, f"\n\n<{tool.result_tag}>{shown}")
        end = encode(self.tokenizer, f"</{tool.result_tag}>\n\n")
        return head[: max(0, limit - len(end))] + end

    def encode_reminder(self, action: Action) -> list[int]:
        """Returns the ids between a turn that neither called nor answered and the next one."""
        return encode(self.tokenizer, explain_invalid_action(self.task.tools))

    def read_response(self, ids: Sequence[int]) -> str:
        """Returns sampled tokens, or everything after the prompt, as a text to read."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))
