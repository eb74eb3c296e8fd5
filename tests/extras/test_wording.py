"""The campaign on wordings: what the instructions it plays say and what they do not, and its page."""

import json
import random

import numpy as np
import pytest
from scipy import stats

from extras.campaigns import wording
from world.clauses import BEST, CLAUSES, read

TAUGHT = [text for clause in CLAUSES.values() for text in clause.taught]
UNSEEN = [text for clause in CLAUSES.values() for text in clause.unseen]


def says(text: str, sentences: list[str]) -> list[str]:
    return [sentence for sentence in sentences if sentence in text]


def test_new_wordings_say_the_good_clauses_in_no_word_order_that_was_taught():
    texts = wording.new_wordings(random.Random(0))
    assert len({frozenset(says(text, UNSEEN)) for text in texts}) == len(texts) == 2 ** len(BEST)
    for text in texts:
        assert set(read(text)) == BEST and not says(text, TAUGHT) and wording.met([text]) == len(BEST)


def test_one_and_many_start_from_the_good_clauses_in_taught_words():
    for seed in range(5):
        text = wording.good(seed)
        assert set(read(text)) == BEST and wording.met([text]) == 0 and len(says(text, TAUGHT)) == len(BEST)
    assert len({wording.good(seed) for seed in range(5)}) > 1


def test_losers_lack_what_winners_have():
    for text in wording.kinds([])["losers"]:
        assert set(read(text)) == BEST - {"cont"} | {"early"}


def row(arm: str, seed: int, taught: float, new: float, deaf: str = "") -> dict:
    """A policy with `new` under new wordings, and 0 under those with the sentence that it is deaf to."""
    under = [0.0 if deaf and deaf in text else new for text in wording.kinds([])["good, new wordings"]]
    em = {"its own": [taught], "good, taught wordings": [taught, taught], "good, new wordings": under}
    return {"arm": arm, "seed": seed, "commit": "abc", "machine": "m", "instructions": 7, "met": 2, "em": em}


def test_the_page_compares_what_seeds_have_under_new_wordings():
    rng = np.random.default_rng(0)
    new = {"one": rng.normal(0.4, 0.05, 5), "many": rng.normal(0.6, 0.05, 5)}
    text = wording.page([row(arm, k, 0.9, x) for arm, some in new.items() for k, x in enumerate(some)])
    by_hand = stats.ttest_ind(new["many"], new["one"], equal_var=False)
    more = np.mean(new["many"]) - np.mean(new["one"])
    line = next(line for line in text.splitlines() if line.startswith("| many |"))
    assert f"| {more:+.3f} [" in line and f"| {by_hand.pvalue:.3f} |" in line and "10 of 15 runs" in text
    cost = 0.9 - np.mean(new["one"])
    assert f"| {cost:+.3f} [" in next(line for line in text.splitlines() if line.startswith("| one: "))


def test_a_sentence_that_nobody_understands_is_named_and_the_others_read_without_it():
    deaf, other = CLAUSES["entity"].unseen[1], CLAUSES["exact"].unseen[0]
    rows = [row("one", k, 0.9, 0.8, deaf) for k in range(3)]
    assert wording.unread(rows) == [deaf]
    assert wording.under_new(rows, "one") == pytest.approx([0.4] * 3)
    assert wording.under_new(rows, "one", other) == pytest.approx([0.4] * 3)
    assert wording.under_new(rows, "one", other, [deaf]) == pytest.approx([0.8] * 3)
    assert wording.under_new(rows, "one", deaf, [deaf]) == []
    assert wording.unread([*rows, row("many", 0, 0.9, 0.8)]) == []  # one that understands it is enough
    page = wording.page(rows)
    assert f"{deaf}" in page and f"| {other} | 0.80 |" in page and f"| {deaf} |" not in page


def test_rows_of_other_flags_are_refused(tmp_path):
    whole = json.dumps(row("inspo", 200, 0.9, 0.5) | {"flags": "--lr 1e-3"}) + "\n"
    (tmp_path / "wording.jsonl").write_text(whole)
    argv = ["--arms", "inspo", "--seeds", "200", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    with pytest.raises(SystemExit, match="has inspo, seed 200, with the flags --lr 1e-3, not no flags"):
        wording.main(argv)
    wording.main([*argv, "--extra", "--lr 1e-3"])  # nothing is left to run
    assert (tmp_path / "wording.jsonl").read_text() == whole and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_tiny_campaign_end_to_end(tmp_path):
    small = "--T 1 --batch 4 --mini 4 --G 2 --D_B 4"
    argv = ["--seeds", "1", "--extra", small, "--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    wording.main(argv)
    rows = {row["arm"]: row for row in wording.read_jsonl(tmp_path / "wording.jsonl")}
    assert rows["one"]["instructions"] == 1 and rows["many"]["instructions"] > 4 and rows["many"]["met"] == 0
    assert {len(x) for x in rows["inspo"]["em"].values()} == {1, 5, 16}
    assert "3 of 15 runs" in (tmp_path / "wording.md").read_text()
    wording.main([*argv, "--report"])
