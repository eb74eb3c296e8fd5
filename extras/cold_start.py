"""The cold start: fine-tuning on demonstrations, so that a base model can be rolled out (docs/cold_start.md).

    python extras/cold_start.py --demos demos.jsonl --model smollm2-135m --out runs/cold    # and the flags of inspo.py

A row of --demos is {"messages": [{"role": "system" | "user" | "assistant" | "tool", "content": text}, ...]}; other
columns are ignored, but for "id" and "data_source", which name its trajectory. What precedes the first assistant
message is the prompt. Assistant messages are learned; a tool's is what the call before it returned, with or without its
tag. The ids are those that a rollout of these texts has, and the EOS after a last assistant message.
"""

if not __package__:
    import root  # noqa: F401
import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import inspo
from config import STATIC, RolloutKnobs, knob, parse
from extras.table1 import SupervisedConfig
from journal.summary import many
from plumbing.faults import Fault, one_line
from plumbing.outside import as_data, clean, control, decoded
from plumbing.status import status
from tasks import Message, Question, Task, Trajectory, Turn, load_task, rng_of
from tasks.formats import encode, encode_conversation
from tasks.questions import read_json_lines
from tasks.tools import Function

if TYPE_CHECKING:  # torch takes seconds to import; --help does not wait for it
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from journal.checkpoints import Checkpoints
    from journal.directory import RunDirectory
    from journal.log import Log
    from population import Instruction
    from training.policy import Policy

DEMONSTRATIONS = "demonstrations.json"  # in a run: the file that it learns from, the rows held out, their log-prob
HELD_OUT = 64  # demonstrations at most that are never trained on


@dataclass(frozen=True)
class ColdStartConfig(SupervisedConfig):
    """the cold start (docs/cold_start.md)"""

    demos: str = knob("", "demonstrations to learn, .jsonl: a conversation a line")

    def check(self) -> str:
        return "" if self.demos or self.dry_run else "--demos is missing: give a .jsonl of conversations"


def config_of(argv: list[str] | None = None) -> ColdStartConfig:
    cfg = parse(argv, ColdStartConfig, **STATIC, T=40, batch=16, lr=1e-4, save_every=10, eval_every=0)
    return dataclasses.replace(cfg, demos=os.path.abspath(cfg.demos) if cfg.demos else "")


# ---- a row -> messages -> ids


def conversation(row: Any, task: Task) -> tuple[list[Message], list[Turn]]:
    """Returns the prompt of a row and its turns, each with what its call returned: [text], or None.

    A ValueError says what no rollout could have, and what to do.
    """
    try:
        messages: list[Any] = row["messages"]
        told = [(str(message["role"]), message["content"].strip() and message["content"]) for message in messages]
    except (TypeError, LookupError, AttributeError):
        raise ValueError('no messages; write {"messages": [{"role": ..., "content": text}, ...]}') from None
    roles = " ".join(role for role, _ in told)
    if not re.fullmatch(r"((system|user) )+assistant( tool assistant)*( tool)?", roles):
        raise ValueError(f"the roles are {roles:.80}; write system or user, then assistant, tool, assistant ...")
    tools = {tool.tag: tool for tool in task.tools}
    prompt, turns = list[Message](), list[Turn]()
    for n, (role, content) in enumerate(told, 1):
        if not content:
            raise ValueError(f"message {n}, the {role}'s, has no content; write its text, or leave the message out")
        if role == "assistant":
            turns.append(turn_of(content, task, n))
        elif role == "tool":
            if not turns[-1].tool:
                raise ValueError(f"message {n} is a tool's, but message {n - 1} calls none; write the call there")
            turns[-1].result = [untagged(content, *task.format.results([tools[turns[-1].tool]]))]
        else:
            prompt.append({"role": role, "content": content})
    return prompt, turns


def turn_of(text: str, task: Task, n: int = 1) -> Turn:
    """Returns the turn that message n is; a ValueError if it goes on where a rollout ends a turn."""
    kept = until_it_ends(text, task)
    if rest := text[len(kept) :].strip():
        raise ValueError(f"message {n} goes on after {kept[kept.rfind('<') :]}, which ends a turn: {rest:.40}; cut it")
    said = task.format.parse(kept, task.tools)
    return Turn(kept, said.tool.tag, said.argument) if said.tool else Turn(kept)


def until_it_ends(text: str, task: Task) -> str:
    """Returns a turn's text up to the first string that ends a turn; all of it if there is none."""
    ends = [text.find(end) + len(end) for end in task.format.stop(task) if end in text]
    return text[: min(ends)] if ends else text


def untagged(text: str, tag: str) -> str:
    """Returns what stands between the tags of a tool's result; all of a text that is not in them."""
    inside = text.strip().removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")
    return inside if len(inside) == len(text.strip()) - len(f"<{tag}></{tag}>") else text


class Shown(Function):
    """A tool whose result is the text that the policy reads."""

    def __init__(self, result_tag: str):
        self.result_tag = result_tag

    def run(self, argument: str) -> str:
        return argument


