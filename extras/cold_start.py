"""The cold start: fine-tuning on demonstrations, so that a base model can be rolled out
(docs/cold_start.md).

    python extras/cold_start.py --demos demos.jsonl --model smollm2-135m --out runs/cold    # and the flags of inspo.py

A row of --demos is {"messages": [{"role": "system" | "user" | "assistant" | "tool", "content":
text}, ...]}; other columns are ignored, except "id" and "data_source", which name its trajectory.
What precedes the first assistant message is the prompt. Assistant messages are learned; a tool's is
what the call before it returned, with or without its tag. The ids are those that a rollout of these
texts has, and what ends a turn after a last assistant message.
"""

if not __package__:
    import root  # noqa: F401
import dataclasses
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

import inspo
from config import STATIC, RolloutKnobs, parse_flags
from extras.table1 import SupervisedConfig
from plumbing import stop
from plumbing.chat import turn_ends
from plumbing.faults import Fault, one_line
from plumbing.outside import clean, escape_markup, match_markup
from tasks import Message, Question, Task, Trajectory, Turn
from tasks.search_qa import read_json_lines
from tasks.task import load_task
from tasks.tools import encode, encode_conversation

if TYPE_CHECKING:  # torch takes seconds to import; --help does not wait for it
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True)
class ColdStartConfig(SupervisedConfig):
    """the cold start (docs/cold_start.md)"""

    demos: str = ""
    """demonstrations to learn, .jsonl: a conversation a line"""

    def find_fault(self) -> str:
        return "" if self.demos else "--demos is missing: give a .jsonl of conversations"


def config_of(argv: list[str] | None = None) -> ColdStartConfig:
    cfg = parse_flags(
        argv, ColdStartConfig, **STATIC, T=40, batch=16, lr=1e-4, save_every=10, eval_every=0
    )
    return dataclasses.replace(cfg, demos=os.path.abspath(cfg.demos) if cfg.demos else "")


# ---- a row -> messages -> ids


def conversation(row: Any, task: Task) -> tuple[list[Message], list[Turn]]:
    """Splits a row into its prompt and its turns, each with what its call returned: [text], or
    None.

    Raises ValueError, with the remedy, at what no rollout could have.
    """
    try:
        messages: list[Any] = row["messages"]
        parts = [
            (str(message["role"]), message["content"].strip() and message["content"])
            for message in messages
        ]
    except (TypeError, LookupError, AttributeError):
        raise ValueError(
            'no messages; write {"messages": [{"role": ..., "content": text}, ...]}'
        ) from None
    roles = " ".join(role for role, _ in parts)
    if not re.fullmatch(r"((system|user) )+assistant( tool assistant)*( tool)?", roles):
        raise ValueError(
            f"the roles are {roles:.80}; write system or user, then assistant, tool, assistant ..."
        )
    prompt, turns = list[Message](), list[Turn]()
    for n, (role, content) in enumerate(parts, 1):
        if not content:
            raise ValueError(
                f"message {n}, the {role}'s, has no content; write its text, or leave the message out"
            )
        if role == "assistant":
            turns.append(turn_of(content, task, n))
        elif role == "tool":
            if not turns[-1].tool:
                raise ValueError(
                    f"message {n} is a tool's, but message {n - 1} calls none; write the call there"
                )
            for tag in ["tool_response", *(tool.result_tag for tool in task.tools)]:
                content = untag(content, tag)
            turns[-1].result = [content]
        else:
            prompt.append({"role": role, "content": content})
    return prompt, turns


def turn_of(text: str, task: Task, n: int) -> Turn:
    """Parses message n; ValueError if it continues where a rollout ends a turn."""
    turn = cut_at_stop(text, task)
    if rest := text[len(turn) :].strip():
        raise ValueError(
            f"message {n} goes on after {turn[turn.rfind('<') :]}, which ends a turn: {rest:.40}; cut it"
        )
    action = task.make_format().parse_turn(turn)
    return Turn(turn, action.tool.tag, action.argument) if action.tool else Turn(turn)


def cut_at_stop(text: str, task: Task) -> str:
    """Cuts a turn's text after the first string that ends a turn."""
    ends = [text.find(end) + len(end) for end in task.make_format().stop_strings() if end in text]
    return text[: min(ends, default=None)]


