"""Questions answered by searching, scored by exact match: the paper's task, and the default one."""

from collections.abc import Callable, Sequence

from config import PRESETS, Config
from plumbing.faults import Fault
from plumbing.hub import find_on_disk
from tasks import Question, Task, Trajectory
from tasks.questions import em, f1, load_questions
from tasks.sampling import rng_of
from tasks.search import Search, choose_source, start_server, try_search
from tasks.tools import Calculator

SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> "
    "query </search> and it will return the top searched results between <information> and </information>. You can "
    "search as many times as your want. If you find no further external knowledge needed, you can directly provide "
    "the answer inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
)

WITHOUT_SEARCH = (  # whatever other tools there are: every prompt describes those
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. If you find no further external knowledge needed, you can directly provide the answer inside "
    "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
)
RETRIES = 6  # of a search, over a minute, before the run stops (resumable)


class SearchQA(Task):
    """Reads --train, --valid and --test, and searches --corpus or --retriever."""

    instruction: str = SEARCH_R1  # what the paper starts from (App. F)
    keeps_rows = False  # whether a question's `data` is its row

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.search = Search("", cfg.topk, retries=RETRIES)
        tools = {"search": self.search, "calculator": Calculator()}
        names = [] if cfg.tools == "none" else cfg.tools.split(",")
        if not set(names) <= set(tools) or (names and "search" not in names):
            raise Fault(
                f"--tools {cfg.tools}: choose search, search with calculator, none, or module:function"
            )
        self.tools = [tools[name] for name in names]
        if not names:
            self.instruction = WITHOUT_SEARCH

    def connect(self, address: str, restart: Callable[[], object] = lambda: None) -> None:
        """Searches at this URL."""
        self.search.connect(address, restart)

    def address(self) -> str:
        return self.search.url

    def check(self) -> None:
        if self.search in self.tools:
            self.cfg = choose_source(self.cfg)

    def start(self, serve: Callable[..., str]) -> str:
        if self.search not in self.tools:
            return super().start(serve) or "tools: none"
        url, restart, where = start_server(self.cfg, serve)
        self.connect(url, restart)
        # an evaluation needs none
        questions = self.questions("train")[:64] if find_on_disk(self.cfg.train) else []
        if questions:
            where += f"\n        {try_search(self.search, questions)}"
        return f"search: {where}\n{super().start(serve)}".strip()

    def load(self, path: str) -> list[Question]:
        """Returns the questions of a file, one of the task's or of --data. Raises Fault."""
        return load_questions(path, self.keeps_rows)

    def questions(self, split: str) -> list[Question]:
        cfg = self.cfg
        flag = "train" if split == "valid" and not cfg.valid else split
        file = getattr(cfg, flag)
        if not file:
            raise Fault(f"--{flag} is missing: give a .jsonl or .parquet file of questions")
        try:
            every = self.load(file)
        except Fault as e:
            raise Fault(f"--{flag} {e}") from None
        if split == "valid" and cfg.valid and self._is_stray(cfg.valid):
            print("note: --valid is the preset's, the training questions are not: it is not used")
            return []
        if cfg.valid or split == "test":
            return every
        n = min(500, len(every) // 10)
        aside = set(rng_of(cfg.seed, 0, "valid").permutation(len(every))[:n].tolist())  # CHOICE-25
        return [q for k, q in enumerate(every) if (k in aside) == (split == "valid")]

    def _is_stray(self, valid: str) -> bool:
        """Whether a subclass has training questions of its own beside a preset's of `valid`."""
        if type(self).questions is SearchQA.questions:  # they are those of --train
            return False
        if valid not in [preset.get("valid") for preset in PRESETS.values()]:
            return False
        theirs = {q.text for q in self.load(self.cfg.train)}
        return theirs.isdisjoint(q.text for q in self.questions("train"))

    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        return [em(tau.prediction, tau.question.golds) for tau in taus]  # Eq.1

    def metrics(self, tau: Trajectory) -> dict[str, float]:
        if not tau.question.golds:  # of rows that --reward scores
            return super().metrics(tau)
        return {
            "em": em(tau.prediction, tau.question.golds),
            "f1": f1(tau.prediction, tau.question.golds),
        }
