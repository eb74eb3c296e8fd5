"""The embedded default: questions need several searches, instructions are read back as written, the warm start never
shows the best combination, and the scripted optimizer works from the text of its prompt alone."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import permutations
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tasks.questions import em, last_answer
from plumbing.servers import Child
from reflect import Optimizer, check, normalized, paraphrase_prompt, reflection_prompt
from reflect import parse as parse_reply
from rollout import observation_ids, prompt_ids
from tasks.tools import Search, invalid_action
from extras.world import demos, warm_start
from world.clauses import BEST, CLAUSES, FILLERS, FRAMES, SAYS, START, read, write
from extras.world.demos import demo, demonstrate, observation, random_clauses
from extras.world.facts import CHAINS, FULL, MINI, World, the_world
from world.optimizer import HARM, reply_to
from extras.world.tokenizer import TAGS, build_tokenizer, save_tokenizer
from extras.world.warm_start import tiny_policy, write_files

SEARCH = Search("http://127.0.0.1:9", topk=3)  # nobody listens there
INVALID = invalid_action([SEARCH])
ROOT = Path(__file__).parents[1]
FILES = ROOT / "world" / "files"
SUBJECT = r"(film|person|city|nation|company) (\w+ \w+)\?$"  # the entity a question asks about


@pytest.fixture(scope="module")
def full_world():
    return the_world()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FILES / "policy")


def rows(name):
    return [json.loads(line) for line in (FILES / f"{name}.jsonl").open()]


def squash(text):
    return re.sub(r"\s", "", text).lower()


# --- the world and its files --------------------------------------------------------------------------------------


def test_the_files_of_the_world_regenerate_to_the_byte(tmp_path):
    write_files(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["corpus.jsonl", "instruction.txt", "test.jsonl", "train.jsonl", "valid.jsonl"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (FILES / name).read_bytes(), name


def test_the_world_has_its_declared_size(full_world):
    assert {kind: len(set(names)) for kind, names in full_world.names.items()} == FULL
    assert len(rows("corpus")) == len(full_world.passages) == sum(FULL.values())
    assert Counter(r["data_source"] for r in rows("test")) == {"world-1hop": 60, "world-2hop": 120, "world-3hop": 120}
    assert len(rows("train")) == len({r["question"] for r in rows("train")}) == 1600
    assert {r["data_source"] for r in rows("train")} == {"world-1hop", "world-2hop", "world-3hop"}


def test_no_entity_is_asked_about_in_both_splits():
    train, test = ({re.search(SUBJECT, row["question"]).groups() for row in rows(split)} for split in ("train", "test"))
    assert len(train) > 300 and len(test) > 150
    assert not train & test
    assert not {r["id"] for r in rows("train")} & {r["id"] for r in rows("test")}


def test_validation_asks_what_neither_training_nor_the_test_asks():
    matter = lambda split: {row["question"].partition(" the ")[2] for row in rows(split)}  # noqa: E731
    assert Counter(r["data_source"] for r in rows("valid")) == {"world-1hop": 30, "world-2hop": 60, "world-3hop": 60}
    assert len(matter("valid")) == 150 and not matter("valid") & (matter("train") | matter("test"))
    valid, test = ({re.search(SUBJECT, row["question"]).groups() for row in rows(split)} for split in ("valid", "test"))
    assert not valid & test


def test_every_answer_follows_from_the_passages_alone(full_world):
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


def test_a_search_for_one_entity_finds_its_passage_first(full_world):
    for name, relation in full_world.facts:
        first, *others = full_world.search(f"{relation} of {name}")
        assert first.startswith(f'"{name}"\n')
        assert full_world.facts[name, relation] in first
        assert len(others) <= 2


def test_a_search_with_the_whole_question_hardly_ever_finds_the_answer_of_several_hops(full_world):
    found = Counter()
    asked = Counter()
    for row in rows("train") + rows("valid") + rows("test"):
        hops = row["data_source"]
        asked[hops] += 1
        found[hops] += any(row["golden_answers"][0] in passage for passage in full_world.search(row["question"]))
    assert found["world-1hop"] == asked["world-1hop"]
    assert found["world-2hop"] < 0.05 * asked["world-2hop"]
    assert found["world-3hop"] < 0.05 * asked["world-3hop"]


def test_the_warm_start_searches_as_the_run_s_server_does(full_world):
    from retrieval.bm25 import BM25

    server = BM25.build(lambda: full_world.passages)
    queries = [f"{relation} of {name}" for name, relation in list(full_world.facts)[::10]]
    queries += [row["question"] for row in rows("test")] + ["of", "nothing known", ""]
    for query in queries:
        assert [full_world.passages[i] for i, _ in server.search([query], 3)[0]] == full_world.search(query), query


# --- instructions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wordings", ["taught", "unseen", "any"])
def test_an_instruction_is_read_as_it_was_written(wordings):
    rng = random.Random(0)
    for _ in range(500):
        clauses = random_clauses(rng)
        assert sorted(read(write(rng, clauses, rng.randint(0, 2), wordings))) == sorted(clauses)


def test_clauses_are_read_in_order_of_appearance():
    first, second = CLAUSES["cont"].taught[2], CLAUSES["entity"].unseen[0]
    assert read(f"{first} {FRAMES[0]} {second}") == ["cont", "entity"]
    assert read(f"{second} {FRAMES[0]} {first} {second}") == ["entity", "cont"]
    assert read(" ".join([*FRAMES, *FILLERS])) == []
    assert read(START) == ["whole"]


def test_no_wording_contains_another():
    assert len(SAYS) == sum(len(c.taught + c.unseen) for c in CLAUSES.values())
    for a, b in permutations([*SAYS, *FILLERS, *FRAMES], 2):
        assert a not in b


def test_a_frame_names_every_tag_so_that_a_lost_one_is_noticed():
    for frame in FRAMES:
        assert all(tag in frame for tag in TAGS)


# --- demonstrations -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mini_worlds(full_world):
    avoid = frozenset(name for names in full_world.names.values() for name in names)
    return [World(random.Random(seed), MINI, avoid) for seed in range(5)]


def test_no_demonstration_ever_shows_the_best_combination(mini_worlds):
    rng = random.Random(0)
    said = [frozenset(read(demo(rng, mini_worlds[:1], [1])[0])) for _ in range(3000)]
    assert not any(clauses >= BEST for clauses in said)
    for left_out in BEST:  # though any three of its four clauses are shown
        assert any(clauses >= BEST - {left_out} for clauses in said)
    assert set().union(*said) == set(CLAUSES)


def test_demonstrations_are_worded_as_taught_and_never_in_unseen_wordings(mini_worlds):
    rng = random.Random(0)
    unseen = [wording for c in CLAUSES.values() for wording in c.unseen]
    for _ in range(500):
        instruction = demo(rng, mini_worlds[:1], [1])[0]
        assert not any(wording in instruction for wording in unseen)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_following_all_the_right_clauses_leads_to_the_right_answer(full_world, monkeypatch, hops):
    certain = {habit: {clause: 0.0 for clause in said} for habit, said in demos.OBEY.items()}
    for habit, clause in [("entity", "entity"), ("state", "state"), ("exact", "exact"), ("full", "cont")]:
        certain[habit][clause] = 1.0
    monkeypatch.setattr(demos, "OBEY", certain)
    rng = random.Random(0)
    for _ in range(100):
        q = full_world.random_question(rng, hops)
        parts = demonstrate(rng, full_world, q, ["entity", "state", "exact", "cont"])
        text = "".join(part for part, _ in parts)
        assert last_answer(text) == q.path[-1]
        queries = re.findall("<search>(.*?)</search>", text)
        assert queries == [f"{r} of {e}" for r, e in zip(q.chain, q.path, strict=False)]
        notes = re.findall("</information>\n\n<think>(.*?)</think>", text)
        results = re.findall("<information>(.*?)</information>", text, re.S)
        assert len(notes) == len(results) == hops
        for note, result, relation, fact in zip(notes, results, q.chain, q.path[1:], strict=True):
            assert note.startswith(relation) and note.endswith(fact)
            assert fact in result  # the note repeats a result, not prior knowledge
        for part, by_agent in parts:
            assert by_agent != part.startswith("\n\n<information>")


def test_the_clauses_decide_how_often_a_demonstration_succeeds(full_world, monkeypatch):
    def score(clauses, hops, n=200):
        rng = random.Random(0)
        asked = [full_world.random_question(rng, hops) for _ in range(n)]
        texts = ["".join(part for part, _ in demonstrate(rng, full_world, q, clauses)) for q in asked]
        return sum(em(last_answer(text), [q.path[-1]]) for text, q in zip(texts, asked, strict=True)) / n

    for hops in (2, 3):
        assert score([], hops) < 0.15
        assert score(["whole"], hops) < 0.15
        assert score(["memory"], hops) < 0.15
        assert 0.2 < score(sorted(BEST), hops) < 0.4  # even told to go on, it mostly stops one fact short
    assert score(["early", "entity", "state", "exact"], 2) < 0.1
    assert score(["verbose", "entity", "state", "cont"], 2) < 0.1
    monkeypatch.setitem(demos.OBEY, "full", demos.OBEY["full"] | {"cont": 0.99})  # an agent that goes on when told to
    for hops in (2, 3):
        assert score(sorted(BEST), hops) > 0.85
        for clause in BEST:  # each of the four matters
            assert score(sorted(BEST - {clause}), hops) < score(sorted(BEST), hops) - 0.1


# --- the tokenizer ------------------------------------------------------------------------------------------------


def test_the_tokenizer_knows_every_text_of_the_world(tokenizer, full_world):
    said = [*SAYS, *FILLERS, *FRAMES, START, INVALID, "<answer>it is</answer>", observation(full_world.passages[:5])]
    said += [observation([passage]) for passage in full_world.passages] + [observation([])]
    said += [row["question"] for row in rows("train") + rows("test")]
    said += [f"<think> steps: {', '.join(chain)}</think>" for chains in CHAINS.values() for chain in chains]
    said += [f"<think>{relation} of {name} is {fact}</think>" for (name, relation), fact in full_world.facts.items()]
    for text, ids in zip(said, tokenizer(said, add_special_tokens=False)["input_ids"], strict=True):
        assert tokenizer.unk_token_id not in ids, text
    prompt = prompt_ids(tokenizer, START, rows("test")[0]["question"])
    assert tokenizer.unk_token_id not in prompt
    assert tokenizer.decode(prompt).startswith("<|user|>") and tokenizer.decode(prompt).endswith("<|assistant|>")
    assert tokenizer.unk_token_id in tokenizer("Tarkovsky", add_special_tokens=False)["input_ids"]


def test_demonstrations_show_results_exactly_as_a_run_does(tokenizer, full_world):
    for passages in (full_world.search("director of the film"), full_world.passages[:1], []):
        ids = tokenizer(observation(passages), add_special_tokens=False)["input_ids"]
        assert ids == observation_ids(tokenizer, SEARCH, passages, limit=10_000)


def test_tags_are_one_token_each(tokenizer):
    for tag in TAGS:
        assert len(tokenizer(f"a {tag}the{tag} of", add_special_tokens=False)["input_ids"]) == 5
        (id,) = tokenizer(tag, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode([id], skip_special_tokens=True) == tag


def test_the_saved_tokenizer_is_current_and_fits_the_policy(tokenizer):
    built = build_tokenizer()
    saved, made = (json.loads(t.backend_tokenizer.to_str()) for t in (tokenizer, built))
    assert saved == made
    assert tokenizer.chat_template == built.chat_template
    config = json.loads((FILES / "policy" / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == tokenizer.pad_token_id


def test_decoding_restores_a_trajectory_up_to_case_and_spaces(tokenizer, full_world):
    rng = random.Random(0)
    for _ in range(200):
        instruction, question, parts = demo(rng, [full_world], [1, 2, 3])
        text = f"{instruction}\n\nQuestion: {question}\n" + INVALID + "".join(part for part, _ in parts)
        back = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"], skip_special_tokens=False)
        assert squash(back) == squash(text)
        assert em(last_answer(back), [last_answer(text)]) == 1  # and the reward is the same


def test_the_tokenizer_survives_a_qwen2_config_and_being_saved_twice(tmp_path):
    text = "Question: Search one entity at a time. <search>director of</search> <answer>it is</answer>"
    built = build_tokenizer()
    ids = built(text, add_special_tokens=False)["input_ids"]
    first, second = tmp_path / "first", tmp_path / "second"
    model = tiny_policy(len(built))
    model.save_pretrained(first)
    save_tokenizer(built, first)
    loaded = AutoTokenizer.from_pretrained(first)
    model.save_pretrained(second)
    loaded.save_pretrained(second)  # as a run does with its policy
    for tokenizer in (loaded, AutoTokenizer.from_pretrained(second)):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")
        assert prompt_ids(tokenizer, START, "Who?") == prompt_ids(built, START, "Who?")


# --- the warm start -----------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other on a busy machine
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_warm_start_is_reproducible_and_never_sees_a_name_of_the_world(full_world, monkeypatch, one_thread):
    seen = []
    lessons = warm_start.lessons

    def spy(rng, worlds, *args):
        seen.append(worlds)
        return lessons(rng, worlds, *args)

    monkeypatch.setattr(warm_start, "lessons", spy)
    monkeypatch.setattr(warm_start, "N_WORLDS", 50)
    state = []
    for _ in range(2):
        model, _ = warm_start.train(tokens=12_000, seed=0, batch=400)  # small batches, so that every lesson occurs
        state.append(model.state_dict())
        random.random(), torch.rand(1)  # draws of other code in between change nothing
    assert all(torch.equal(state[0][name], state[1][name]) for name in state[0])
    torch.manual_seed(0)
    untrained = tiny_policy(len(build_tokenizer())).state_dict()
    assert all(not torch.equal(state[0][name], untrained[name]) for name in untrained)

    of_the_world = {name for names in full_world.names.values() for name in names}
    assert len(seen[0]) == 50
    for other in seen[0]:
        assert {kind: len(names) for kind, names in other.names.items()} == MINI
        assert not of_the_world & {name for names in other.names.values() for name in names}


# --- the scripted optimizer ---------------------------------------------------------------------------------------


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
SYMPTOMS = {  # missing clause: (a failure that shows it, a similar one that does not)
    "entity": (failure(PLAN, WHOLE, NOTE_1, answer("Cn Ds")), failure(PLAN, DIRECTOR, NOTE_1, answer("Cn Ds"))),
    "cont": (failure(PLAN, DIRECTOR, NOTE_1, answer("Cn Ds")), failure(PLAN, WHOLE, NOTE_1, answer("Cn Ds"))),
    "exact": (
        failure(PLAN, DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("it is Gl Hford")),
        failure(PLAN, DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("Gl Hford")),
    ),
    "state": (
        failure(PLAN, DIRECTOR, think(), BIRTHPLACE, answer("Gl Hford")),
        failure(PLAN, DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("Gl Hford")),
    ),
    "plan": (
        failure(think(), DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("Gl Hford")),
        failure(PLAN, DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("Gl Hford")),
    ),
}


def as_the_policy_s_tokens_decode(text):
    """Returns the text in lower case, with a space between any two tokens."""
    return re.sub(r"(</?\w+>|[?.,:()])", r" \1 ", text).lower().replace("question :", "Question:")


def proposals(text, clause, n=60):
    """Returns the share of candidates with `clause` over `n` prompts that show failures like `text`."""
    candidates = []
    for k in range(n):
        shown = re.sub(r"Axx", f"A{k}xx", re.sub(r"axx", f"a{k}xx", text))
        prompt = reflection_prompt(FRAMES[0], [(shown, ("Gl Hford",))], 6, 10_000)
        candidates += parse_reply(reply_to(prompt, seed=0))
    return sum(clause in read(c) for c in candidates) / len(candidates)


@pytest.mark.parametrize("written", [str, as_the_policy_s_tokens_decode])
@pytest.mark.parametrize("clause", SYMPTOMS)
def test_the_optimizer_infers_the_missing_clause_from_failures(clause, written):
    ill, well = SYMPTOMS[clause]
    with_symptom, without = proposals(written(ill), clause), proposals(written(well), clause)
    assert with_symptom > 0.2
    assert with_symptom > 3 * without


def test_an_agent_that_never_searches_should_search():
    text = failure(think(), answer("Gl Hford"))
    assert proposals(text, "entity") > 0.2
    assert "never searches" in reply_to(reflection_prompt(FRAMES[0], [(text, ("x",))], 6, 10_000), seed=3)


def test_an_answer_found_in_no_result_is_attributed_to_missing_notes():
    text = failure(PLAN, DIRECTOR, NOTE_1, BIRTHPLACE, NOTE_2, answer("Nowhere Atallford"))
    assert proposals(text, "state") > 0.2


def test_a_question_of_one_hop_needs_no_second_search():
    text = failure(PLAN, DIRECTOR, NOTE_1, answer("Ek Fcorp"), question="Name the director of the film Axx Bth?")
    assert proposals(text, "entity") < 0.1
    assert proposals(text, "cont") < 0.1


def test_a_clause_in_the_instruction_is_not_missing():
    text = SYMPTOMS["entity"][0]
    has_it = f"{FRAMES[0]} {CLAUSES['entity'].unseen[0]}"
    prompt = reflection_prompt(has_it, [(text, ("x",))], 6, 10_000)
    assert "One broad query" not in reply_to(prompt, seed=0)
    assert "One broad query" in reply_to(prompt.replace(has_it, FRAMES[0]), seed=0)


def failed_prompt(rng, full_world):
    """Returns an instruction and a run's reflection prompt for it, with four failures."""
    instruction = write(rng, random_clauses(rng), rng.randint(0, 2))
    shown = []
    while len(shown) < 4:
        q = full_world.random_question(rng, rng.choice([1, 2, 3]))
        text = "".join(part for part, _ in demonstrate(rng, full_world, q, read(instruction)))
        if last_answer(text) != q.path[-1]:
            shown.append((f"Question: {q.text}\n{text}", (q.path[-1],)))
    return instruction, reflection_prompt(instruction, shown, 6, 10_000)


