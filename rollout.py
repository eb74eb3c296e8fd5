"""Instruction + question -> trajectory: the multi-turn loop with tools (§2.1, Alg.1 L6).

Tokens in, tokens out: a trajectory keeps the ids and log-probabilities that the engine sampled. Text is decoded only
to find a call or an answer in it and is never encoded again, so the trainer scores exactly what was sampled.

Turns do not wait for each other: a tool is called when its turn ends, and the next turn starts when the result is
back, while other rows generate. Only an engine in `lockstep` waits for all results, which makes its runs repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from config import RolloutKnobs
from engines import Engine
from tasks import Job, Question, Task, Trajectory, Turn
from tasks.formats import Said
from tasks.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def spread(n: int, k: int) -> list[int]:
    """Returns at most k of the places 0..n-1, evenly spaced: a sample that needs no dice."""
    return [j * n // k for j in range(k)] if k < n else list(range(n))


def prompt_ids(tokenizer: Tokenizer, task: Task, instruction: str, question: Question) -> list[int]:
    """Returns the ids of the task's prompt in the chat template."""
    return task.format(tokenizer, task).prompt(instruction, question)


def rollout(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    jobs: Sequence[Job],
    cfg: RolloutKnobs,
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
        played = play(engine, tokenizer, task, some, cfg, _at_once(len(some)), temperature, seed + first, count)
        taus += [played[k] for k in range(len(some))]
    return taus


def _at_once(n: int) -> Callable[[int], Sequence[int]]:
    """Returns a `deal` for `play` that hands out n jobs with its first answer."""
    hands = iter([range(n)])
    return lambda in_play: next(hands, [])


def play(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    jobs: Sequence[Job],
    cfg: RolloutKnobs,
    deal: Callable[[int], Sequence[int]],
    temperature: float,
    seed: int,
    progress: Callable[[int], None] = lambda ended: None,
) -> dict[int, Trajectory]:
    """Returns the trajectories of those jobs that `deal` hands out, by place in `jobs`.

    `deal` is asked again and again: it is told how many rows are in play and returns the places of jobs to start.
    """
    max_turns = cfg.max_turns if task.tools else 0  # without tools there is the turn to answer alone
    form = task.format(tokenizer, task)  # how calls, answers and results are written
    prompts: dict[tuple[str, Question], list[int]] = {}
    tools: dict[int, Sequence[Tool]] = {}  # of each row's episode
    said: dict[int, Said] = {}  # in each row's last turn
    taus: dict[int, Trajectory] = {}

    engine.begin(seed)
    ready: list[int] = []  # rows whose next turn can start
    generating = ended = 0  # rows in the engine; trajectories that have ended
    waiting: dict[int, Future[list[str]] | None] = {}  # row -> its tool's result; None after an invalid turn
    while True:
        for k in deal(len(ready) + generating + len(waiting)):
            job = jobs[k]
            if (job.text, job.question) not in prompts:
                prompts[job.text, job.question] = form.prompt(job.text, job.question)
            taus[k] = Trajectory(job.instruction, job.question, job.group, [], 0)
            taus[k].observe(prompts[job.text, job.question])
            taus[k].prompt_tokens = len(taus[k].ids)
            tools[k] = task.reset(job.question)
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
            said[k] = form.read(ids, tools[k])
            turn, tool = Turn(said[k].text), said[k].tool
            tau.turns.append(turn)
            tau.prediction = said[k].answer
            if tau.prediction is not None:
                tau.stop = "answer"
            elif tool:
                turn.tool, turn.argument = tool.tag, said[k].argument
            if not tau.stop and len(tau.turns) > max_turns:  # CHOICE-1 CHOICE-21
                tau.stop = "turns"
            if tau.stop:
                ended += 1
                progress(ended)
            else:
                waiting[k] = tool.submit(turn.argument) if tool else None

        ready = []
        for k in _returned(waiting, everyone=engine.lockstep, idle=not generating):
            tau, tool, result = taus[k], said[k].tool, waiting.pop(k)
            if tool is None or result is None:
                tau.observe(form.invalid(said[k]))
            else:
                tau.turns[-1].result = found = result.result()
                tau.observe(form.result(said[k], found, cfg.max_observation))
                if tool.over:
                    tau.stop = "over"
                    ended += 1
                    progress(ended)
                    continue
            ready.append(k)

    for k, tau in taus.items():
        tau.response = form.response(tau.ids[tau.prompt_tokens :])
        task.ended(tau, tools[k])
    return taus


def _returned(waiting: dict[int, Future[list[str]] | None], everyone: bool, idle: bool) -> list[int]:
    """Returns the rows whose result is back, in the order of the jobs.

    `everyone` waits for all of them, which makes the next batch independent of timing; an idle engine waits for one.
    """
    calls = [result for result in waiting.values() if result]
    if everyone or (idle and len(calls) == len(waiting)):
        wait(calls, return_when=ALL_COMPLETED if everyone else FIRST_COMPLETED)
    return sorted(k for k, result in waiting.items() if result is None or result.done())
