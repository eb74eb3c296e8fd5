"""What an agent can write: a call of a tool or an answer, how it looks, who answers it, how a result is shown (§2.1).

A tool is a subclass of `Tool`, five words and `submit`, or of `Function`, five words and `run`. The strings that end a
turn, the message after an invalid action, the tag of an observation and the names of the metrics derive from the tools
of the task.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import simpleeval

simpleeval.MAX_POWER = 1000  # largest base and exponent, so that no calculation takes long
ANSWER = "answer"  # the tag that ends a trajectory
WORDS = ("tag", "noun", "argument", "plural", "result_tag")
LAST_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)  # innermost, complete


class Tool(ABC):
    """One tool: `<tag>argument</tag>` calls it, `<result_tag>...</result_tag>` holds what it returns."""

    tag: str  # search
    noun: str  # a search: in the message after an invalid action
    argument: str  # query: likewise
    plural: str  # searches: its metric
    result_tag: str  # information
    description: str = ""  # what it does, where a format describes it (--format hermes); "": made of its noun
    over: bool = False  # whether the episode has ended: after this result the policy has no further turn

    @property
    def faults(self) -> int:
        """Requests that have failed so far."""
        return 0

    @abstractmethod
    def submit(self, argument: str) -> "Future[list[str]]":
        """Returns a Future of the result, a list of texts. It raises ToolDown if there is no result."""

    def show(self, result: list[str]) -> str:
        """Returns the text of a result as the policy reads it, without its tag."""
        return "\n".join(result)


class Function(Tool):
    """A tool that answers at once: a subclass has the five words and `run`."""

    @abstractmethod
    def run(self, argument: str) -> str:
        """Returns the result. An exception becomes a reply too, since the policy may write anything."""

    def submit(self, argument: str) -> "Future[list[str]]":
        done: Future[list[str]] = Future()
        try:
            done.set_result([self.run(argument)])
        except Exception as e:
            done.set_result([f"not {self.noun} ({type(e).__name__})"])
        return done


class Calculator(Function):
    """Arithmetic on numbers: `<calculate> 3 * (4 + 5) </calculate>` returns 27."""

    tag, noun, argument, plural, result_tag = "calculate", "a calculation", "expression", "calculations", "result"
    description = "Computes an arithmetic expression of numbers, such as 3 * (4 + 5)."

    def run(self, argument: str) -> str:
        if not re.fullmatch(r"[\d\s.+*/%()-]{1,200}", argument):
            raise ValueError(argument)
        one_line = " ".join(argument.split())  # of several lines simpleeval would compute the first
        return f"{float(simpleeval.SimpleEval(names={}, functions={}).eval(one_line)):.12g}"


def unusable(tools: Sequence[Tool], columns: Collection[str] = ()) -> str:
    """Returns what is wrong with the tools of a task; "" if nothing is. `columns`: names that no metric can have."""
    for tool in tools:
        name = type(tool).__name__
        for word in WORDS:
            said = getattr(tool, word, None)
            if not isinstance(said, str) or not said.strip():
                return f"its tool {name} has no {word}; give it the words {', '.join(WORDS)}"
            if word.endswith("tag") and not re.fullmatch(r"[^\W\d][\w-]*", said):
                return f"its tool {name} has the {word} {said!r}; a tag is letters, digits, - and _"
        if tool.plural in columns:
            return f"its tool {name} has the plural {tool.plural!r}, which is measured of every run; take another word"
    tags = ["think", ANSWER, *(tool.tag for tool in tools)]
    for k, tool in enumerate(tools):
        shared = {
            "tag": tool.tag in tags[: k + 2],
            "result_tag": tool.result_tag in tags,
            "plural": tool.plural in [other.plural for other in tools[:k]],
        }
        for word in (word for word in shared if shared[word]):
            return f"its tool {type(tool).__name__} has the {word} {getattr(tool, word)!r} of another; give it its own"
    return ""


def stop_strings(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Returns the strings that end a turn: the closing tags of the tools and of the answer."""
    return tuple(f"</{tag}>" for tag in [*(tool.tag for tool in tools), ANSWER])


def tags_of(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Returns the agent's tags, which only the policy and the loop write: those of thoughts, tools and answers."""
    return "think", ANSWER, *(tag for tool in tools for tag in (tool.tag, tool.result_tag))


def invalid_action(tools: Sequence[Tool]) -> str:
    """Returns the observation after a turn that neither called a tool nor answered."""
    nouns = " nor ".join([*(tool.noun for tool in tools), "an answer"])
    calls = ", ".join(f"<{tool.tag}> {tool.argument} </{tool.tag}>" for tool in tools)
    return f"\n\nThat was neither {nouns}. Write {calls} or <{ANSWER}> answer </{ANSWER}>.\n\n"


def find_call(text: str, tools: Sequence[Tool]) -> tuple[Tool, str] | None:
    """Returns the tool that a turn calls first, and the argument; None if no call is complete."""
    found = []
    for tool in tools:
        if match := re.search(rf"<{tool.tag}>((?:(?!<{tool.tag}>).)*?)</{tool.tag}>", text, re.S):
            found.append((match.start(), tool, match.group(1).strip()))
    return min(found, key=lambda call: call[0])[1:] if found else None


def last_answer(response: str) -> str | None:
    """Returns the text of the last complete <answer>...</answer>, or None.

    Give it the policy's own text: a prompt holds an example answer, and a passage may hold one too.
    """
    found = LAST_ANSWER.findall(response)
    return found[-1].strip() if found else None