@pytest.fixture(scope="module")
def replies(full_world):
    """Returns (parent, reply, [(candidate, reason for rejection or "")]) of 400 prompts."""
    rng = random.Random(0)
    out = []
    for _ in range(400):
        parent, prompt = failed_prompt(rng, full_world)
        reply = reply_to(prompt, seed=0)
        used, judged = {normalized(parent)}, []
        for text in parse_reply(reply):
            judged.append((text, check(text, parent, used, [], 1000, len)))
            used.add(normalized(text))
        out.append((parent, reply, judged))
    return out


def test_some_replies_are_malformed_and_most_are_fine(replies):
    prose_only = sum(not judged for _, _, judged in replies)
    reasons = Counter(reason.split()[0] if reason else "fine" for _, _, judged in replies for _, reason in judged)
    whole = sum(len(judged) == 6 and not any(reason for _, reason in judged) for _, _, judged in replies)
    assert 3 <= prose_only <= 30
    assert reasons["lost"] >= 20
    assert reasons["duplicate"] >= 10
    assert set(reasons) == {"fine", "lost", "duplicate"}
    assert reasons["fine"] > 0.85 * sum(reasons.values())
    assert whole > 150


def test_some_candidates_use_wordings_that_the_policy_never_read(replies):
    unseen = [wording for c in CLAUSES.values() for wording in c.unseen]
    candidates = [text for _, _, judged in replies for text, _ in judged]
    share = sum(any(wording in text for wording in unseen) for text in candidates) / len(candidates)
    assert 0.05 < share < 0.5


