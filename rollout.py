"""Instruction + question -> trajectories: the multi-turn loop with the search tool (§2.1, Alg.1 L6).

Tokens in, tokens out: a trajectory keeps the ids and log-probabilities that the engine sampled. Text is decoded
only to find the query or the answer in it, and never encoded again, so the trainer scores exactly what was sampled.

There is no barrier between turns: a search is sent when its turn has ended and the next turn begins when the search is
back, while other rows generate. Only an engine in `lockstep` waits for all searches, which makes runs repeatable.
"""

import queue
import re
import threading
import time
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field

import requests

from data import Question, last_answer

STOP = ("</search>", "</answer>")  # generation ends after either; the tag stays in the text
INVALID = (
    "\n\nThat was neither a search nor an answer. Write <search> query </search> or <answer> answer </answer>.\n\n"
)


@dataclass
class Trajectory:
    """One rollout tau = (I, q, a_0, o_0, ..., a_k) as tokens (§2.1). Lists ids, mask and logps have one length."""

    instruction: int  # id in the population
    question: str  # id in the data
    group: int  # (instruction, question, draw): never shared by two draws, whatever their text
    ids: list[int]  # prompt, actions and observations
    prompt_tokens: int
    mask: list[int] = field(default_factory=list)  # I_{i,t} of Eq. 2: 1 on tokens that the policy sampled
    logps: list[float] = field(default_factory=list)  # the engine's log-probabilities; 0 where mask is 0
    turns: list[dict] = field(default_factory=list)  # what was done: text, query, documents
    asked: int = 0  # searches the policy wrote
    served: int = 0  # searches that were answered (one in the last turn is not)
    invalid: int = 0  # turns that were neither a search nor an answer
    stop: str = ""  # "answer", "turns", "length" (context full)
    response: str = ""  # everything after the prompt
    prediction: str | None = None
    reward: float = 0.0

    def act(self, ids: list[int], logps: list[float]) -> None:
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logps += logps

    def observe(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logps += [0.0] * len(ids)

    def record(self) -> dict:
        """A JSON row for `trajectories/`: everything but the token arrays."""
        row = asdict(self)
        for key in ("ids", "mask", "logps"):
            del row[key]
        return row | {"action_tokens": sum(self.mask), "tokens": len(self.ids)}


def prompt_ids(tokenizer, instruction: str, question: str) -> list[int]:
    """The chat template of instruction and question, as token ids (§3 of Search-R1, App. F)."""
    message = {"role": "user", "content": f"{instruction}\n\nQuestion: {question}\n"}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def observation(documents: list[str]) -> str:
    """The retrieved passages as the policy reads them; `documents` are `"Title"\\ntext` (App. F)."""
    shown = []
    for k, contents in enumerate(documents, 1):
        title, _, text = contents.partition("\n")
        shown.append(f"Doc {k}(Title: {title.strip().strip(chr(34))}) {text.strip()}")
    return "\n\n<information>" + "\n".join(shown) + "</information>\n\n"


def observation_ids(tokenizer, documents: list[str], limit: int) -> list[int]:
    """`observation` as at most `limit` ids, cut inside the tag so that `</information>` always survives."""
    head, tail = observation(documents).rsplit("</information>", 1)
    ids = tokenizer(head, add_special_tokens=False)["input_ids"]
    end = tokenizer("</information>" + tail, add_special_tokens=False)["input_ids"]
    return ids[: max(0, limit - len(end))] + end


def query_of(text: str) -> str | None:
    """The query of a turn that ends in a complete `<search>`; None where the turn is no search."""
    found = re.search(r"<search>((?:(?!<search>).)*?)</search>", text, re.S)
    return found.group(1).strip() if found else None


def rollout(
    engine,
    tokenizer,
    search,
    jobs: list[tuple[int, str, Question, int]],
    *,
    max_turns: int,
    max_response: int,
    max_observation: int,
    max_prompt: int,
    temperature: float,
    seed: int,
    progress=lambda n: None,
) -> list[Trajectory]:
    """One trajectory for each job (instruction id, instruction, question, group), in the order of `jobs`.

    `max_response` and `max_observation` are tokens a turn; a context of more than `max_prompt` tokens gets no further
    turn. `temperature` 0 is greedy.
    Raises SearchDown when the search server stays away: a trajectory without its results is never scored.
    """
    done = []
    for first in range(0, len(jobs), engine.max_rows):
        done += _rollout(
            engine, tokenizer, search, jobs[first : first + engine.max_rows],
            max_turns, max_response, max_observation, max_prompt, temperature, seed + first,
        )  # fmt: skip
        progress(len(done))
    return done


def _rollout(engine, tokenizer, search, jobs, max_turns, max_response, max_observation, max_prompt, temperature, seed):
    invalid = tokenizer(INVALID, add_special_tokens=False)["input_ids"]
    trajectories = []
    encoded: dict[tuple[str, str], list[int]] = {}
    for instruction, text, question, group in jobs:
        if (text, question.text) not in encoded:
            encoded[text, question.text] = prompt_ids(tokenizer, text, question.text)
        ids = encoded[text, question.text]
        tau = Trajectory(instruction, question.id, group, list(ids), len(ids), [0] * len(ids), [0.0] * len(ids))
        trajectories.append(tau)

    engine.begin(seed)
    ready = list(range(len(trajectories)))  # rows whose next turn begins
    generating = 0  # rows that the engine is at work on
    waiting: dict[int, Future | None] = {}  # row -> its search; None where it asked for none
    while ready or generating or waiting:
        for k in ready:
            if len(trajectories[k].ids) > max_prompt:
                trajectories[k].stop = "length"
        contexts = {k: trajectories[k].ids for k in ready if not trajectories[k].stop}
        generating += len(contexts)
        # A row's search is sent the moment its turn ends, while the other rows still generate.
        for k, ids, logps in engine.generate(contexts, max_response, temperature):
            generating -= 1
            tau = trajectories[k]
            tau.act(ids, logps)
            text = tokenizer.decode(ids, skip_special_tokens=False)
            tau.turns.append({"text": text})
            tau.prediction = last_answer(text)  # of what it wrote: INVALID and passages may hold an <answer> too
            if tau.prediction is not None:
                tau.stop = "answer"
                continue
            query = query_of(text)
            tau.asked += query is not None
            tau.invalid += query is None
            if len(tau.turns) > max_turns:  # CHOICE-1: `max_turns` searches, then one turn to answer
                tau.stop = "turns"
            elif query is None:
                waiting[k] = None
            else:
                tau.turns[-1]["query"] = query
                waiting[k] = search.submit(query[:4096])  # more than the server takes

        ready = _back(waiting, everyone=engine.lockstep, idle=not generating)
        for k in ready:
            tau, result = trajectories[k], waiting.pop(k)
            if result is None:
                tau.observe(invalid)
            else:
                documents = result.result()
                tau.turns[-1]["documents"] = documents
                tau.served += 1
                tau.observe(observation_ids(tokenizer, documents, max_observation))

    for tau in trajectories:
        tau.response = tokenizer.decode(tau.ids[tau.prompt_tokens :], skip_special_tokens=False)
    return trajectories


def _back(waiting: dict[int, Future | None], everyone: bool, idle: bool) -> list[int]:
    """Rows whose search is back, in the order of the jobs: all of them, or those that are back by now.

    `everyone` makes the next turn's batch independent of timing. An idle engine waits for at least one.
    """
    searches = [result for result in waiting.values() if result]
    if everyone or (idle and len(searches) == len(waiting)):
        wait(searches, return_when=ALL_COMPLETED if everyone else FIRST_COMPLETED)
    return sorted(k for k, result in waiting.items() if result is None or result.done())


class EngineFault(Exception):
    """The engine does not answer, or it samples from another policy than the trainer trains."""


class SearchDown(Exception):
    """The search server did not answer within all retries."""


class Search:
    """Client of POST /retrieve: queries in, passages out.

    One thread sends whatever has queued up since its last request as one request, so batches form by themselves
    under load and a lone query leaves at once; a query that is already under way is not sent again. `url` may name
    several servers, with commas: after a fault that can pass (connection, timeout, 5xx) the next one is asked. When
    all have failed they are tried again, with exponential back-off or after the seconds of Retry-After; `revive` is
    called before (the run restarts its own server there) and may give a new URL. After `retries` such rounds the
    futures raise SearchDown.
    """

    def __init__(self, url: str, topk: int, timeout: float = 30, retries: int = 6, revive=lambda: ""):
        self.urls = [u.strip().rstrip("/") for u in url.split(",")]  # the first is in use
        self.topk, self.timeout, self.retries, self.revive = topk, timeout, retries, revive
        self.faults = 0  # requests that failed, for the metrics
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy from the environment would be asked even for loopback
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._under_way: dict[str, Future] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._send_batches, daemon=True).start()

    def submit(self, query: str) -> Future:
        """A Future of the passages' `contents`, best first."""
        with self._lock:
            if query not in self._under_way:
                self._under_way[query] = Future()
                self._queue.put(query)
            return self._under_way[query]

    def _send_batches(self) -> None:
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty() and len(batch) < 256:
                batch.append(self._queue.get())
            try:
                results, fault = self._retrieve(batch), None
            except Exception as e:  # reaches the caller through its futures
                results, fault = [None] * len(batch), e
            with self._lock:
                futures = [self._under_way.pop(query) for query in batch]
            for future, documents in zip(futures, results, strict=True):
                if fault:
                    future.set_exception(fault)
                else:
                    future.set_result(documents)

    def _retrieve(self, queries: list[str]) -> list[list[str]]:
        body = {"queries": queries, "topk": self.topk, "return_scores": True}
        pause = 0.0  # what the servers asked for
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(max(pause, min(8.0, 0.25 * 2**attempt)))
                try:
                    self.urls[0] = (self.revive() or self.urls[0]).rstrip("/")
                except SystemExit as e:  # in this thread it would end nothing but the thread, and the run would wait
                    raise SearchDown(f"{self.urls[0]}: {e}") from None
                pause = 0.0
            for _ in self.urls:
                answer, fault = self._post(body)
                if not fault:
                    return self._documents(answer, len(queries))
                self.faults += 1
                after = "" if answer is None else answer.headers.get("Retry-After", "")
                pause = max(pause, min(60.0, float(after)) if after.isdecimal() else 0.0)
                self.urls.append(self.urls.pop(0))
        raise SearchDown(f"{' and '.join(self.urls)}/retrieve: {fault}, {self.retries + 1} times")

    def _post(self, body: dict) -> tuple[requests.Response | None, str]:
        """The answer of the server in use, and the fault if it is one that can pass."""
        try:
            timeout = (min(5, self.timeout), self.timeout)  # to connect, to answer
            answer = self._http.post(f"{self.urls[0]}/retrieve", json=body, timeout=timeout)
            return answer, f"HTTP {answer.status_code}" if answer.status_code >= 500 else ""
        except requests.RequestException as e:
            return None, type(e).__name__

    def _documents(self, answer: requests.Response, n: int) -> list[list[str]]:
        """The passages of n queries; SearchDown where the answer is not Search-R1's."""
        try:
            answer.raise_for_status()
            rows = answer.json()["result"]
            if len(rows) != n:
                raise ValueError(f"{len(rows)} results for {n} queries")
            documents = [[hit["document"]["contents"] for hit in hits] for hits in rows]
            if not all(isinstance(contents, str) for hits in documents for contents in hits):
                raise TypeError("contents that are no text")
            return documents
        except (requests.RequestException, ValueError, KeyError, TypeError) as e:
            raise SearchDown(f"{self.urls[0]}/retrieve: not a Search-R1 answer ({type(e).__name__}: {e})") from e
