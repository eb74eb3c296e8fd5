"""The cold start: fine-tuning on demonstrations, so that a base model can be rolled out (docs/cold_start.md).

    python extras/cold_start.py --demos demos.jsonl --model smollm2-135m --out runs/cold    # and the flags of inspo.py

A row of --demos is {"messages": [{"role": "system" | "user" | "assistant" | "tool", "content": text}, ...]}; other
columns are ignored, but for "id" and "data_source", which name its trajectory. What precedes the first assistant
message is the prompt. Assistant messages are learned; a tool's is what the call before it returned, with or without its
tag. The ids are those that a rollout of these texts has, and the EOS after a last assistant message.
"""

if not __package__:
    import root  # noqa: F401
from plumbing import stop  # noqa: F401  # isort: skip  (first: from here on a Ctrl-C is one line)
import dataclasses
import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import inspo
from config import STATIC, RolloutKnobs, knob, parse
from extras.table1 import SupervisedConfig
from journal.summary import label
from page.read import many
from plumbing.faults import Fault, one_line
from plumbing.outside import as_data, clean, control, decoded
from plumbing.status import status
from tasks import Message, Question, Task, Trajectory, Turn, load_task, rng_of
from tasks.formats import conversation_ids, encode
from tasks.questions import json_lines
from tasks.tools import Function

if TYPE_CHECKING:  # torch takes seconds to import; --help does not wait for it
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from journal.directory import RunDirectory
    from journal.log import Log
    from population import Instruction, Population
    from reflect import Optimizer
    from training.policy import Policy

ROLES = ("system", "user", "assistant", "tool")
DEMONSTRATIONS = "demonstrations.json"  # in a run: which file it learns from, and the rows that it holds out
HELD_OUT = 64  # demonstrations at most that are never trained on


@dataclass(frozen=True)
class ColdStartConfig(SupervisedConfig):
    """the cold start (docs/cold_start.md)"""

    PROGRAM: ClassVar[str] = "extras/cold_start.py"
    demos: str = knob("", "demonstrations to learn, .jsonl: a conversation a line")

    def check(self) -> str:
        return "" if self.demos or self.dry_run else "--demos is missing: give a .jsonl of conversations"


def config_of(argv: list[str] | None = None) -> ColdStartConfig:
    # `compare`: the last table needs the trajectories of both evaluations.
    cfg = parse(argv, ColdStartConfig, **STATIC, T=40, batch=16, lr=1e-4, save_every=10, eval_every=0, compare=100)
    return dataclasses.replace(cfg, demos=os.path.abspath(cfg.demos) if cfg.demos else "")


# ---- a row -> messages -> ids


def conversation(row: Any, task: Task) -> tuple[list[Message], list[Turn]]:
    """Returns the prompt of a row and its turns, each with what its call returned: [text], or None.

    A ValueError says what no rollout could have, and what to do.
    """
    tools = {tool.tag: tool for tool in task.tools}
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('no messages; write {"messages": [{"role": ..., "content": ...}, ...]}')
    prompt, turns = list[Message](), list[Turn]()
    for n, message in enumerate(messages, 1):
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role not in ROLES:
            raise ValueError(f"message {n} has the role {role!r:.40}; choose {', '.join(ROLES[:-1])} or tool")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"message {n}, the {role}'s, has no content; write its text, or leave the message out")
        last = turns[-1] if turns else None
        if role == "assistant":
            if last and last.result is None:
                raise ValueError(f"message {n} is a second turn without a tool's message between; join them, or add it")
            turns.append(turn_of(content, task, n))
        elif role == "tool":
            if not last or last.result is not None:
                raise ValueError(f"message {n} is a tool's, but no assistant message before it calls one; add the call")
            if not last.tool:
                remedy = f"call {' or '.join(tools)} there" if tools else "the task has no tools (--tools)"
                raise ValueError(f"message {n} is a tool's, but message {n - 1} calls none; {remedy}")
            last.result = [untagged(content, *task.format.results([tools[last.tool]]))]
        elif turns:
            raise ValueError(f"message {n} is the {role}'s, after a turn; only tools speak then: end the row before it")
        else:
            prompt.append({"role": role, "content": content})
    if not turns:
        raise ValueError("no assistant message, so there is nothing to learn; add what the policy should write")
    if not prompt:
        raise ValueError("the assistant speaks first; put the user's message before it")
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
    ids = conversation_ids(tokenizer, prompt, **form.options(task, str(row.get("instruction", ""))))
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
    from models.model import load_config

    path, limit = Path(cfg.demos), cfg.max_prompt + cfg.max_response
    what = f"--max_prompt {cfg.max_prompt} + --max_response {cfg.max_response} are"
    positions = getattr(load_config(cfg.model), "max_position_embeddings", None)
    if positions and positions < limit:
        limit, what = positions, "the model's positions are"
    if not path.is_file():
        raise Fault(f"--demos {path}: no such file; check the path")
    found: dict[tuple[int, ...], tuple[int, Trajectory]] = {}
    for line, row in json_lines(path):
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