def test_some_candidates_would_do_harm_and_most_would_not(replies):
    new = [set(read(text)) - set(read(parent)) for parent, _, judged in replies for text, _ in judged]
    harmful = sum(bool(clauses & set(HARM)) for clauses in new) / len(new)
    assert 0.1 < harmful < 0.45
    for clause in HARM:
        assert any(clause in clauses for clauses in new)


def test_candidates_never_contradict_themselves_and_keep_all_other_clauses(replies):
    for parent, _, judged in replies:
        for text, _ in judged:
            slots = [CLAUSES[clause].slot for clause in read(text)]
            assert len(slots) == len(set(slots))
            assert {CLAUSES[clause].slot for clause in read(parent)} <= set(slots)


def test_a_paraphrase_keeps_the_clauses_in_other_words():
    parent = write(random.Random(0), ["whole", "state", "exact"])
    candidates = []
    for seed in range(20):
        candidates += parse_reply(reply_to(paraphrase_prompt(parent, 6), seed))
    assert len(candidates) > 80
    assert all(set(read(text)) == set(read(parent)) for text in candidates)
    assert len({normalized(text) for text in candidates}) > 50


def climb(world, seed, guess):
    """Returns the reward of the instruction that four revisions of START lead to, under an agent that obeys."""
    rng, instruction = random.Random(seed), START

    def play(instruction):
        q = world.random_question(rng, rng.choice([1, 2, 3]))
        text = "".join(part for part, _ in demonstrate(rng, world, q, read(instruction)))
        return float(last_answer(text) == q.path[-1]), (f"Question: {q.text}\n{text}", (q.path[-1],))

    def reward(instruction, n=40):
        return sum(play(instruction)[0] for _ in range(n)) / n

    for _ in range(4):
        failed = [shown for r, shown in (play(instruction) for _ in range(60)) if not r][:4]
        candidates = parse_reply(reply_to(reflection_prompt(instruction, failed, 6, 10_000), seed, guess))
        instruction = max([instruction, *candidates], key=reward)
    return reward(instruction, 100)


