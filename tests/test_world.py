"""The embedded default: what its questions need, how its instructions read, and a scripted
optimizer that works from the text of its prompt alone. tests/extras has how the world was made."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import permutations

import pytest
from transformers import AutoTokenizer

from config import HERE, WORLD
from plumbing.servers import Child
from reflect import Optimizer, fold_words, paraphrase_prompt, reflection_prompt
from reflect import read_blocks as parse_reply
from retrieval_server import BM25
from world.clauses import CLAUSES, FILLERS, FRAMES, SAYS, START, read_clauses, write_instruction
from world.optimizer import find_frame, reply_to

SUBJECT = r"(film|person|city|nation|company) (\w+ \w+)\?$"  # the entity a question asks about
TAGS = [
    f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")
]


def rows(name):
    return [json.loads(line) for line in (WORLD / f"{name}.jsonl").open()]


# --- questions and passages
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "split, hops", [("train", (500, 600, 500)), ("valid", (30, 60, 60)), ("test", (60, 120, 120))]
)
def test_a_split_has_its_declared_questions_each_once(split, hops):
    asked = rows(split)
    assert Counter(row["data_source"] for row in asked) == {
        f"world-{k}hop": n for k, n in enumerate(hops, 1)
    }
    assert len({row["question"] for row in asked}) == len({row["id"] for row in asked}) == sum(hops)


def test_the_test_asks_about_other_entities_and_validation_about_what_nobody_is_trained_on():
    subjects = lambda split: {re.search(SUBJECT, row["question"]).groups() for row in rows(split)}  # noqa: E731
    matter = lambda split: {row["question"].partition(" the ")[2] for row in rows(split)}  # noqa: E731
    assert len(subjects("train")) > 300 and len(subjects("test")) > 150
    assert not subjects("test") & (subjects("train") | subjects("valid"))
    assert len(matter("valid")) == 150 and not matter("valid") & (matter("train") | matter("test"))


def test_every_answer_follows_from_the_passages_alone():
    told = {}
    for row in rows("corpus"):
        title, text = re.fullmatch(r'"(.+)"\nA \w+ with (.+)\.', row["contents"]).groups()
        told[title] = dict(re.match(r"(\w+) (.+)", part).groups() for part in text.split(" and "))
    for row in rows("train") + rows("valid") + rows("test"):
        *chain, last = re.findall(r"the (\w+) of", row["question"])
        fact = re.search(SUBJECT, row["question"]).group(2)
        for relation in [last, *reversed(chain)]:
            fact = told[fact][relation]
        assert row["golden_answers"] == [fact]
        assert row["data_source"] == f"world-{len(chain) + 1}hop"


def test_one_search_answers_a_question_of_one_hop_and_hardly_ever_one_of_several():
    passages = [row["contents"] for row in rows("corpus")]
    server = BM25.build(passages)
    asked, found = Counter(), Counter()
    for row in rows("test"):
        asked[row["data_source"]] += 1
        results = [passages[i] for i, _ in server.search([row["question"]], 3)[0]]
        found[row["data_source"]] += any(row["golden_answers"][0] in text for text in results)
    assert found["world-1hop"] == asked["world-1hop"]
    assert all(found[hops] < 0.05 * asked[hops] for hops in ("world-2hop", "world-3hop"))


# --- instructions
# -------------------------------------------------------------------------------------------------


def some_clauses(rng):
    """Returns clauses that do not contradict each other."""
    slots = {}
    for name in rng.sample(list(CLAUSES), rng.randint(0, 6)):
        slots.setdefault(CLAUSES[name].slot, name)
    return list(slots.values())


@pytest.mark.parametrize("wordings", ["taught", "unseen", "any"])
def test_an_instruction_is_read_as_it_was_written(wordings):
    rng = random.Random(0)
    for _ in range(500):
        clauses = some_clauses(rng)
        assert sorted(
            read_clauses(write_instruction(rng, clauses, rng.randint(0, 2), wordings))
        ) == sorted(clauses)


def test_clauses_are_read_in_order_of_appearance():
    first, second = CLAUSES["cont"].taught[2], CLAUSES["entity"].unseen[0]
    assert read_clauses(f"{first} {FRAMES[0]} {second}") == ["cont", "entity"]
    assert read_clauses(f"{second} {FRAMES[0]} {first} {second}") == ["entity", "cont"]
    assert read_clauses(" ".join([*FRAMES, *FILLERS])) == []
    assert read_clauses(START) == ["whole"]


def test_no_wording_contains_another_and_a_frame_names_every_tag():
    assert len(SAYS) == sum(len(c.taught + c.unseen) for c in CLAUSES.values())
    for a, b in permutations([*SAYS, *FILLERS, *FRAMES], 2):
        assert a not in b
    assert all(tag in frame for frame in FRAMES for tag in TAGS)


def test_the_tokenizer_fits_the_policy_and_a_tag_is_one_token():
    tokenizer = AutoTokenizer.from_pretrained(WORLD / "policy")
    config = json.loads((WORLD / "policy" / "config.json").read_text())
    known = tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)
    assert known == (config["eos_token_id"], config["pad_token_id"], config["vocab_size"])
    for tag in TAGS:
        assert len(tokenizer(f"a {tag}the{tag} of", add_special_tokens=False)["input_ids"]) == 5
        (id,) = tokenizer(tag, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode([id], skip_special_tokens=True) == tag


# --- the scripted optimizer
# ---------------------------------------------------------------------------------------


def failure(*turns, question="What is the birthplace of the director of the film Axx Bth?"):
    """Returns a failed trajectory in the form the optimizer reads."""
    return f"Question: {question}\n" + "".join(turns)


def think(text=""):
    return f"<think>{text}</think>"


def search(query, result="Doc 1(Title: Axx Bth) A film with director Cn Ds and producer Ek Fcorp."):
    return f"<search>{query}</search>\n\n<information>{result}</information>\n\n"


def answer(text):
    return f"<answer>{text}</answer>"


DIRECTOR = search("director of Axx Bth")
BIRTHPLACE = search("birthplace of Cn Ds", "Doc 1(Title: Cn Ds) A person with birthplace Gl Hford.")
WHOLE = search("What is the birthplace of the director of the film Axx Bth?")
NOTE_1, NOTE_2 = think("director of Axx Bth is Cn Ds"), think("birthplace of Cn Ds is Gl Hford")
PLAN = think(" steps: director, birthplace")
GOOD = failure(PLAN, DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("Gl Hford"))
SYMPTOMS = {  # missing clause: (a failure that shows it, a similar one that does not)
    "entity": (
        failure(PLAN, WHOLE, NOTE_1, answer("Cn Ds")),
        failure(PLAN, DIRECTOR, NOTE_1, answer("Cn Ds")),
    ),
    "cont": (
        failure(PLAN, DIRECTOR, NOTE_1, answer("Cn Ds")),
        failure(PLAN, WHOLE, NOTE_1, answer("Cn Ds")),
    ),
    "exact": (failure(PLAN, DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("it is Gl Hford")), GOOD),
    "state": (failure(PLAN, DIRECTOR, think(), BIRTHPLACE, answer("Gl Hford")), GOOD),
    "plan": (failure(think(), DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("Gl Hford")), GOOD),
}


def as_the_policy_s_tokens_decode(text):
    """Returns the text in lower case, with a space between any two tokens."""
    return re.sub(r"(</?\w+>|[?.,:()])", r" \1 ", text).lower().replace("question :", "Question:")


def proposals(text, clause, n=60):
    """Returns the share of candidates with `clause` over `n` prompts that show failures like
    `text`."""
    candidates = []
    for k in range(n):
        shown = re.sub(r"Axx", f"A{k}xx", re.sub(r"axx", f"a{k}xx", text))
        prompt = reflection_prompt(FRAMES[0], [(shown, ("Gl Hford",))], 6, 10_000)
        candidates += parse_reply(reply_to(prompt, seed=0))
    return sum(clause in read_clauses(c) for c in candidates) / len(candidates)


@pytest.mark.parametrize("written", [str, as_the_policy_s_tokens_decode])
@pytest.mark.parametrize("clause", SYMPTOMS)
def test_the_optimizer_infers_the_missing_clause_from_failures(clause, written):
    ill, well = SYMPTOMS[clause]
    with_symptom, without = proposals(written(ill), clause), proposals(written(well), clause)
    assert with_symptom > 0.2
    assert with_symptom > 3 * without


@pytest.mark.parametrize(
    "text, clause, proposed",
    [
        (failure(think(), answer("Gl Hford")), "entity", True),  # it never searches
        # no result
        (failure(PLAN, DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("Nowhere Atallford")), "state", True),
        (failure(PLAN, DIRECTOR, NOTE_1, answer("Ek Fcorp"), question="Name the director of the film Axx Bth?"),
         "entity", False),  # a question of one hop needs no second search
        (failure(PLAN, DIRECTOR, NOTE_1, answer("Ek Fcorp"), question="Name the director of the film Axx Bth?"),
         "cont", False),
    ],
)  # fmt: skip
def test_other_failures_ask_for_what_they_show(text, clause, proposed):
    share = proposals(text, clause)
    assert share > 0.2 if proposed else share < 0.1


@pytest.mark.parametrize("own", [*FRAMES, ""])
def test_the_frame_and_another_tool_s_tags_are_both_kept(own):
    other = "Write <calculate> expression </calculate> to compute."
    known = f"{FILLERS[0]} {CLAUSES['entity'].taught[0]}"
    assert find_frame(f"{own} {other} {known}") == f"{own} {other}".strip()
    assert find_frame(f"{own} {known}") == ""


def test_a_clause_in_the_instruction_is_not_missing():
    has_it = f"{FRAMES[0]} {CLAUSES['entity'].unseen[0]}"
    prompt = reflection_prompt(has_it, [(SYMPTOMS["entity"][0], ("x",))], 6, 10_000)
    assert "One broad query" not in reply_to(prompt, seed=0)
    assert "One broad query" in reply_to(prompt.replace(has_it, FRAMES[0]), seed=0)


def test_a_paraphrase_keeps_the_clauses_in_other_words():
    parent = write_instruction(random.Random(0), ["whole", "state", "exact"])
    candidates = []
    for seed in range(20):
        candidates += parse_reply(reply_to(paraphrase_prompt(parent, 6), seed))
    assert len(candidates) > 80
    assert all(set(read_clauses(text)) == set(read_clauses(parent)) for text in candidates)
    assert len({fold_words(text) for text in candidates}) > 50


@pytest.mark.parametrize(
    "prompt", ["", "Hello!", "<ins_0> Search. </ins_0>", "<ins_1>...</ins_1> to <ins_6>...</ins_6>"]
)
def test_a_prompt_not_of_appendix_e_gets_no_candidate(prompt):
    assert parse_reply(reply_to(prompt, seed=0)) == []


def test_over_http_from_any_directory_replies_depend_on_the_prompt_alone(tmp_path, monkeypatch):
    shown = [
        (text.replace("Axx", f"A{k}xx"), ("Gl Hford",))
        for k, (text, _) in enumerate(SYMPTOMS.values())
    ]
    prompts = [reflection_prompt(START, [pair], 6, 10_000) for pair in shown]
    monkeypatch.chdir(tmp_path)
    with Child(["-m", "world.optimizer"], tmp_path / "log") as server:
        optimizer = Optimizer(f"{server.url}/v1", "scripted", timeout=60, retries=0)
        first = [optimizer.ask(prompt) for prompt in prompts]
        again = [optimizer.ask(prompt) for prompt in reversed(prompts)]
    texts = [call.reply for call in first]
    assert (
        texts
        == [call.reply for call in reversed(again)]
        == [reply_to(prompt, seed=0) for prompt in prompts]
    )
    assert len(set(texts)) == 5
    assert [call.prompt_tokens for call in first] == [len(prompt) // 4 for prompt in prompts]
    assert all(call.completion_tokens > 0 for call in first)
    assert reply_to(prompts[0], seed=1) != texts[0]


def test_a_port_that_cannot_be_bound_is_reported_in_one_line():
    command = [sys.executable, "-m", "world.optimizer", "--port", "70000"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1
    assert "70000" in done.stderr
