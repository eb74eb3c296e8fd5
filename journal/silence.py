"""Broken set-ups that raise no error: rollouts, rewards or replies that come to nothing, step after
step."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

PATIENCE = 5  # steps

NO_ACTION = "no turn called a tool or answered"
NO_ANSWER = "no trajectory ended in an answer"
ALL_ALIKE = "the rewards of every group were alike, so there was nothing to learn"
NO_CANDIDATE = "no reply of the optimizer held a candidate"
EMPTY = "every result was empty"
REMEDIES = {
    NO_ACTION: "the policy does not write the task's tags: trajectories/ has what it writes; it may need fine-tuning "
    "on demonstrations first, or another instruction",
    NO_ANSWER: "see in trajectories/ where they end; --max_response, --max_turns and --max_prompt give them room",
    ALL_ALIKE: "are the questions all too hard or all too easy for this policy, or is it the reward?",
    NO_CANDIDATE: "reflections.jsonl has the replies and why they were refused; try another --optimizer_model",
    EMPTY: "ask the tool yourself: does its server have the right corpus?",
}
# remedy where all calls of one failed
FAILED = "the reasons are in trajectories/; call the tool yourself"
LIMITS = {NO_CANDIDATE: 3}  # evolutions; PATIENCE steps of every other sign


def signs(row: Mapping[str, Any]) -> dict[str, bool]:
    """Returns which signs a row of metrics.jsonl shows; those that it says nothing about are left
    out."""
    present = {
        NO_ACTION: row.get("valid_actions") == 0,
        NO_ANSWER: row.get("answered") == 0,
        ALL_ALIKE: row.get("zero_variance_groups") == 1,
    }
    if called := [name.removesuffix("/empty") for name in row if name.endswith("/empty")]:
        present[EMPTY] = all(row[f"{name}/empty"] == 1 for name in called)
        present |= {f"all {name} failed": row.get(f"{name}/failed") == 1 for name in called}
    return present | ({NO_CANDIDATE: not row["candidates"]} if "candidates" in row else {})


class Silence:
    """Counts for how many steps in a row each sign has been there."""

    def __init__(self) -> None:
        self.since: Counter[str] = Counter()
        self.told: set[str] = set()

    def step(self, row: Mapping[str, Any]) -> list[str]:
        """Returns warnings after a step: of signs that have just lasted too long."""
        for sign, there in signs(row).items():
            self.since[sign] = (self.since[sign] + 1) * there
        told, texts = self.told, {sign: text for sign, _, text in self.lasting()}
        self.told = set(texts)
        return [text for sign, text in texts.items() if sign not in told]

    def lasting(self) -> Iterator[tuple[str, int, str]]:
        """Yields each sign that has lasted too long, for how many steps (evolutions), and a
        sentence about it.

        A sign whose cause has lasted as long is left out.
        """
        causes = {NO_ANSWER: {NO_ACTION}, ALL_ALIKE: self.since.keys() - {ALL_ALIKE, NO_CANDIDATE}}
        for sign, n in self.since.items():
            caused = any(self.since[cause] >= n for cause in causes.get(sign, ()))
            if n >= LIMITS.get(sign, PATIENCE) and not caused:
                unit = "evolutions" if sign == NO_CANDIDATE else "steps"
                yield sign, n, f"for {n} {unit} in a row {sign}: {REMEDIES.get(sign, FAILED)}"
