"""The methods of Table 1, by name: each a short function that plays questions; those that train, with their command.

    python evaluate.py Qwen/Qwen2.5-3B-Instruct --method ircot --data hotpotqa
    python baselines.py sft --model qwen2.5-3b --train train.parquet --test test.parquet --out runs/sft
    python baselines.py grpo --model qwen2.5-3b ...      # and sft_reject, search_r1, inspo: with inspo.py's flags

All play with the same engines, search client and scoring. The paper takes its baselines' figures from Search-R1 (arXiv
2503.09516), whose authors name the sources (issue 91 there); prompts here are restated, not copied, and every docstring
says what else differs. The paper's methods without training use instruct models, those with training base models.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from config import Config, parse
from tasks.questions import Question, last_answer
from engines import Engine, FinishedTurn
from extras.prompts import Prompt, Wording, wording
from plumbing.faults import one_line
from rollout import Job, Trajectory, Turn, encode, rollout
from tasks.tools import Search, make_tools, stop_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

# ---- playing

Documents = list[str]


@dataclasses.dataclass
class Agent:
    """What a method plays with. `instruction`: of the methods that have one; `seed`: of the samples."""

    engine: Engine
    tokenizer: Tokenizer
    search: Search
    cfg: Config
    words: Wording
    instruction: str
    temperature: float = 0.0
    seed: int = 0

    def ids(self, prompt: Prompt, **slots: object) -> list[int]:
        """Returns the ids of the chat template with the user's part, and of the reply's beginning after them."""
        message = {"role": "user", "content": prompt.user.format(**slots)}
        text = self.tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        return encode(self.tokenizer, str(text) + prompt.reply.format(**slots))

    def say(self, contexts: dict[int, list[int]], max_new: int) -> dict[int, FinishedTurn]:
        """Returns one turn for each context (key -> ids); a context longer than `max_prompt` gets none."""
        fitting = {k: ids for k, ids in contexts.items() if len(ids) <= self.cfg.max_prompt}
        keys, done = list(fitting), dict[int, FinishedTurn]()
        for first in range(0, len(keys), self.engine.max_rows):
            some = {k: fitting[k] for k in keys[first : first + self.engine.max_rows]}
            self.engine.begin(self.seed + first)
            waiting, turns = some, 0
            while turns < len(some):
                for turn in self.engine.generate(waiting, max_new, self.temperature):
                    done[turn.key], turns = turn, turns + 1
                waiting = {}
        return done

    def text(self, turn: FinishedTurn) -> str:
        return str(self.tokenizer.decode(turn.ids, skip_special_tokens=True)).strip()

    def retrieve(self, queries: dict[int, str], taus: list[Trajectory]) -> dict[int, Documents]:
        """Returns the passages for each query, all asked at once; each is a search of its trajectory."""
        futures = {k: self.search.submit(query) for k, query in queries.items()}
        found = {k: future.result() for k, future in futures.items()}
        for k, documents in found.items():
            taus[k].turns.append(Turn("", self.search.tag, queries[k], documents))
        return found

    def show(self, documents: Documents) -> str:
        """Returns passages as text of at most `max_observation` tokens each."""
        limit = self.cfg.max_observation
        cut = [self.tokenizer.decode(encode(self.tokenizer, text)[:limit]) for text in documents]
        return self.search.show(cut if any(len(encode(self.tokenizer, d)) > limit for d in documents) else documents)


def begin(questions: list[Question]) -> list[Trajectory]:
    return [Trajectory(0, q, k, [], 0) for k, q in enumerate(questions)]


def answer_of(text: str) -> str:
    r"""Returns the answer in a reply: the last \boxed{}, <answer>, or what follows "answer is:"; else all of it."""
    boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    if boxed:
        return re.sub(r"\\text\{([^{}]*)\}", r"\1", boxed[-1]).strip()
    tagged = last_answer(text)
    if tagged is not None:
        return tagged
    return text.rpartition("nswer is:")[2].strip().rstrip(".").strip()


def one_turn(agent: Agent, taus: list[Trajectory], contexts: dict[int, list[int]], max_new: int) -> None:
    """Plays a turn for every trajectory and takes its answer from it; one whose context is too long has none."""
    for k, ids in contexts.items():
        taus[k].observe(ids)
        taus[k].prompt_tokens, taus[k].stop = len(ids), "length"
    for k, turn in agent.say(contexts, max_new).items():
        taus[k].act(turn.ids, turn.logps)
        taus[k].response, taus[k].stop = agent.text(turn), "answer"
        taus[k].prediction = answer_of(taus[k].response)


def direct(agent: Agent, questions: list[Question]) -> list[Trajectory]:
    """Asks without documents, for 32 tokens at most; without tags the whole reply is the answer.

    After FlashRAG's zero-shot (examples/methods/run_exp.py, MIT). Restated: one message for system and user, and the
    answer in tags, so that `sft` trains what all other methods are scored by.
    """
    taus = without_tools(agent, questions, agent.words.direct, 32)
    for tau in taus:
        tau.prediction, tau.stop = answer_of(tau.response), "answer"
    return taus


def without_tools(agent: Agent, questions: list[Question], instruction: str, max_response: int) -> list[Trajectory]:
    """Returns the trajectories of one turn each."""
    cfg = dataclasses.replace(agent.cfg, max_response=max_response)
    jobs = [Job(0, instruction, q, k) for k, q in enumerate(questions)]
    return rollout(agent.engine, agent.tokenizer, [], jobs, cfg, temperature=agent.temperature, seed=agent.seed)


def rag(agent: Agent, questions: list[Question]) -> list[Trajectory]:
    """Retrieves once with the question and answers from the passages, in 32 tokens at most.

    After FlashRAG's naive generation (flashrag/prompt/base_prompt.py, MIT), with `topk` passages: 3, where it has 5.
    """
    taus = begin(questions)
    found = agent.retrieve({k: q.text for k, q in enumerate(questions)}, taus)
    shown = {k: agent.show(documents) for k, documents in found.items()}
    prompts = {k: agent.ids(agent.words.rag, question=taus[k].question.text, documents=shown[k]) for k in shown}
    one_turn(agent, taus, prompts, 32)
    return taus


def ircot(agent: Agent, questions: list[Question], steps: int = 5) -> list[Trajectory]:
    """Reasons a sentence at a time and retrieves with each sentence, `steps` times at most.

    After IRCoT (StonyBrookNLP/ircot, Apache-2) as FlashRAG plays it (active_pipeline.py, 5 steps in run_exp.py, MIT).
    Restated: one demonstration of our own; passages stand in the order of retrieval, each once (FlashRAG sorts them by
    ascending score); without "So the answer is:" all thoughts are the answer, as there.
    """
    taus, thoughts = begin(questions), dict.fromkeys(range(len(questions)), "")
    documents: dict[int, dict[str, None]] = {k: {} for k in thoughts}
    queries = {k: q.text for k, q in enumerate(questions)}
    for _ in range(steps):
        for k, found in agent.retrieve(queries, taus).items():
            documents[k] |= dict.fromkeys(found)
        contexts = {}
        for k in queries:
            shown = agent.show(list(documents[k]))
            contexts[k] = agent.ids(
                agent.words.ircot, question=taus[k].question.text, documents=shown, thoughts=thoughts[k]
            )
            taus[k].observe(contexts[k])
            taus[k].prompt_tokens = taus[k].prompt_tokens or len(contexts[k])
        queries = {}
        for k, turn in agent.say(contexts, agent.cfg.max_response).items():
            taus[k].act(turn.ids, turn.logps)
            thought = agent.text(turn)
            thoughts[k] += f" {thought}"
            if "nswer is:" in thought or last_answer(thought) is not None:
                taus[k].stop = "answer"
            else:
                queries[k] = re.sub(r"</?\w+>", " ", thought).strip() or taus[k].question.text
        if not queries:
            break
    for k, tau in enumerate(taus):
        tau.response, tau.prediction = thoughts[k].strip(), answer_of(thoughts[k])
        tau.stop = tau.stop or "turns"
    return taus


def search_o1(agent: Agent, questions: list[Question]) -> list[Trajectory]:
    """Reasons with searches in the middle; a second prompt reads the passages and puts its notes into the reasoning.

    After Search-o1 (sunnynexus/Search-o1, scripts/run_search_o1.py, MIT): 5 searches for questions of one hop, 10 for
    others; a query that was asked before is not searched again. Restated: `topk` passages for 10, the sampling of all
    other methods for temperature 0.7, `max_response` tokens a turn, and prompts of our own.
    """
    taus, end = begin(questions), agent.words.query[1]
    limit = [5 if q.hops == 1 else 10 for q in questions]
    for tau, searches in zip(taus, limit, strict=True):
        tau.observe(agent.ids(agent.words.search_o1, question=tau.question.text, searches=searches))
        tau.prompt_tokens = len(tau.ids)
    active = set(range(len(taus)))
    for _ in range(max(limit, default=0) + 1):
        queries: dict[int, str] = {}
        turns = agent.say({k: taus[k].ids for k in sorted(active)}, agent.cfg.max_response)
        for k in active - set(turns):
            taus[k].stop = "length"
        for k, turn in turns.items():
            tau = taus[k]
            tau.act(turn.ids, turn.logps)
            text = agent.text(turn)
            tau.response += text
            asked = {past.argument for past in tau.turns}
            query = text.rpartition(agent.words.query[0])[2].partition(end)[0].strip() if end in text else ""
            if not query:
                tau.stop, tau.prediction = "answer", answer_of(tau.response)
            elif query in asked or len(tau.turns) >= limit[k]:
                note = "Searched before: see above." if query in asked else "No search is left: answer."
                tau.observe(encode(agent.tokenizer, agent.words.result[0] + note + agent.words.result[1]))
            else:
                queries[k] = query
        found = agent.retrieve(queries, taus)
        notes = {
            k: agent.ids(
                agent.words.read, question=queries[k], documents=agent.show(documents), thoughts=taus[k].response
            )
            for k, documents in found.items()
        }
        for k, turn in agent.say(notes, agent.cfg.max_response).items():
            read = agent.text(turn).partition(agent.words.read_end)[0].rpartition("Final Information:")[2]
            note = agent.words.result[0] + re.sub(r"</?\w+>", "", read).strip() + agent.words.result[1]
            taus[k].observe(encode(agent.tokenizer, note)[: agent.cfg.max_observation])
            taus[k].response += note
        active = {k for k in active if not taus[k].stop}
        if not active:
            break
    for k in active:
        taus[k].stop = "turns"
    return taus


def grpo(agent: Agent, questions: list[Question]) -> list[Trajectory]:
    """Reasons in one turn without tools, as Search-R1's R1 baseline does (issues 69 and 91 there)."""
    return without_tools(agent, questions, agent.words.grpo, agent.cfg.max_response)


