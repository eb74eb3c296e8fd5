"""Instruction + question -> trajectory: the multi-turn loop with tools (§2.1, Alg.1 L6).

Tokens in, tokens out: a trajectory keeps the ids and log-probabilities that the engine sampled.
Text is decoded only to find a call or an answer in it and is never encoded again, so the trainer
scores exactly what was sampled.

Turns do not wait for each other: a tool is called when its turn ends, and the next turn starts when
the result is back, while others generate. Only an engine in `lockstep` waits for all results, which
makes its runs repeatable.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from functools import cache, partial
from typing import TYPE_CHECKING

from config import RolloutKnobs
from engines import Engine
from tasks import Job, Task, Trajectory, Turn
from tasks.tools import Action, Tags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


class Episode:
    """A trajectory while it is played: the policy acts, a tool may be called, and the policy reads
    the result."""

    action: Action  # of the latest turn
    call: Future[list[str]] | None = None  # to wait for, before the next turn
    last_turn = False  # the context has room for only one more

    def __init__(self, task: Task, form: Tags, job: Job, prompt: list[int], cfg: RolloutKnobs):
        self.form = form
        self.cfg = cfg
        self.calling_turns = cfg.max_turns if task.tools else 0  # one more, to answer, follows them
        self.tau = Trajectory(
            job.instruction_id,
            job.question,
            job.group,
            [],
            len(prompt),
            # of a copy of the question, which an episode may change
            state=task.reset(copy.deepcopy(job.question)),
        )
        self.observe(prompt)

    @property
    def ended(self) -> bool:
        # a tool may set tau.stop ("over"): its result is read all the same
        return bool(self.tau.stop) and not self.call

    def act(self, ids: list[int], logps: list[float], stop: str) -> None:
        """Adds a sampled turn: an answer ends the episode, a call is made, anything else gets a
        reminder.

        `stop`: why the engine cannot go on with the episode; "" if it can.
        """
        tau = self.tau
        action = self.action = self.form.read_turn(ids)
        turn = Turn(action.text)
        tau.act(ids, logps)
        tau.turns.append(turn)
        tau.prediction = action.answer
        if action.answer is not None:
            tau.stop = "answer"
            return

        if action.tool:
            turn.tool = action.tool.tag
            turn.argument = action.argument
        # no turn follows, and a call is not served: this was the one to answer
        if stop or self.last_turn or len(tau.turns) > self.calling_turns:  # CHOICE-1 CHOICE-21
            tau.stop = stop or ("length" if self.last_turn else "turns")
        elif action.tool:
            self.call = action.tool.bind(tau).submit(action.argument)
        else:
            self.observe(self.form.encode_reminder(action))

    def receive(self) -> None:
        """Adds the result of the call. Raises ToolDown."""
        assert self.call
        result = self.call.result()
        self.tau.turns[-1].result = result
        self.call = None
        encode = partial(self.form.encode_result, self.action)
        ids = encode(result, self.cfg.max_observation)
        room = self.cfg.max_prompt - len(self.tau.ids)
        # A result is cut to the room that is left, if that holds its tags; else `observe`, given all of
        # it, ends the episode.
        if len(ids) > room and not self.tau.stop:  # CHOICE-20
            if len(encode([], self.cfg.max_observation)) <= room:
                ids = encode(result, room)
                self.last_turn = True
        self.observe(ids)

    def observe(self, ids: list[int]) -> None:
        """Adds what the policy reads before its next turn; an episode without room for one ends."""
        self.tau.observe(ids)
        if len(self.tau.ids) > self.cfg.max_prompt:  # CHOICE-20
            self.tau.stop = self.tau.stop or "length"


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
    Raises ToolDown when a tool stays unavailable: a trajectory without its results is never scored.
    """
    form = task.make_format(tokenizer)  # how calls, answers and results are written
    encode_prompt = cache(form.encode_prompt)
    at_once = min(engine.max_rows, task.at_once)
    taus = []
    ended = 0
    for first in range(0, len(jobs), at_once):
        # as many episodes as fit, played together
        episodes = []
        for job in jobs[first : first + at_once]:
            prompt = encode_prompt(job.instruction, job.question)
            episodes.append(Episode(task, form, job, prompt, cfg))
        engine.reset(seed + first)
        # it yields to be counted: the episodes are changed in place
        for _ in play(engine, task, episodes, cfg.max_response, temperature):
            ended += 1
            progress(ended)

        for e in episodes:
            e.tau.response = form.decode_response(e.tau.ids[e.tau.prompt_tokens :])
            task.finish(e.tau)
            taus.append(e.tau)
    return taus


def play(
    engine: Engine, task: Task, episodes: list[Episode], max_response: int, temperature: float
) -> Iterator[Episode]:
    """Plays episodes at the same time; yields each when it ends."""
    # an engine knows an episode by its place k in the list
    playing = dict(enumerate(episodes))  # those that have not ended
    generating: set[int] = set()  # those whose turn has begun and not ended
    for k, e in enumerate(episodes):
        if e.ended:  # its prompt is too long
            yield playing.pop(k)
    while playing:
        # the turns that begin now: of who neither generates nor waits for a result
        contexts = {}
        for k, e in playing.items():
            if k not in generating and not e.call:
                contexts[k] = e.tau.ids
        generating |= contexts.keys()

        # An episode calls its tool the moment its turn ends, while others still generate.
        for k, ids, logps, stop in engine.generate(contexts, max_response, temperature):
            generating.remove(k)
            episodes[k].act(ids, logps, stop)
            if episodes[k].ended:
                yield playing.pop(k)

        calls = [e.call for e in playing.values() if e.call]
        # A lockstep engine gets all results first: its next batch is independent of timing. Any other
        # waits only where all episodes do. With nothing to wait for, `wait` returns at once.
        if engine.lockstep or len(calls) == len(playing):
            began = time.perf_counter()
            wait(calls, return_when=ALL_COMPLETED if engine.lockstep else FIRST_COMPLETED)
            task.waited += time.perf_counter() - began

        # results that are there
        for k, e in list(playing.items()):
            if e.call and e.call.done():
                e.receive()
                if e.ended:
                    yield playing.pop(k)