def encoded(row: Any, k: int, task: Task, tokenizer: "Tokenizer", cfg: RolloutKnobs) -> Trajectory:
    """Returns the k-th row as the trajectory of a rollout, each part encoded by itself; its last EOS is learned too,
    and that of every turn where no string ends one.

    Raises ValueError, and Fault where the chat template refuses the prompt.
    """
    from extras.supervised import demonstration

    prompt, turns = conversation(row, task)
    form, tools = task.format(tokenizer, task), {tool.tag: tool for tool in task.tools}
    ids = encode_conversation(tokenizer, prompt, **form.options(task, str(row.get("instruction", ""))))
    q = Question(str(row.get("id", f"row {k}")), prompt[-1]["content"], source=str(row.get("data_source", "data")))
    tau = demonstration(q, k, ids, [0] * len(ids), len(ids), form.parse(turns[-1].text, task.tools).answer)
    tau.turns = turns
    tau.stop = "over" if turns[-1].result else "answer" if tau.prediction is not None else "turns"
    forbidden = control(tokenizer, simple=True)
    for turn in turns:
        if as_data(turn.text, forbidden) != turn.text:
            found = forbidden.search(turn.text)
            what = repr(found[0]) if found else "a control token in other letters"
            raise ValueError(f"an assistant message holds {what}, which the chat template writes; take it out")
        written = encode(tokenizer, turn.text)
        if not form.stop(task) or (turn is turns[-1] and not turn.result):
            written.append(tokenizer.eos_token_id)
        tau.act(written, [0.0] * len(written))
        if turn.result:
            said = dataclasses.replace(form.parse(turn.text, task.tools), tool=Shown(tools[turn.tool].result_tag))
            tau.observe(form.result(said, turn.result, cfg.max_observation))
    tau.response = form.response(tau.ids[tau.prompt_tokens :])
    return tau


def demonstrations(cfg: ColdStartConfig, task: Task, tokenizer: "Tokenizer") -> dict[int, Trajectory]:
    """Returns what --demos demonstrates, by line of the file; of rows that are alike the first. Raises Fault."""
    path, limit = Path(cfg.demos), cfg.max_prompt + cfg.max_response
    what = f"--max_prompt {cfg.max_prompt} + --max_response {cfg.max_response} are"
    if not path.is_file():
        raise Fault(f"--demos {path}: no such file; check the path")
    found: dict[tuple[int, ...], tuple[int, Trajectory]] = {}
    for line, row in read_json_lines(path):
        try:
            tau = encoded(clean(row), line, task, tokenizer, cfg)
            if len(tau.ids) > limit:
                raise ValueError(f"{len(tau.ids):,} tokens, and {what} {limit:,}; shorten the row, or leave it out")
        except (ValueError, Fault) as e:
            raise Fault(f"--demos {path}:{line}: {e}") from None
        found.setdefault(tuple(tau.ids), (line, tau))
    if not found:
        raise Fault(f"--demos {path}: no demonstration in it; give a file with at least one row")
    return dict(found.values())


def held_out(lines: Sequence[int], seed: int) -> list[int]:
    """Returns a tenth of the lines, HELD_OUT at most: these are never trained on."""
    order = rng_of(seed, 0, "demonstrations").permutation(len(lines))
    return sorted(lines[k] for k in order[: min(HELD_OUT, len(lines) // 10)])


# ---- a run


def learn(
    demos: dict[int, Trajectory], cfg: ColdStartConfig, task: Task, policy: "Policy", evolution: "inspo.Evolution",
    checkpoints: "Checkpoints", log: "Log",
) -> "tuple[Policy, Instruction]":  # fmt: skip
    """Trains `policy` on demonstrations, and measures those held out before and after."""
    from extras.supervised import imitate, mean_logp
    from training.checkpoint import digest

    aside = held_out(list(demos), cfg.seed)
    about = {"file": cfg.demos, "digest": digest(Path(cfg.demos)), "held_out": aside}
    remember(log.run, about)
    learned, unseen = [tau for line, tau in demos.items() if line not in set(aside)], [demos[line] for line in aside]
    n = len(learned)
    answered = sum(tau.stop == "answer" for tau in learned)
    calls = sum(tau.served(tool.tag) for tau in learned for tool in task.tools)
    log.note(
        f"{many(n, 'demonstration')} to learn, {len(aside)} held out: {answered / n:.0%} answer,"
        f" {calls / n:.1f} calls and {sum(sum(tau.mask) for tau in learned) / n:.0f} learned tokens each"
    )
    if not unseen:
        return imitate(cfg, learned, policy, evolution, checkpoints, log)
    before = mean_logp(policy, unseen)  # of the first policy: no checkpoint is loaded yet
    trained = imitate(cfg, learned, policy, evolution, checkpoints, log)
    after = mean_logp(policy, unseen)
    log.run.write(DEMONSTRATIONS, json.dumps(about | {"log_prob": [before, after]}, indent=1))
    log.note(f"log-prob of a token of the held-out demonstrations: {before:.3f} before, {after:.3f} after")
    return trained


def remember(run: "RunDirectory", about: dict[str, Any]) -> None:
    """Writes what is learned into a run; Fault if a resumed one has learned from other rows."""
    file = run.path / DEMONSTRATIONS
    if file.is_file() and decoded(file.read_text())["digest"] != about["digest"]:
        raise Fault(f"--demos {about['file']} has changed since this run began: restore it, or start a new run")
    run.write(DEMONSTRATIONS, json.dumps(about, indent=1))


def main(argv: list[str] | None = None) -> None:
    cfg = config_of(argv)
    from extras.supervised import Demonstrated
    from models.model import load_tokenizer

    demos: dict[int, Trajectory] = {}
    with one_line():
        if not cfg.dry_run and os.environ.get("RANK", "0") == "0":  # before anything large is loaded
            status("reading the demonstrations")
            task = load_task(cfg)
            demos = demonstrations(cfg, task, load_tokenizer(cfg.model, task.format.stop(task)))
    inspo.train(cfg, Demonstrated, algorithm=partial(learn, demos))


if __name__ == "__main__":
    main()