def search_r1(agent: Agent, questions: list[Question]) -> list[Trajectory]:
    """Plays the multi-turn loop under one instruction: Search-R1 under its own, INSPO under I_star."""
    tools = make_tools(agent.cfg, agent.search)
    jobs = [Job(0, agent.instruction, q, k) for k, q in enumerate(questions)]
    return rollout(
        agent.engine, agent.tokenizer, tools, jobs, agent.cfg, temperature=agent.temperature, seed=agent.seed
    )  # fmt: skip


class Method(NamedTuple):
    """A row of Table 1: how it plays, and the strings that end its turns."""

    play: Callable[[Agent, list[Question]], list[Trajectory]]
    stop: Callable[[Config, Wording], tuple[str, ...]]


def _loop(cfg: Config, words: Wording) -> tuple[str, ...]:
    return stop_strings(make_tools(cfg, Search.__new__(Search)))


METHODS = {
    "direct": Method(direct, lambda cfg, words: ("</answer>",)),
    "sft": Method(direct, lambda cfg, words: ("</answer>",)),  # supervised on the gold answers to the same prompt
    "grpo": Method(grpo, lambda cfg, words: ("</answer>",)),
    "ircot": Method(ircot, lambda cfg, words: words.sentence_ends),
    "rag": Method(rag, lambda cfg, words: ("</answer>",)),
    "sft_reject": Method(search_r1, _loop),  # supervised on its own correct rollouts
    "search_o1": Method(search_o1, lambda cfg, words: (words.query[1], "</answer>")),
    "search_r1": Method(search_r1, _loop),
    "inspo": Method(search_r1, _loop),
}


# ---- training

TRAINED = {  # method -> flags that make inspo.py's run the method's
    "sft": "--mode static --tools none",
    "grpo": "--mode static --tools none",
    "sft_reject": "--mode static",
    "search_r1": "--mode static",
    "inspo": "",
}


def config_of(method: str, flags: list[str]) -> Config:
    """Returns the configuration in which a method trains; writes the instruction of one that has its own to a file."""
    cfg = parse([*TRAINED[method].split(), *flags])
    if method in ("sft", "grpo"):
        file = Path(f"{cfg.out or Path('runs') / method}.instruction.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(getattr(wording(cfg.model), "direct" if method == "sft" else "grpo") + "\n")
        cfg = dataclasses.replace(cfg, instruction=str(file))
    if method.startswith("sft"):
        cfg = dataclasses.replace(cfg, mode="supervised", beta=0.0, loss_agg="token", mini=cfg.batch)
    return cfg


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=TRAINED)
    args, flags = parser.parse_known_args(argv)
    with one_line("baselines.py"):
        cfg = config_of(args.method, flags)
        from extras.supervised import supervised
        from inspo import inspo, train

        train(cfg, supervised if cfg.mode == "supervised" else inspo)


if __name__ == "__main__":
    main()