class ColdStart:
    """What `inspo.train` calls: learns demonstrations, and measures those held out before and after."""

    def __init__(self, demos: dict[int, Trajectory]):
        self.demos, self.logp = demos, list[float]()
        self.run: RunDirectory | None = None  # known once it has begun

    def __call__(
        self, cfg: ColdStartConfig, task: Task, policy: "Policy", optimizer: "Optimizer | None", P: "Population",
        log: "Log",
    ) -> "tuple[Policy, Instruction]":  # fmt: skip
        from extras.supervised import imitate, mean_logp
        from training.checkpoint import digest

        self.run, aside = log.run, held_out(list(self.demos), cfg.seed)
        remember(self.run, {"file": cfg.demos, "digest": digest(Path(cfg.demos)), "held_out": aside})
        learned = [tau for line, tau in self.demos.items() if line not in set(aside)]
        n = len(learned)
        answered = sum(tau.stop == "answer" for tau in learned)
        calls = sum(tau.served(tool.tag) for tau in learned for tool in task.tools)
        log.note(
            f"{many(n, 'demonstration')} to learn, {len(aside)} held out: {answered / n:.0%} answer,"
            f" {calls / n:.1f} calls and {sum(sum(tau.mask) for tau in learned) / n:.0f} learned tokens each"
        )
        unseen = [self.demos[line] for line in aside]
        before = [mean_logp(policy, unseen)] if unseen else []  # of the first policy: no checkpoint is loaded yet
        found = imitate(cfg, learned, policy, P, log)
        self.logp = [*before, mean_logp(policy, unseen)] if unseen else []
        return found

    def table(self, run: Path) -> str:
        """Returns the Markdown table of a finished run: the policy before and after, under the first instruction."""
        names = [f"{policy} policy, first instruction" for policy in ("first", "trained")]
        summary = decoded((run / "summary.json").read_text())
        kept = [stored(run, f"test-{policy}_policy-first_instruction") for policy in ("first", "trained")]
        rows = {}
        if all(kept):
            of = f"(of {len(kept[0]):,})"
            rows[f"rollouts with a valid action {of}"] = [sum(map(acts, some)) / len(some) for some in kept]
            rows[f"rollouts that answer {of}"] = [sum(map(ends, some)) / len(some) for some in kept]
        metric = summary["metric"]
        rows[f"{label(metric)} (of {summary['questions']:,})"] = [summary["held_out"][name][metric] for name in names]
        if self.logp:
            aside = len(held_out(list(self.demos), summary["seed"]))
            rows[f"log-prob of a token, of {many(aside, 'demonstration')} held out"] = self.logp
        lines = [f"| {what} | {before:.3f} | {after:.3f} |" for what, (before, after) in rows.items()]
        head = "| held-out questions, first instruction, greedy | before | after |\n|---|---|---|"
        return "\n".join([head, *lines])


def remember(run: "RunDirectory", about: dict[str, Any]) -> None:
    """Writes what is learned into a run; Fault if a resumed one has learned from other rows."""
    file = run.path / DEMONSTRATIONS
    if file.is_file() and decoded(file.read_text())["digest"] != about["digest"]:
        raise Fault(f"--demos {about['file']} has changed since this run began: restore it, or start a new run")
    run.write(DEMONSTRATIONS, json.dumps(about, indent=1))


def acts(row: dict[str, Any]) -> bool:
    """Returns whether a stored rollout called a tool or answered at least once."""
    return row["stop"] == "answer" or any(turn["tool"] for turn in row["turns"])


def ends(row: dict[str, Any]) -> bool:
    """Returns whether a stored rollout ended in an answer, or by a tool that ends episodes."""
    return row["stop"] in ("answer", "over")


def stored(run: Path, name: str) -> list[dict[str, Any]]:
    """Returns the rows of trajectories/`name`.jsonl.gz; none without the file. Raises Fault."""
    path = run / "trajectories" / f"{name}.jsonl.gz"
    try:
        with gzip.open(path, "rt") as file:
            return [decoded(line) for line in file]
    except FileNotFoundError:
        return []
    except (OSError, EOFError, ValueError):
        raise Fault(f"{path} is cut short or damaged; move it away") from None


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
    start = ColdStart(demos)
    inspo.train(cfg, start, learner=Demonstrated)
    with one_line():
        if run := start.run:
            run.write("cold_start.md", (table := start.table(run.path)) + "\n")
            print(f"\n{table}\n\nstart a run from it with --model {run.path / 'policy'}")


if __name__ == "__main__":
    main()