def untag(text: str, tag: str) -> str:
    """Takes a tool's result out of its tags, if it is in them."""
    inside = text.strip().removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")
    return inside if len(inside) == len(text.strip()) - len(f"<{tag}></{tag}>") else text


def encode_row(
    row: Any, k: int, task: Task, tokenizer: "Tokenizer", cfg: RolloutKnobs
) -> Trajectory:
    """Encodes the k-th row as a rollout does, each part by itself; the end of its last turn is
    learned too, and that of every turn where no string ends one.

    Raises ValueError, and Fault where the chat template refuses the prompt.
    """
    from extras.supervised import demonstration

    prompt, turns = conversation(row, task)
    form = task.make_format(tokenizer)
    tools = {tool.tag: tool for tool in task.tools}
    ids = encode_conversation(
        tokenizer, prompt, **form.template_options(str(row.get("instruction", "")))
    )
    q = Question(
        str(row.get("id", f"row {k}")),
        prompt[-1]["content"],
        source=str(row.get("data_source", "data")),
    )
    tau = demonstration(q, k, ids, [0] * len(ids), len(ids), form.parse_turn(turns[-1].text).answer)
    tau.turns = turns
    tau.stop = "over" if turns[-1].result else "answer" if tau.prediction is not None else "turns"
    forbidden = match_markup(tokenizer, simple=True)
    for turn in turns:
        if escape_markup(turn.text, forbidden) != turn.text:
            token = forbidden.search(turn.text)
            what = repr(token[0]) if token else "a control token in other letters"
            raise ValueError(
                f"an assistant message holds {what}, which the chat template writes; take it out"
            )
        written = encode(tokenizer, turn.text)
        if not form.stop_strings() or (turn is turns[-1] and not turn.result):
            written.append(turn_ends(tokenizer)[0])
        tau.act(written, [0.0] * len(written))
        if turn.result:
            as_it_stands: Any = SimpleNamespace(
                result_tag=tools[turn.tool].result_tag, show="".join
            )
            action = dataclasses.replace(form.parse_turn(turn.text), tool=as_it_stands)
            tau.observe(form.encode_result(action, turn.result, cfg.max_observation))
    tau.response = form.decode_response(tau.ids[tau.prompt_tokens :])
    return tau


def read_demonstrations(
    cfg: ColdStartConfig, task: Task, tokenizer: "Tokenizer"
) -> dict[int, Trajectory]:
    """Reads --demos, by line of the file; of equal rows the first. Raises Fault."""
    path, limit = Path(cfg.demos), cfg.max_prompt + cfg.max_response
    what = f"--max_prompt {cfg.max_prompt} + --max_response {cfg.max_response} are"
    if not path.is_file():
        raise Fault(f"--demos {path}: no such file; check the path")
    demos: dict[tuple[int, ...], tuple[int, Trajectory]] = {}
    for line, row in read_json_lines(path):
        try:
            tau = encode_row(clean(row), line, task, tokenizer, cfg)
            if len(tau.ids) > limit:
                raise ValueError(
                    f"{len(tau.ids):,} tokens, and {what} {limit:,}; shorten the row, or leave it out"
                )
        except (ValueError, Fault) as e:
            raise Fault(f"--demos {path}:{line}: {e}") from None
        demos.setdefault(tuple(tau.ids), (line, tau))
    if not demos:
        raise Fault(f"--demos {path}: no demonstration in it; give a file with at least one row")
    return dict(demos.values())


# ---- a run


def main(argv: list[str] | None = None) -> None:
    cfg = config_of(argv)
    from extras.supervised import Demonstrated, learn
    from models.model import load_tokenizer

    demos: dict[int, Trajectory] = {}
    with one_line(), stop.listening():
        # before anything large is loaded
        if os.environ.get("RANK", "0") == "0":
            task = load_task(cfg)
            demos = read_demonstrations(cfg, task, load_tokenizer(cfg.model))
        inspo.train(cfg, Demonstrated, algorithm=partial(learn, demos))


if __name__ == "__main__":
    main()