def test_an_optimizer_that_does_not_read_the_failures_does_clearly_worse(full_world, monkeypatch):
    monkeypatch.setitem(demos.OBEY, "full", {"cont": 0.99, "early": 0.02, None: 0.20})  # it goes on when told to
    reading, guessing = ([climb(full_world, seed, guess) for seed in range(10)] for guess in (False, True))
    print(f"reward after four revisions: reading {reading}, guessing {guessing}")
    assert sum(reading) / 10 > sum(guessing) / 10 + 0.1
    assert sum(r > g for r, g in zip(reading, guessing, strict=True)) >= 7


@pytest.mark.parametrize(
    "prompt", ["", "Hello!", "<ins_0> Search. </ins_0>", "<ins_1>...</ins_1> to <ins_6>...</ins_6>"]
)
def test_a_prompt_not_of_appendix_e_gets_no_candidate(prompt):
    assert parse_reply(reply_to(prompt, seed=0)) == []


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        child = Child(["-m", "world.optimizer"], tmp_path_factory.mktemp("optimizer") / "log")
    with child:
        yield child


def test_over_http_replies_depend_on_the_prompt_alone(server, full_world):
    prompts = [failed_prompt(random.Random(seed), full_world)[1] for seed in range(5)]
    optimizer = Optimizer(f"{server.url}/v1", "scripted", timeout=10, retries=0)
    first = [optimizer.ask(prompt, "t9 r0") for prompt in prompts]
    again = [optimizer.ask(prompt, "t18 r1") for prompt in reversed(prompts)]
    texts = [call.reply for call in first]
    assert texts == [call.reply for call in reversed(again)]
    assert texts == [reply_to(prompt, seed=0) for prompt in prompts]
    assert len(set(texts)) == 5
    assert [call.prompt_tokens for call in first] == [len(prompt) // 4 for prompt in prompts]
    assert all(call.completion_tokens > 0 for call in first)
    assert reply_to(prompts[0], seed=1) != texts[0]


def test_over_http_a_one_search_failure_leads_to_single_entity_searches_and_a_sentence_to_a_bare_name(server):
    text = failure(think(), WHOLE, answer("it is Cn Ds"))
    optimizer = Optimizer(f"{server.url}/v1", "scripted", timeout=10, retries=0)
    said = Counter()
    for k in range(10):
        prompt = reflection_prompt(START, [(text.replace("Axx", f"A{k}xx"), ("Gl Hford",))], 6, 10_000)
        said.update(clause for text in parse_reply(optimizer.ask(prompt, "t9 r0").reply) for clause in read(text))
    assert said["entity"] >= 6
    assert said["exact"] >= 6
    assert min(said["entity"], said["exact"]) > said["verbose"]


def test_a_port_that_cannot_be_bound_is_reported_in_one_line():
    command = [sys.executable, "-m", "world.optimizer", "--port", "70000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("cannot listen on 127.0.0.1:70000: ")


def test_the_optimizer_starts_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Child(["-m", "world.optimizer"], tmp_path / "log") as child:
        assert child.url
