"""Instruction + question -> trajectory: the multi-turn loop with tools (§2.1, Alg.1 L6).

Tokens in, tokens out: a trajectory keeps the ids and log-probabilities that the engine sampled. Text is decoded only
to find a call or an answer in it and is never encoded again, so the trainer scores exactly what was sampled.

Turns do not wait for each other: a tool is called when its turn ends, and the next turn starts when the result is
back, while other rows generate. Only an engine in `lockstep` waits for all results, which makes its runs repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from config import Config
from data import Question, last_answer
from engines import Engine
from outside import as_data, control
from tools import Tool, find_call, invalid_action, tags_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

TOKEN_CHARACTERS = 128  # no text that is worth reading has longer tokens; the rest need not be tokenized to be cut


@dataclass(frozen=True)
class Job:
    """One rollout to play: a question asked under an instruction."""

    instruction: int  # its id in the population
    text: str  # the instruction itself
    question: Question
    group: int  # the draw it belongs to; trajectories of one group are compared (Eq. 3)


@dataclass
class Turn:
    """One action a_k and its observation o_k, as text."""

    text: str
    tool: str = ""  # tag of the tool it called; "" if it called none
    argument: str = ""
    result: list[str] | None = None  # None if nothing was returned: a call in the last turn is not served


@dataclass
class Trajectory:
    """One rollout tau = (I, q, a_0, o_0, ..., a_k) (§2.1). The lists ids, mask and logps have one length."""

    instruction: int
    question: Question
    group: int
    ids: list[int]  # prompt, actions and observations
    prompt_tokens: int
    mask: list[int] = field(default_factory=list)  # I_{i,t} of Eq. 2: 1 on the tokens that the policy sampled
    logps: list[float] = field(default_factory=list)  # the engine's log-probabilities; 0 where mask is 0
    acted: list[int] = field(default_factory=list)  # how many tokens each turn sampled
    turns: list[Turn] = field(default_factory=list)
    stop: str = ""  # why it ended: "answer", "turns" (none left), "length" (context full)
    response: str = ""  # everything after the prompt
    prediction: str | None = None
    reward: float = 0.0  # r(tau)
    advantage: float = 0.0  # A-hat
    credit: list[float] = field(default_factory=list)  # A-hat of each turn, where an objective tells turns apart
    watched: bool = False  # the update notes what it sees of its action tokens
    tokens: dict[str, list[float]] = field(default_factory=dict)  # that, by name: see grpo.note_tokens

    def act(self, ids: list[int], logps: list[float]) -> None:
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logps += logps
        self.acted.append(len(ids))

    def observe(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logps += [0.0] * len(ids)

    def served(self, tool: str) -> int:
        """Returns how many calls of this tool were answered."""
        return sum(turn.tool == tool and turn.result is not None for turn in self.turns)

    @property
    def invalid(self) -> int:
        """Turns that neither called a tool nor answered."""
        return sum(not turn.tool for turn in self.turns) - (self.stop == "answer")

    def outcome(self) -> Trajectory:
        """Returns a copy for scores alone: without tokens, texts and passages."""
        turns = [Turn("", turn.tool, "", turn.result and []) for turn in self.turns]
        return replace(self, ids=[], mask=[], logps=[], acted=[], turns=turns, response="")

    def record(self) -> dict[str, Any]:
        """Returns a row for `trajectories/`: everything but the token arrays."""
        return {
            "instruction": self.instruction, "question": self.question.id, "question_text": self.question.text,
            "source": self.question.source, "group": self.group, "stop": self.stop,
            "reward": self.reward, "advantage": self.advantage, "credit": self.credit, "prediction": self.prediction,
            "golds": self.question.golds, "invalid": self.invalid, "prompt_tokens": self.prompt_tokens,
            "action_tokens": sum(self.mask), "tokens": len(self.ids), "turns": [asdict(turn) for turn in self.turns],
            "response": self.response,
        }  # fmt: skip


def spread(n: int, k: int) -> list[int]:
    """Returns at most k of the places 0..n-1, evenly spaced: a sample that needs no dice."""
    return [j * n // k for j in range(k)] if k < n else list(range(n))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text, without the special tokens that a tokenizer puts around it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def prompt_ids(tokenizer: Tokenizer, instruction: str, question: str, tags: tuple[str, ...] = ()) -> list[int]:
    """Returns the ids of the chat template with instruction and question (§3 of Search-R1, App. F).

    Both are data: no control token comes of them, and no tag of `tags` of the question.
    """
    instruction = as_data(instruction, control(tokenizer, simple=True))  # it names the agent's tags
    question = as_data(question, control(tokenizer, tags))
    message = {"role": "user", "content": f"{instruction}\n\nQuestion: {question}\n"}
    return encode(tokenizer, tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))


def observation_ids(
    tokenizer: Tokenizer, tool: Tool, result: list[str], limit: int, tags: tuple[str, ...] = ()
) -> list[int]:
    """Returns a tool's result in its tag as at most `limit` ids; a long one loses its end, not its closing tag.

    The result is data: it cannot close the tag, nor write one of `tags` or a control token.
    """
    pattern = control(tokenizer, (tool.result_tag, *tags))
    shown = tool.show([as_data(text, pattern) for text in result])[: limit * TOKEN_CHARACTERS]
    head = encode(tokenizer, f"\n\n<{tool.result_tag}>{shown}")
    end = encode(tokenizer, f"</{tool.result_tag}>\n\n")
    return head[: max(0, limit - len(end))] + end


def rollout(
    engine: Engine,
    tokenizer: Tokenizer,
    tools: Sequence[Tool],
    jobs: Sequence[Job],
    cfg: Config,
    *,
    temperature: float,
    seed: int,
    progress: Callable[[int], None] = lambda ended: None,
) -> list[Trajectory]:
    """Returns a trajectory for each job, in their order; `temperature` 0 is greedy.

    `progress` is told, after every one, how many have ended.
    Raises ToolDown when a tool stays away: a trajectory without its results is never scored.
    """
    taus: list[Trajectory] = []
    for first in range(0, len(jobs), engine.max_rows):
        some = jobs[first : first + engine.max_rows]
        count = lambda ended, first=first: progress(first + ended)  # noqa: E731
        played = play(engine, tokenizer, tools, some, cfg, _at_once(len(some)), temperature, seed + first, count)
        taus += [played[k] for k in range(len(some))]
    return taus


def _at_once(n: int) -> Callable[[int], Sequence[int]]:
    """Returns a `deal` for `play` that hands out n jobs with its first answer."""
    hands = iter([range(n)])
    return lambda in_play: next(hands, [])


def play(
    engine: Engine,
    tokenizer: Tokenizer,
    tools: Sequence[Tool],
    jobs: Sequence[Job],
    cfg: Config,
    deal: Callable[[int], Sequence[int]],
    temperature: float,
    seed: int,
    progress: Callable[[int], None] = lambda ended: None,
) -> dict[int, Trajectory]:
    """Returns the trajectories of those jobs that `deal` hands out, by place in `jobs`.

    `deal` is asked again and again: it is told how many rows are in play and returns the places of jobs to start.
    """
    by_tag, tags = {tool.tag: tool for tool in tools}, tags_of(tools)
    max_turns = cfg.max_turns if tools else 0  # without tools there is the turn to answer alone
    invalid = encode(tokenizer, invalid_action(tools))
    prompts: dict[tuple[str, str], list[int]] = {}
    taus: dict[int, Trajectory] = {}

    engine.begin(seed)
    ready: list[int] = []  # rows whose next turn can start
    generating = ended = 0  # rows in the engine; trajectories that have ended
    waiting: dict[int, Future[list[str]] | None] = {}  # row -> its tool's result; None after an invalid turn
    while True:
        for k in deal(len(ready) + generating + len(waiting)):
            job = jobs[k]
            if (job.text, job.question.text) not in prompts:
                prompts[job.text, job.question.text] = prompt_ids(tokenizer, job.text, job.question.text, tags)
            taus[k] = Trajectory(job.instruction, job.question, job.group, [], 0)
            taus[k].observe(prompts[job.text, job.question.text])
            taus[k].prompt_tokens = len(taus[k].ids)
            ready.append(k)
        if not (ready or generating or waiting):
            break
        for k in ready:
            if len(taus[k].ids) > cfg.max_prompt:  # CHOICE-20
                taus[k].stop = "length"
                ended += 1
        contexts = {k: taus[k].ids for k in ready if not taus[k].stop}
        generating += len(contexts)
        # A row calls its tool the moment its turn ends, while other rows still generate.
        for k, ids, logps in engine.generate(contexts, cfg.max_response, temperature):
            generating -= 1
            tau = taus[k]
            tau.act(ids, logps)
            turn = Turn(tokenizer.decode(ids, skip_special_tokens=False))
            tau.turns.append(turn)
            tau.prediction = last_answer(turn.text)
            call = find_call(turn.text, tools)
            if tau.prediction is not None:
                tau.stop = "answer"
            elif call:
                turn.tool, turn.argument = call[0].tag, call[1]
            if not tau.stop and len(tau.turns) > max_turns:  # CHOICE-1 CHOICE-21
                tau.stop = "turns"
            if tau.stop:
                ended += 1
                progress(ended)
            else:
                waiting[k] = by_tag[turn.tool].submit(turn.argument) if turn.tool else None

        ready = _returned(waiting, everyone=engine.lockstep, idle=not generating)
        for k in ready:
            tau, result = taus[k], waiting.pop(k)
            if result is None:
                tau.observe(invalid)
            else:
                turn = tau.turns[-1]
                turn.result = result.result()
                ids = observation_ids(tokenizer, by_tag[turn.tool], turn.result, cfg.max_observation, tags)
                tau.observe(ids)

    for tau in taus.values():
        tau.response = tokenizer.decode(tau.ids[tau.prompt_tokens :], skip_special_tokens=False)
    return taus


def _returned(waiting: dict[int, Future[list[str]] | None], everyone: bool, idle: bool) -> list[int]:
    """Returns the rows whose result is back, in the order of the jobs.

    `everyone` waits for all of them, which makes the next batch independent of timing; an idle engine waits for one.
    """
    calls = [result for result in waiting.values() if result]
    if everyone or (idle and len(calls) == len(waiting)):
        wait(calls, return_when=ALL_COMPLETED if everyone else FIRST_COMPLETED)
    return sorted(k for k, result in waiting.items() if result is None or result.done())
