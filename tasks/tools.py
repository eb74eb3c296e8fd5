"""What an agent can write: a call of a tool or an answer, how it looks, who answers it, how a
result is shown (§2.1).

A tool is a subclass of `Tool`, five words and `submit`, or of `Function`, five words and `run`. The
strings that end a turn, the message after an invalid action, the tag of an observation and the
names of the metrics derive from the tools of the task.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import simpleeval

from plumbing.faults import Fault
from tasks.trajectories import Trajectory

simpleeval.MAX_POWER = 1000  # largest base and exponent, so that no calculation takes long
ANSWER = "answer"  # the tag that ends a trajectory
WORDS = ("tag", "noun", "argument", "plural", "result_tag")
# What metrics.jsonl has of every step, with `time/total` and the like: neither a tool's metric nor a
# task's has such a name.
COLUMNS = set(
    "t metrics loss kl entropy clip_fraction logp logp_gap grad_norm lr skipped_updates candidates answered "
    "failed valid_actions prompt_tokens response_tokens context_tokens zero_variance_groups all_right_groups "
    "all_wrong_groups P best w_best w p n r_bar time test valid".split()
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

    def of(self, tau: Trajectory) -> "Tool":
        """Returns the tool as an episode has it, for one that reads or changes `tau.state`."""
        return self

    @abstractmethod
    def submit(self, argument: str) -> "Future[list[str]]":
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

    def submit(self, argument: str) -> "Future[list[str]]":
        done: Future[list[str]] = Future()
        try:
            done.set_result([self.run(argument)])
        except Exception as e:
            done.set_result(Failure([f"not {self.noun} ({type(e).__name__})"]))
        return done


class Calculator(Function):
    """Arithmetic on numbers: `<calculate> 3 * (4 + 5) </calculate>` returns 27."""

    tag, noun, argument = "calculate", "a calculation", "expression"
    plural, result_tag = "calculations", "result"
    description = "Computes an arithmetic expression of numbers, such as 3 * (4 + 5)."

    def run(self, argument: str) -> str:
        if not re.fullmatch(r"[\d\s.+*/%()-]{1,200}", argument):
            raise ValueError(argument)
        # of several lines simpleeval would compute only the first
        one_line = " ".join(argument.split())
        x = simpleeval.SimpleEval(names={}, functions={}).eval(one_line)
        whole = float(x).is_integer() and (isinstance(x, int) or abs(x) < 2**53)
        return str(int(x)) if whole else f"{x:.12g}"


def check_words(where: str, tools: Sequence[Tool]) -> None:
    """Raises Fault, which begins with `where`, unless a task's tools can be told apart by their
    words. Raises AttributeError where a tool lacks a word."""
    tags = Counter(["think", ANSWER, *(tool.tag for tool in tools)])
    plurals = Counter([*COLUMNS, *(tool.plural for tool in tools)])
    for tool in tools:
        right = {
            "tag": TAG.fullmatch(tool.tag) and tags[tool.tag] == 1,
            "noun": tool.noun.strip(),
            "argument": tool.argument.strip(),
            "plural": tool.plural.strip() and plurals[tool.plural] == 1,
            "result_tag": TAG.fullmatch(tool.result_tag) and not tags[tool.result_tag],
        }
        for word in WORDS:
            if not right[word]:
                raise Fault(
                    f"{where}: its tool <{tool.tag}> has the {word} {getattr(tool, word)!r}; tags are letters,"
                    " digits, - and _, no digit first; think, answer and others' tags are reserved"
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
