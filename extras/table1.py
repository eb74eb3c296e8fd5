"""The other methods of Table 1: each a short function that plays search QA; those that train, with
their command.

    python extras/table1.py Qwen/Qwen2.5-3B-Instruct --method ircot --data hotpotqa      # and the flags of evaluate.py
    python extras/table1.py train sft --model qwen2.5-3b --train train.parquet --test test.parquet --out runs/sft
    python extras/table1.py train grpo --model qwen2.5-3b ...      # and sft_reject: with the flags of inspo.py

All play with the same engines, search client and scoring. The paper takes its baselines' figures
from Search-R1 (arXiv 2503.09516), whose authors name the sources (issue 91 there); prompts here are
restated, not copied, and every docstring says what else differs. The paper's methods without
training use instruct models, those with training base models.
"""

if not __package__:
    import root  # noqa: F401
import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from config import STATIC, Config, parse_flags
from engines import FinishedTurn
from evaluate import Agent, find_model, make_parser, run
from extras.bench.harness import play_turns
from extras.prompts import Prompt, wording
from plumbing import stop
from plumbing.chat import apply_template
from plumbing.faults import Fault, one_line
from tasks import Question, Trajectory, Turn
from tasks.search_qa import SearchQA
from tasks.tools import encode, find_answer

# ---- playing

Documents = list[str]
ONE_HOP = ("nq", "triviaqa", "popqa")  # sources whose questions need one fact


class Player(Agent):
    """An agent with what the methods need: their prompts, single turns, searches by the method
    instead of the policy."""

    def __init__(self, *args: Any, **how: Any):
        super().__init__(*args, **how)
        if not isinstance(self.task, SearchQA):
            raise Fault(f"--method {type(self).__name__}: it plays only search QA")
        self.cfg, self.search = self.task.cfg, self.task.search
        self.words = wording(self.cfg.model)

    def under(self, instruction: str, questions: Sequence[Question]) -> list[Trajectory]:
        """Plays the task's own loop under the method's instruction."""
        self.instruction = instruction
        return super().play(questions)

    def ids(self, prompt: Prompt, **slots: object) -> list[int]:
        """Encodes a prompt in the chat template, with the beginning of the reply."""
        message = {"role": "user", "content": prompt.user.format(**slots)}
        return encode(
            self.tokenizer, apply_template(self.tokenizer, [message]) + prompt.reply.format(**slots)
        )

    def turns(self, contexts: dict[int, list[int]], max_new: int) -> dict[int, FinishedTurn]:
        """Samples one turn for each context (key -> ids); one that is too long, or that a server
        refuses, gets none."""
        fitting = {k: ids for k, ids in contexts.items() if len(ids) <= self.cfg.max_prompt}
        keys, done = list(fitting), list[FinishedTurn]()
        for first in range(0, len(keys), self.engine.max_rows):
            some = {k: fitting[k] for k in keys[first : first + self.engine.max_rows]}
            seed = self.seed + first
            done += play_turns(self.engine, some, max_new, self.temperature, seed)
        return {turn.key: turn for turn in done if not turn.stop}

    def text(self, turn: FinishedTurn) -> str:
        return str(self.tokenizer.decode(turn.ids, skip_special_tokens=True)).strip()

    def retrieve(self, queries: dict[int, str], taus: list[Trajectory]) -> dict[int, Documents]:
        """Searches for all queries at once; each is a search of its trajectory."""
        futures = {k: self.search.submit(query) for k, query in queries.items()}
        documents = {k: future.result() for k, future in futures.items()}
        for k, query in queries.items():
            taus[k].turns.append(Turn("", self.search.tag, query, documents[k]))
        return documents

    def show(self, documents: Documents) -> str:
        """Renders passages, each cut to `max_observation` tokens."""
        shown, limit = [], self.cfg.max_observation
        for text in documents:
            ids = encode(self.tokenizer, text)
            shown.append(self.tokenizer.decode(ids[:limit]) if len(ids) > limit else text)
        return self.search.show(shown)


def begin(questions: Sequence[Question]) -> list[Trajectory]:
    return [Trajectory(None, q, k, [], 0) for k, q in enumerate(questions)]


def answer_of(text: str) -> str:
    r"""Finds the answer in a reply: the last \boxed{}, <answer>, or what follows "answer is:"; else
    all of it."""
    if boxed := re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text):
        return re.sub(r"\\text\{([^{}]*)\}", r"\1", boxed[-1]).strip()
    tagged = find_answer(text)
    if tagged is not None:
        return tagged
    return text.rpartition("nswer is:")[2].strip().rstrip(".").strip()


ALONE: dict[str, Any] = {"tools": "none"}
SHORT = ALONE | {"max_response": 32}


