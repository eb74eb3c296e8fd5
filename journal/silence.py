"""What raises no error and shows only over the steps: rollouts, rewards or replies that come to
nothing, and a task that is solved."""

import math
from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from plumbing.files import Row

PATIENCE = 5  # steps
RISE = 0.2  # of the training reward, as a share of itself, that the held-out score should follow

NO_ACTION = "no turn called a tool or answered"
NO_ANSWER = "no trajectory ended in an answer"
ALL_ALIKE = "the rewards of every group were alike, so there was nothing to learn"
SOLVED = "every rollout was right"
NOT_FOLLOWED = "the training reward has risen, and the held-out score has not"
NO_CANDIDATE = "no reply of the optimizer held a candidate"
EMPTY = "every result was empty"
REMEDIES = {
    NO_ACTION: "the policy does not write the task's tags: trajectories/ has what it writes; it may need fine-tuning "
    "on demonstrations first, or another instruction",
    NO_ANSWER: "see in trajectories/ where they end; --max_response, --max_turns and --max_prompt give them room",
    ALL_ALIKE: "are the questions all too hard or all too easy for this policy, or is it the reward?",
    SOLVED: "the task is solved, and nothing is left to learn; stop here, or ask harder questions",
    NOT_FOLLOWED: "read trajectories/ of high reward: is the reward earned without a right answer? With few questions"
    " they may be learned by heart",
    NO_CANDIDATE: "reflections.jsonl has the replies and why they were refused; try another --optimizer_model",
    EMPTY: "ask the tool yourself: does its server have the right corpus?",
}
# remedy where all calls of one failed
FAILED = "the reasons are in trajectories/; call the tool yourself"
UNITS = {NO_CANDIDATE: "evolutions", NOT_FOLLOWED: "evaluations"}  # others are counted by steps
LIMIT = 3  # of these


def signs(row: Row) -> dict[str, bool]:
    """Returns which signs a row of metrics.jsonl shows; those that it says nothing about are left
    out."""
    alike = row.get("zero_variance_groups") == 1
    present = {
        NO_ACTION: row.get("valid_actions") == 0,
        NO_ANSWER: row.get("answered") == 0,
        ALL_ALIKE: alike,
        SOLVED: alike and row.get("failed") == 0,
    }
    called = [name.removesuffix("/empty") for name in row if name.endswith("/empty")]
    if called:
        present[EMPTY] = all(row[f"{name}/empty"] == 1 for name in called)
    for name in called:
        present[f"all {name} failed"] = row.get(f"{name}/failed") == 1
    if "candidates" in row:
        present[NO_CANDIDATE] = not row["candidates"]
    return present


class Silence:
    """Counts for how many steps in a row each sign has been there."""

    def __init__(self) -> None:
        self.since: Counter[str] = Counter()
        self.told: set[str] = set()
        self.metric = ""
        self.rewards: list[float] = []  # of training, since the last evaluation
        self.best = -math.inf, 0.0  # held-out score, and the reward before it

    def hear(self, row: Row) -> list[str]:
        """Returns a line for each sign that has just lasted too long, after a row of
        metrics.jsonl."""
        present = signs(row)
        behind = self._compare_held_out(row)
        if behind is not None:
            present[NOT_FOLLOWED] = behind
        for sign, there in present.items():
            self.since[sign] = (self.since[sign] + 1) * there
        lines = {sign: f"{kind}  {text}" for sign, kind, text in self.lasting()}
        told, self.told = self.told, set(lines)
        return [line for sign, line in lines.items() if sign not in told]

    def _compare_held_out(self, row: Row) -> bool | None:
        """Returns whether the reward has risen by RISE since the held-out score was best; None
        where a row has no evaluation."""
        if row.get("metrics"):
            self.metric = row["metrics"][0]
        if "reward" in row:
            self.rewards.append(row["reward"])
        score = row.get(f"valid/{self.metric}")
        if score is None or not self.rewards:
            return None
        reward, self.rewards = fmean(self.rewards), []
        if score > self.best[0]:
            self.best = score, reward
        before = self.best[1]
        return reward - before > RISE * max(abs(reward), abs(before))

    def lasting(self) -> Iterator[tuple[str, str, str]]:
        """Yields each sign that has lasted too long, WARNING or SOLVED, and a text about it.

        A sign whose cause has lasted as long is left out.
        """
        broken = self.since.keys() - {ALL_ALIKE, *UNITS}
        causes = {NO_ANSWER: {NO_ACTION}, ALL_ALIKE: broken}
        for sign, n in self.since.items():
            caused = any(self.since[cause] >= n for cause in causes.get(sign, ()))
            if n >= (LIMIT if sign in UNITS else PATIENCE) and not caused:
                kind, unit = "SOLVED" if sign == SOLVED else "WARNING", UNITS.get(sign, "steps")
                yield sign, kind, f"for {n} {unit} in a row {sign}: {REMEDIES.get(sign, FAILED)}"
