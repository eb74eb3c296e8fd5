"""Broken set-ups that raise no error: rollouts, rewards or replies that come to nothing, step after step."""

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
LIMITS = {sign: 3 if sign == NO_CANDIDATE else PATIENCE for sign in REMEDIES}  # evolutions, or steps


def signs(row: Mapping[str, Any]) -> dict[str, bool]:
    """Returns which signs a row of metrics.jsonl shows; those that it says nothing about are left out."""
    present = {sign: False for sign in REMEDIES if sign != NO_CANDIDATE}
    empty = [x for name, x in row.items() if name.endswith("/empty")]
    if row.get("valid_actions") == 0:  # then no answer, and groups all alike: only the cause is named
        present[NO_ACTION] = True
    elif row.get("answered") == 0:
        present[NO_ANSWER] = True
    elif empty and min(empty) == 1:
        present[EMPTY] = True
    elif row.get("zero_variance_groups") == 1:
        present[ALL_ALIKE] = True
    return present | ({NO_CANDIDATE: not row["candidates"]} if "candidates" in row else {})


class Silence:
    """Counts for how many steps in a row each sign has been there."""

    def __init__(self) -> None:
        self.since: Counter[str] = Counter()

    def step(self, row: Mapping[str, Any]) -> list[str]:
        """Returns warnings after a step: of signs that have just lasted too long."""
        now = signs(row)
        for sign, there in now.items():
            self.since[sign] = (self.since[sign] + 1) * there
        return [text for sign, n, text in self.lasting() if now.get(sign) and n == LIMITS[sign]]

    def lasting(self) -> Iterator[tuple[str, int, str]]:
        """Yields each sign that has lasted too long, for how many steps (evolutions), and a sentence about it."""
        for sign, n in self.since.items():
            if n >= LIMITS[sign]:
                unit = "evolutions" if sign == NO_CANDIDATE else "steps"
                yield sign, n, f"for {n} {unit} in a row {sign}: {REMEDIES[sign]}"