class Direct(Player):
    """Asks without documents, for 32 tokens at most; without tags the whole reply is the answer.

    After FlashRAG's zero-shot (examples/methods/run_exp.py, MIT). Restated: one message for system
    and user, and the answer in tags, so that `sft` trains what all other methods are scored by.
    """

    knobs = SHORT

    def play(self, questions: Sequence[Question]) -> list[Trajectory]:
        taus = self.under(self.words.direct, questions)
        for tau in taus:
            # no EOS in the answer
            reply = self.tokenizer.decode(tau.ids[tau.prompt_tokens :], skip_special_tokens=True)
            tau.prediction, tau.stop = answer_of(reply), "answer"
        return taus


class RAG(Player):
    """Retrieves once with the question and answers from the passages, in 32 tokens at most.

    After FlashRAG's naive generation (flashrag/prompt/base_prompt.py, MIT), with `topk` passages:
    3, where it has 5.
    """

    def stop_strings(self) -> tuple[str, ...]:
        return ("</answer>",)

    def play(self, questions: Sequence[Question]) -> list[Trajectory]:
        taus, contexts = begin(questions), {}
        for k, documents in self.retrieve(
            {k: q.text for k, q in enumerate(questions)}, taus
        ).items():
            shown = self.show(documents)
            contexts[k] = self.ids(self.words.rag, question=questions[k].text, documents=shown)
            taus[k].observe(contexts[k])
            taus[k].prompt_tokens, taus[k].stop = len(contexts[k]), "length"
        for k, turn in self.turns(contexts, 32).items():
            taus[k].act(turn.ids, turn.logps)
            taus[k].response, taus[k].stop = self.text(turn), "answer"
            taus[k].prediction = answer_of(taus[k].response)
        return taus


class IRCoT(Player):
    """Reasons a sentence at a time and retrieves with each sentence, 5 times at most.

    After IRCoT (StonyBrookNLP/ircot, Apache-2) as FlashRAG plays it (active_pipeline.py, 5 steps in
    run_exp.py, MIT). Restated: one demonstration of our own; passages stand in the order of
    retrieval, each once (FlashRAG sorts them by ascending score); without "So the answer is:" all
    thoughts are the answer, as there.
    """

    def stop_strings(self) -> tuple[str, ...]:
        return self.words.sentence_ends

    def play(self, questions: Sequence[Question]) -> list[Trajectory]:
        taus, thoughts = begin(questions), dict.fromkeys(range(len(questions)), "")
        documents: dict[int, dict[str, None]] = {k: {} for k in thoughts}
        queries = {k: q.text for k, q in enumerate(questions)}
        for _ in range(5):
            for k, passages in self.retrieve(queries, taus).items():
                documents[k] |= dict.fromkeys(passages)
            contexts = {}
            for k in queries:
                shown = self.show(list(documents[k]))
                contexts[k] = self.ids(
                    self.words.ircot,
                    question=taus[k].question.text,
                    documents=shown,
                    thoughts=thoughts[k],
                )
                taus[k].observe(contexts[k])
                taus[k].prompt_tokens = taus[k].prompt_tokens or len(contexts[k])
            queries = {}
            for k, turn in self.turns(contexts, self.cfg.max_response).items():
                taus[k].act(turn.ids, turn.logps)
                thought = self.text(turn)
                thoughts[k] += f" {thought}"
                if "nswer is:" in thought or find_answer(thought) is not None:
                    taus[k].stop = "answer"
                else:
                    queries[k] = re.sub(r"</?\w+>", " ", thought).strip() or taus[k].question.text
        for k, tau in enumerate(taus):
            tau.response, tau.prediction = thoughts[k].strip(), answer_of(thoughts[k])
            tau.stop = tau.stop or "turns"
        return taus


