"""The embedded default: what its questions need, how its instructions read, and a scripted
optimizer that works from the text of its prompt alone. tests/extras has how the world was made."""

import json
import random
import re
from collections import Counter
from itertools import permutations

import pytest
from transformers import AutoTokenizer

from config import WORLD
from reflect import fold_words, paraphrase_prompt, reflection_prompt
from reflect import read_blocks as parse_reply
from retrieval_server import BM25
from world.clauses import CLAUSES, FILLERS, FRAMES, SAYS, START, read_clauses, write_instruction
from world.optimizer import reply_to

SUBJECT = r"(film|person|city|nation|company) (\w+ \w+)\?$"  # the entity a question asks about
TAGS = [
    f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")
]


def rows(name):
    return [json.loads(line) for line in (WORLD / f"{name}.jsonl").open()]


# --- questions and passages
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "split, hops", [("train", [500, 600, 500]), ("valid", [30, 60, 60]), ("test", [60, 120, 120])]
)
def test_a_split_has_its_declared_questions_each_once(split, hops):
    asked = rows(split)
    counts = Counter(row["data_source"] for row in asked)
    assert [counts[f"world-{k}hop"] for k in (1, 2, 3)] == hops
    assert len({row["question"] for row in asked}) == len(asked) == sum(hops)


def test_the_test_asks_about_other_entities_and_validation_about_what_nobody_is_trained_on():
    subjects, matter = {}, {}
    for split in ("train", "valid", "test"):
        asked = [row["question"] for row in rows(split)]
        subjects[split] = {re.search(SUBJECT, question).groups() for question in asked}
        matter[split] = {question.partition(" the ")[2] for question in asked}
    assert len(subjects["train"]) > 300 and len(subjects["test"]) > 150
    assert not subjects["test"] & (subjects["train"] | subjects["valid"])
    assert not matter["valid"] & (matter["train"] | matter["test"])


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
    server, found = BM25.build(passages), Counter()
    for row in rows("test"):
        results = [passages[i] for i, _ in server.search([row["question"]], 3)[0]]
        found[row["data_source"]] += any(row["golden_answers"][0] in text for text in results)
    assert found["world-1hop"] == 60 and max(found["world-2hop"], found["world-3hop"]) < 6


# --- instructions
# -------------------------------------------------------------------------------------------------


def some_clauses(rng):
    """Returns clauses that do not contradict each other."""
    slots = {}
    for name in rng.sample(list(CLAUSES), rng.randint(0, 6)):
        slots.setdefault(CLAUSES[name].slot, name)
    return list(slots.values())


@pytest.mark.parametrize("wordings", ["taught", "unseen"])
def test_an_instruction_is_read_as_it_was_written(wordings):
    rng = random.Random(0)
    for _ in range(300):
        clauses = some_clauses(rng)
        text = write_instruction(rng, clauses, rng.randint(0, 2), wordings)
        assert sorted(read_clauses(text)) == sorted(clauses)


def test_clauses_are_read_in_order_of_appearance():
    first, second = CLAUSES["cont"].taught[2], CLAUSES["entity"].unseen[0]
    assert read_clauses(f"{second} {FRAMES[0]} {first} {second}") == ["entity", "cont"]
    assert read_clauses(" ".join([*FRAMES, *FILLERS])) == [] and read_clauses(START) == ["whole"]


def test_no_wording_contains_another_and_a_frame_names_every_tag():
    for a, b in permutations([*SAYS, *FILLERS, *FRAMES], 2):
        assert a not in b
    assert all(tag in frame for frame in FRAMES for tag in TAGS)


def test_of_the_policy_s_tokenizer_a_tag_is_one_token():
    tokenizer = AutoTokenizer.from_pretrained(WORLD / "policy")
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


def proposals(text, clause, n=60):
    """Returns the share of candidates with `clause` over `n` prompts that show failures like
    `text`."""
    candidates = []
    for k in range(n):
        shown = re.sub(r"(?i)axx", f"A{k}xx", text)
        prompt = reflection_prompt(FRAMES[0], [(shown, ("Gl Hford",))], 6, 10_000)
        candidates += parse_reply(reply_to(prompt, seed=0))
    return sum(clause in read_clauses(c) for c in candidates) / len(candidates)


@pytest.mark.parametrize("clause", SYMPTOMS)
def test_the_optimizer_infers_the_missing_clause_from_failures(clause):
    ill, well = SYMPTOMS[clause]
    assert proposals(ill, clause) > max(0.2, 3 * proposals(well, clause))
    # in lower case, with a space between any two tokens, as the policy's decode
    decoded = re.sub(r"(</?\w+>|[?.,:()])", r" \1 ", ill).lower().replace("question :", "Question:")
    assert proposals(decoded, clause) > 0.2


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
    assert all(set(read_clauses(text)) == set(read_clauses(parent)) for text in candidates)
    assert len({fold_words(text) for text in candidates}) > 50


def test_a_prompt_not_of_appendix_e_gets_no_candidate():
    for prompt in (
        "Hello!",
        "<ins_0> Search. </ins_0>",
        "<ins_1>...</ins_1> to <ins_6>...</ins_6>",
    ):
        assert parse_reply(reply_to(prompt, seed=0)) == []
