"""What an agent can write, and how: its tools, and the format of their calls, of results and of
answers (§2.1, App. F).

A tool is a subclass of `Tool`, five words and `submit`, or of `Function`, five words and `run`. The
strings that end a turn, the message after an invalid action, the tag of an observation and the
names of the metrics derive from the tools of the task. `Tags` is the paper's format; another one
that `--format` names is a subclass of it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from plumbing.chat import apply_template
from plumbing.faults import Fault
from plumbing.outside import escape_markup, map_texts, match_markup

if TYPE_CHECKING:
    from tasks.task import Message, Question, Task, Trajectory


ANSWER = "answer"  # the tag that ends a trajectory
WORDS = ("tag", "noun", "argument", "plural", "result_tag")
# What metrics.jsonl has of every step, with `time/total` and the like: neither a tool's metric nor a
# task's has such a name.
COLUMNS = set(
    "t metrics loss kl entropy clip_fraction logp logp_gap grad_norm lr skipped_updates answered valid_actions "
    "prompt_tokens response_tokens context_tokens zero_variance_groups best w_best w p n time test valid".split()
)
TAG = re.compile(r"[^\W\d][\w-]*")
ANSWERS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)  # innermost, complete


class Failure(list[str]):
    """The result of a call that failed: it says why."""


class Tool(ABC):
    """One tool: `<tag>argument</tag>` calls it, `<result_tag>...</result_tag>` holds what it
    returns."""

    tag: str  # search
    noun: str  # a search: in the message after an invalid action
    argument: str  # query: likewise
    plural: str  # searches: its metric
    result_tag: str  # information
    # what it does, where a format describes it (--format hermes); "": made from its noun
    description: str = ""

    def bind(self, tau: Trajectory) -> Tool:
        """Returns the tool as an episode has it, for one that reads or changes `tau.state`."""
        return self

    @abstractmethod
    def submit(self, argument: str) -> Future[list[str]]:
        """Returns a Future of the result, a list of texts or a Failure. It raises ToolDown if there
        is no result."""

    def usage(self) -> str:
        """Returns how to call it, for every prompt; "": an instruction says it."""
        return ""

    def show(self, result: list[str]) -> str:
        """Returns the text of a result as the policy reads it, without its tag."""
        return "\n".join(result)


class Function(Tool):
    """A tool that answers at once: a subclass has the five words and `run`."""

    @abstractmethod
    def run(self, argument: str) -> str:
        """Returns the result. An exception becomes a reply too, since the policy may write
        anything."""

    def submit(self, argument: str) -> Future[list[str]]:
        done: Future[list[str]] = Future()
        try:
            done.set_result([self.run(argument)])
        except Exception as e:
            done.set_result(Failure([f"not {self.noun} ({type(e).__name__})"]))
        return done


def check_words(where: str, tools: Sequence[Tool]) -> None:
    """Raises Fault, which begins with `where`, unless a task's tools can be told apart by their
    words. Raises AttributeError where a tool lacks a word."""
    tags = Counter(["think", ANSWER, *(tool.tag for tool in tools)])
    plurals = Counter([*COLUMNS, *(tool.plural for tool in tools)])
    for tool in tools:
        right = {
            "tag": TAG.fullmatch(tool.tag) and tags[tool.tag] == 1,
            "plural": plurals[tool.plural] == 1,
            "result_tag": TAG.fullmatch(tool.result_tag) and not tags[tool.result_tag],
        }
        for word, fits in right.items():
            if not fits:
                raise Fault(
                    f"{where}: its tool <{tool.tag}> has the {word} {getattr(tool, word)!r}; tags are letters,"
                    " digits, - and _, no digit first; think, answer and others' names are reserved"
                )


def explain_invalid_action(tools: Sequence[Tool]) -> str:
    """Returns the observation after a turn that neither called a tool nor answered."""
    nouns = " nor ".join([*(tool.noun for tool in tools), "an answer"])
    calls = ", ".join(f"<{tool.tag}> {tool.argument} </{tool.tag}>" for tool in tools)
    return f"\n\nThat was neither {nouns}. Write {calls} or <{ANSWER}> answer </{ANSWER}>.\n\n"


def find_answer(response: str) -> str | None:
    """Returns the text of the last complete <answer>...</answer>, or None.

    Give it the policy's own text: a prompt holds an example answer, and a passage may hold one too.
    """
    answers = ANSWERS.findall(response)
    return answers[-1].strip() if answers else None


# ---- formats

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
        tools = [tool for tool in self.task.tools if tool.usage()]
        if tools:
            tags = sorted({f"<{tool.result_tag}> and </{tool.result_tag}>" for tool in tools})
            heading = f"Tools, whose results come between {' or '.join(tags)}:"
            usages = dict.fromkeys(tool.usage() for tool in tools)
            instruction = "\n".join([f"{instruction}\n\n{heading}", *usages])
        return self.task.prompt(instruction, question)

    def template_options(self, instruction: str) -> Mapping[str, Any]:
        """Returns what else the chat template is given."""
        return {}

    def parse_turn(self, text: str) -> Action:
        """Returns what the text of a turn says: the first call that is complete, and the answer,
        which counts before a call."""
        action = Action(text, find_answer(text))
        first = len(text)  # where the first call begins
        for tool in self.task.tools:
            # innermost and complete, as ANSWERS
            call = re.search(rf"<{tool.tag}>((?:(?!<{tool.tag}>).)*?)</{tool.tag}>", text, re.S)
            if call and call.start() < first:
                first = call.start()
                action = replace(action, tool=tool, argument=call[1].strip())
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
        options = self.template_options(instruction)
        return encode_conversation(self.tokenizer, messages, **options)

    def read_turn(self, ids: Sequence[int]) -> Action:
        """Returns what a sampled turn says."""
        return self.parse_turn(self.decode_response(ids))

    def encode_result(self, action: Action, result: list[str], limit: int) -> list[int]:
        """Returns the ids between a call and the next turn: the result in its tool's tag, as `limit`
        tokens at most. A long one loses its end, not its closing tag.

        The result cannot close the tag, nor spell another of the agent's or a control token.
        """
        tool = action.tool
        assert tool
        # the text as the policy may see it
        pattern = match_markup(self.tokenizer, (tool.result_tag, *self.reserved_tags()))
        shown = tool.show([escape_markup(text, pattern) for text in result])
        shown = shown[: limit * TOKEN_CHARACTERS]

        # its ids, cut so that the closing tag fits behind them
        head = encode(self.tokenizer, f"\n\n<{tool.result_tag}>{shown}")
        end = encode(self.tokenizer, f"</{tool.result_tag}>\n\n")
        return head[: max(0, limit - len(end))] + end

    def encode_reminder(self, action: Action) -> list[int]:
        """Returns the ids between a turn that neither called nor answered and the next one."""
        return encode(self.tokenizer, explain_invalid_action(self.task.tools))

    def decode_response(self, ids: Sequence[int]) -> str:
        """Returns sampled tokens, or everything after the prompt, as a text to read."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))