class SearchO1(Player):
    """Reasons with searches in the middle; a second prompt reads the passages and puts its notes
    into the reasoning.

    After Search-o1 (sunnynexus/Search-o1, scripts/run_search_o1.py, MIT): 5 searches for questions
    of one hop, 10 for others; a query that was asked before is not searched again. Restated: `topk`
    passages for 10, the sampling of all other methods for temperature 0.7, `max_response` tokens a
    turn, and prompts of our own.
    """

    def stop_strings(self) -> tuple[str, ...]:
        return (self.words.query[1], "</answer>")

    def play(self, questions: Sequence[Question]) -> list[Trajectory]:
        taus = begin(questions)
        start, end = self.words.query
        before, after = self.words.result
        limit = [5 if q.source in ONE_HOP or q.source.endswith("1hop") else 10 for q in questions]
        for tau, searches in zip(taus, limit, strict=True):
            tau.observe(
                self.ids(self.words.search_o1, question=tau.question.text, searches=searches)
            )
            tau.prompt_tokens = len(tau.ids)
        active = set(range(len(taus)))
        for _ in range(max(limit, default=0) + 1):
            queries: dict[int, str] = {}
            turns = self.turns({k: taus[k].ids for k in sorted(active)}, self.cfg.max_response)
            for k in active - set(turns):
                taus[k].stop = "length"
            for k, turn in turns.items():
                tau = taus[k]
                tau.act(turn.ids, turn.logps)
                text = self.text(turn)
                tau.response += text
                query = text.rpartition(start)[2].partition(end)[0].strip()
                repeated = query in {past.argument for past in tau.turns}
                if not query or end not in text:
                    tau.stop, tau.prediction = "answer", answer_of(tau.response)
                elif repeated or len(tau.turns) >= limit[k]:
                    note = (
                        "Searched before: see above." if repeated else "No search is left: answer."
                    )
                    tau.observe(encode(self.tokenizer, f"{before}{note}{after}"))
                else:
                    queries[k] = query
            contexts = {}
            for k, documents in self.retrieve(queries, taus).items():
                slots = {
                    "question": queries[k],
                    "documents": self.show(documents),
                    "thoughts": taus[k].response,
                }
                contexts[k] = self.ids(self.words.read, **slots)
            for k, turn in self.turns(contexts, self.cfg.max_response).items():
                read = (
                    self.text(turn)
                    .partition(self.words.read_end)[0]
                    .rpartition("Final Information:")[2]
                )
                note = before + re.sub(r"</?\w+>", "", read).strip() + after
                taus[k].observe(encode(self.tokenizer, note)[: self.cfg.max_observation])
                taus[k].response += note
            active = {k for k in active if not taus[k].stop}
        for k in active:
            taus[k].stop = "turns"
        return taus


class R1(Player):
    """Reasons in one turn without tools, as Search-R1's R1 baseline does (issues 69 and 91
    there)."""

    knobs = ALONE

    def play(self, questions: Sequence[Question]) -> list[Trajectory]:
        return self.under(self.words.grpo, questions)


METHODS: dict[str, type[Agent]] = {
    "direct": Direct, "sft": Direct, "grpo": R1, "ircot": IRCoT, "rag": RAG, "sft_reject": Agent, "search_o1": SearchO1,
    "search_r1": Agent,
}  # fmt: skip


def infer_method(mode: str, tools: str) -> str:
    """Returns the method that a run with this mode and these tools trained for."""
    if mode == "supervised":
        return "sft" if tools == "none" else "sft_reject"
    return "grpo" if mode == "static" and tools == "none" else "search_r1"


# ---- training


@dataclass(frozen=True)
class SupervisedConfig(Config):
    """supervised fine-tuning"""

    mode: Literal["supervised"] = "supervised"  # type: ignore[assignment]
    """supervised"""

    def __post_init__(self) -> None:
        """A step is one mini-batch without a KL, whatever a preset says."""
        object.__setattr__(self, "mini_batch", self.batch)
        object.__setattr__(self, "beta", 0.0)


# method -> its configuration, what it changes of a preset
TRAINED: dict[str, tuple[type[Config], dict[str, Any]]] = {
    "sft": (SupervisedConfig, STATIC | ALONE),
    "grpo": (Config, STATIC | ALONE | {"mode": "static"}),
    "sft_reject": (SupervisedConfig, STATIC),
}


def config_of(method: str, flags: list[str]) -> Config:
    """Configures the training of a method; writes the instruction of one that has its own to a
    file."""
    kind, changes = TRAINED[method]
    cfg = parse_flags(flags, kind, **changes)
    if method != "sft_reject":
        file = Path(f"{cfg.out or Path('runs') / method}.instruction.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            getattr(wording(cfg.model), "direct" if method == "sft" else "grpo") + "\n", "utf-8"
        )
        cfg = dataclasses.replace(cfg, instruction=str(file))
    return cfg


def train(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "extras/table1.py train", usage="%(prog)s METHOD [--flag value ...]"
    )
    parser.add_argument("method", choices=TRAINED, help="METHOD --help lists its flags")
    cfg = config_of(parser.parse_args(argv[:1]).method, argv[1:])
    import inspo

    parts: dict[str, Any] = {}
    if isinstance(cfg, SupervisedConfig):
        # with torch, which takes seconds to import
        from extras.supervised import Demonstrated, supervised

        parts = {"learner": Demonstrated, "algorithm": supervised}
    with one_line(), stop.listening():
        inspo.train(cfg, **parts)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["train"]:
        return train(argv[1:])
    parser = make_parser("extras/table1.py", __doc__)
    parser.add_argument("--method", choices=METHODS, help="default: as the run was trained")
    args = parser.parse_args(argv)
    with one_line("extras/table1.py"), stop.listening(), stop.may_stop():
        cfg, _, trained = find_model(args.what)
        mode = cfg.mode
        if trained:
            mode = json.loads((trained / "config.json").read_bytes())["mode"]
        run(args, METHODS[args.method or infer_method(mode, cfg.tools)])


if __name__ == "__main__":
    main()
