"""The LLM-based optimizer (§3.2): App. E's prompts, strict parsing, and a client that no fault of
an endpoint stops."""

import json
import re
import time
from dataclasses import asdict
from functools import partial

import pytest
from json_server import free_port, json_servers

import reflect
from config import parse_flags
from plumbing.faults import OptimizerDown
from plumbing.words import cut_middle
from reflect import (
    Optimizer,
    connect_optimizer,
    count_tokens,
    find_flaw,
    fold_words,
    history_prompt,
    paraphrase_prompt,
    read_blocks,
    read_candidates,
    reflection_prompt,
    shorten,
)
from tasks.search_qa import SEARCH_R1
from tasks.tools import find_lost_tag


def words(text):
    return len(text.split())


@pytest.fixture
def in_words(monkeypatch):
    """A token is a word."""
    monkeypatch.setattr(reflect, "count_tokens", words)


# --- the prompts of App. E
# ----------------------------------------------------------------------------------------


def test_the_paraphrase_prompt_is_that_of_appendix_e():
    assert paraphrase_prompt("Search. Then <answer> x </answer>.", 6) == (
        "<ins_0> Search. Then <answer> x </answer>. </ins_0>\n"
        "\n"
        "Improve the above prompt.\n"
        "Give 6 different candidates.\n"
        "Make sure you include the same XML tags <>...</> as the original prompt in your improved prompts.\n"
        "For each XML tag, include both the beginning and ending tags, such as <answer>...</answer>.\n"
        "List the instruction candidates in <ins_1>...</ins_1> to <ins_6>...</ins_6> tags."
    )


def test_the_history_prompt_is_that_of_appendix_e():
    assert history_prompt([("Do A.", 0.1), ("Do B.", 0.456)], 3) == (
        "<history>\n<ins_0> Do A. </ins_0>\n<score_0> 10 </score_0>\n"
        "<ins_1> Do B. </ins_1>\n<score_1> 46 </score_1>\n</history>\n\n"
        "Based on the above “instruction: score” history for instructions with their scores, where the score ranges "
        "from 0 to 100, analyze what components can lead to better performance.\n"
        "Give 3 different but better candidates. Make it concise and effective. Be creative and diverse in your "
        "suggestions.\n"
        "Make sure you include the same XML tags <>...</> as the original prompt in your improved prompts.\n"
        "For each XML tag, include both the beginning and ending tags, such as <answer>...</answer>.\n"
        "List the instruction candidates in <ins_1>...</ins_1> to <ins_3>...</ins_3> tags."
    )


def test_the_reflection_prompt_is_that_of_appendix_e():
    failures = [
        ("Question: who?\n<answer>it is me</answer>", ("me",)),
        ("Question: where?", ("Rome", "Roma")),
    ]
    assert reflection_prompt("Search. Then <answer> x </answer>.", failures, 3, 1000) == (
        "The initial prompt is:\n"
        "\n"
        "<ins_0>\n"
        "Search. Then <answer> x </answer>.\n"
        "</ins_0>\n"
        "\n"
        "However, it still gets the following examples wrong:\n"
        "\n"
        "<example>\n"
        "Response: Question: who?\n"
        "<answer>it is me</answer>\n"
        "Correct answer: me\n"
        "</example>\n"
        "<example>\n"
        "Response: Question: where?\n"
        "Correct answer: Rome or Roma\n"
        "</example>\n"
        "\n"
        "Analyze the reasons behind these mistakes and why the prompt could have gotten these examples wrong.\n"
        "Now take the reasons into account. Revise and improve the initial prompt by giving 3 different but better "
        "candidates.\n"
        "Make sure you include the same XML tags <>...</> as the original prompt in your improved prompts.\n"
        "For each XML tag, include both the beginning and ending tags, such as <answer>...</answer>.\n"
        "List the instruction candidates in <ins_1>...</ins_1> to <ins_3>...</ins_3> tags."
    )


def test_braces_in_an_instruction_or_a_response_reach_the_optimizer_unchanged():
    assert "<ins_0> {n} and {x[0]} </ins_0>" in paraphrase_prompt("{n} and {x[0]}", 2)
    prompt = reflection_prompt("{examples} {n}", [("{instruction} {{}}", ("{gold}",))], 2, 1000)
    assert "<ins_0>\n{examples} {n}\n</ins_0>" in prompt
    assert "Response: {instruction} {{}}\nCorrect answer: {gold}\n" in prompt


# --- long failures
# ------------------------------------------------------------------------------------------------

QUESTION = "Question: What is the country of the birthplace of the director of Solaris?"
ACTIONS = [
    "<think>the director first</think>",
    "<search>director of Solaris</search>",
    "<search>Andrei born</search>",
]
END = "<think>Zavrazhye is in Russia</think>\n<answer>Soviet Union</answer>"


def long_failure(passage_words):
    observed = (
        "<information>"
        + "Doc 1(Title: Solaris) "
        + "lorem ipsum " * (passage_words // 2)
        + "</information>"
    )
    return "\n".join([QUESTION, ACTIONS[0], ACTIONS[1], observed, ACTIONS[2], observed, END])


def test_a_failure_within_its_budget_is_shown_whole(in_words):
    text = long_failure(400)
    assert shorten(text, words(text)) == text
    assert cut_middle("x" * 80, 80) == "x" * 80


@pytest.mark.parametrize("budget", [600, 200, 80, 40])
def test_a_long_failure_loses_the_middle_of_its_observations_first(in_words, budget):
    short = shorten(long_failure(4000), budget)
    assert words(short) <= budget
    for part in (QUESTION, *ACTIONS, END):
        assert part in short
    assert short.count("<information>") == short.count("</information>") == 2
    assert " [...] " in short


def test_observations_are_cut_no_more_than_is_needed(in_words):
    text = long_failure(4000)
    by_budget = [words(shorten(text, budget)) for budget in (60, 200, 600, 2000)]
    assert by_budget == sorted(by_budget)
    assert by_budget[-1] > 500
    # an observation's start and end stay
    assert "Doc 1(Title: Solaris) lorem" in shorten(text, 600)


def test_an_observation_keeps_as_much_of_its_start_as_of_its_end_and_a_short_one_all():
    long, short = "".join(f"{k:04d}" for k in range(2000)), "short and whole"
    text = f"a<information>{long}</information>b<information>{short}</information>c"
    cut = re.fullmatch(
        rf"a<information>(\d+) \[...\] (\d+)</information>b<information>{short}</information>c",
        shorten(text, 375),
    )
    start, end = cut.groups()
    assert long.startswith(start) and long.endswith(end) and len(start) == len(end) > 400


def test_where_observations_are_not_enough_question_and_end_stay(in_words):
    text = QUESTION + "\n<think>" + "and so on " * 3000 + "</think>\n" + END
    short = shorten(text, 60)
    assert words(short) <= 60
    assert short.startswith(QUESTION)
    assert short.endswith(END)


def test_the_observations_of_every_tool_are_cut_over_all_their_lines():
    text = "<seen>" + "7\n" * 3000 + "</seen> the middle <result>" + "8\n" * 3000 + "</result>"
    short = shorten(text, 250, ("result", "seen"))
    assert "</seen> the middle <result>" in short and len(short) <= 1000
    assert "the middle" not in shorten(text, 250, ())


def test_a_failure_without_right_answers_has_none_in_the_prompt_and_the_only_one_has_the_whole_budget():
    text = long_failure(400)
    prompt = reflection_prompt("Do it.", [(text, ())], 6, count_tokens(text))
    assert f"<example>\nResponse: {text}\n</example>" in prompt and "Correct answer" not in prompt


def test_every_failure_gets_its_share_of_the_budget():
    failures = [(long_failure(4000), ("gold",))] * 4
    prompt = reflection_prompt("Do it.", failures, 6, 800)
    assert prompt.count(QUESTION) == prompt.count(END) == prompt.count("Correct answer: gold") == 4
    assert count_tokens(prompt) <= 800 + count_tokens(
        reflection_prompt("Do it.", [("", ("gold",))] * 4, 6, 800)
    )
    assert len(prompt) < len(reflection_prompt("Do it.", failures, 6, 8000))


# --- replies
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply, blocks",
    [
        ("<ins_1>A</ins_1><ins_2>B</ins_2>", ["A", "B"]),
        (
            "1. Too short.\n\n<ins_1>\n  A\nB  \n</ins_1>\n\nand\n\n<ins_2>C</ins_2>\nI hope this helps!",
            ["A\nB", "C"],
        ),
        ("", []),
        ("I would rewrite the prompt with clearer steps.", []),
        ("<ins_1>A", []),  # cut off
        ("A</ins_1>", []),
        ("<ins_1>A\n<ins_2>B</ins_2>", ["B"]),  # 1 was never closed
        ("<ins_1>A</ins_1><ins_2>B", ["A"]),
        ("<ins_1>A</ins_2>", []),
        ("<ins_1>A</ins_2> x </ins_1>", []),  # numbers that do not match: which text was meant?
        ("<ins_1>A</ins_2><ins_2>B</ins_2>", ["B"]),
        ("<ins_1>A <ins_2>B</ins_2> C</ins_1>", ["B"]),  # nested: the complete inner block alone
        ("<ins_1>A <ins_1>B</ins_1> C</ins_1>", ["B"]),
        # an echo of the parent is no candidate
        ("<ins_0>the parent</ins_0><ins_1>A</ins_1>", ["A"]),
        ("<ins_0><ins_1>A</ins_1></ins_0>", ["A"]),
        ("<ins_1><ins_0>the parent</ins_0></ins_1>", []),
        ("<ins_01>A</ins_01><ins_>B</ins_><ins_x>C</ins_x><ins_-1>D</ins_-1>", []),
        ("<INS_1>A</INS_1>", []),
        ("```xml\n<ins_1>\nA\n</ins_1>\n```", ["A"]),
        ("**<ins_1>** A **</ins_1>**", ["** A **"]),
        # as I_star.txt is read again
        ("<ins_1>A</ins_1>\r\n<ins_2>\r\nB\r\nC\r\n</ins_2>\r\n", ["A", "B\nC"]),
        ("<ins_1></ins_1><ins_2> \n </ins_2>", ["", ""]),  # `check` rejects them as empty
        ("<ins_1>A</ins_1><ins_1>B</ins_1>", ["A", "B"]),  # a number twice: two candidates
        ("<ins_2>B</ins_2><ins_1>A</ins_1>", ["B", "A"]),  # in the order they come in
        ("<ins_1>```\nA\n```</ins_1>", ["```\nA\n```"]),  # the text of a block is not changed
        (
            "<ins_1><search> q </search> & <answer>a</answer></ins_1>",
            ["<search> q </search> & <answer>a</answer>"],
        ),
    ],
)
def test_only_complete_numbered_blocks_of_a_reply_count(reply, blocks):
    assert read_blocks(reply) == blocks


@pytest.mark.parametrize(
    "reply, blocks",
    [
        ("<think>Try <ins_1>A</ins_1>. No.</think>\n<ins_1>B</ins_1>", ["B"]),
        # its template wrote <think>
        ("Try <ins_1>A</ins_1>. No.</think>\n<ins_1>B</ins_1>", ["B"]),
        ("<think>Try <ins_1>A <think> </think></ins_1>. No.</think><ins_1>B</ins_1>", ["B"]),
        ("<think>Try <ins_1>A.</think><ins_1>B</ins_1>", ["B"]),
        ("<ins_1>Think in <think> </think>.</ins_1>", ["Think in <think> </think>."]),
        ("<think>Try <ins_1>A</ins_1>. Or rather", []),  # cut off
        ("Keep <think> and </think>. <ins_1>A</ins_1>", ["A"]),
        ("<ins_1>A</ins_1> They keep <think> and </think>.", ["A"]),
    ],
)
def test_drafts_in_the_thoughts_of_a_reasoning_model_do_not_count(reply, blocks):
    assert read_blocks(reply) == blocks


def test_ten_and_more_blocks_are_told_apart():
    reply = "\n".join(f"<ins_{k}>candidate {k}</ins_{k}>" for k in range(1, 26))
    assert read_blocks(reply) == [f"candidate {k}" for k in range(1, 26)]
    assert read_blocks("<ins_1>A</ins_10><ins_10>B</ins_10>") == ["B"]


@pytest.mark.parametrize("parent", ["Answer in <answer> </answer>.", "No tags at all."])
def test_talk_about_the_blocks_never_becomes_an_instruction(parent):
    reply = "Here they are, in <ins_1>...</ins_1> to <ins_6>...</ins_6> tags:\n<ins_1>B <answer> </answer></ins_1>"
    accepted = [
        text for text in read_blocks(reply) if not find_flaw(text, parent, set(), [], 100, PARSED)
    ]
    assert accepted == ["B <answer> </answer>"]


def test_a_long_broken_reply_is_parsed_in_no_time():
    start = time.thread_time()
    assert read_blocks("<ins_1>" * 20_000 + "x" * 200_000) == []
    assert read_blocks("<ins_1>" + "a < b " * 50_000) == []
    assert read_blocks("<think>" * 30_000 + "</think>" * 30_000) == []
    assert time.thread_time() - start < 2


# --- which candidates may join
# ------------------------------------------------------------------------------------

PARENT = "Think in <think> </think>, search with <search> </search>, answer in <answer> </answer>."
GOOD = f"Search one entity at a time. {PARENT}"


PARSED = partial(find_lost_tag, names=["search", "answer"])  # as with one tool, a search
FIG_4 = """You are required to answer the following question. To do so, you must externalize your entire thought \
process using the specified XML tags. Your task is to follow the "Evidence-Based Reasoning" protocol.
- **Plan:** In a `<think>...</think>` block, create a numbered plan of inquiry.
- **Execute & Analyze:** For each planned step: Execute a `<search>...</search>`. Analyze the results in a \
`<think>...</think>` block using this mandatory format: **Evidence:** Quote the exact text from the source document...
- **Synthesize & Answer:** Then, provide the final answer in a self-contained `<answer>...</answer>` block."""


APP_F = """Answer the given question. You must act as a meticulous researcher.
First, conduct your reasoning inside <think> and </think>. Create a step-by-step plan to identify all the key entities \
(people, places, events, objects) in the question.
You must use <search>query</search> to find information about each entity individually. Never search for the entire \
question. Search results will appear between <information> and </information>.
After each search, you must pause and analyze the results in a new <think> block. In your analysis, focus on the \
**context** of the information. Ask yourself:
* Is this information current or historical?
* Does this refer to a real-world fact or a detail from a fictional work?
* Is this name/place/date definitive, or are there other possibilities?
State the key fact and its context clearly. Then, decide if another search is needed.
Once you have gathered sufficient verified and contextualized facts, you must perform a final synthesis in a \
concluding <think> block. This synthesis must:
1. List the key facts and their important context (e.g., "Munich - filming location, not fictional setting").
2. Logically connect these facts, respecting their context, to formulate an answer.
3. Explicitly state the answer you have formulated based on this logic.
Finally, provide that direct answer inside <answer> and </answer>. Do not include illustrations or justifications in \
the answer. For example: <answer>Beijing</answer>."""


def reason(candidate, parent=PARENT, used=(), golds=(), max_tokens=100, parsed=PARSED):
    return find_flaw(
        candidate, parent, {fold_words(t) for t in used}, list(golds), max_tokens, parsed
    )


def test_a_well_formed_candidate_may_join():
    assert reason(GOOD, used=[PARENT, "another one"], golds=["Zavrazhye"]) == ""


@pytest.mark.parametrize("candidate", ["", "...", "-", "!?"])
def test_a_candidate_without_a_word_is_empty(candidate):
    assert reason(candidate, parent="No tags.") == "empty"


@pytest.mark.parametrize(
    "candidate",
    [
        PARENT,
        PARENT.upper(),
        PARENT.replace(" ", "\r\n  "),
        PARENT.replace(",", ";").rstrip("."),
        f"**{PARENT}**",
    ],
)
def test_a_candidate_that_differs_in_case_space_and_punctuation_alone_is_a_duplicate(candidate):
    assert reason(candidate, used=["x", PARENT]) == "duplicate"
    assert reason(candidate + " Really.", used=["x", PARENT]) != "duplicate"


def test_a_candidate_may_be_as_long_as_the_limit_and_no_longer():
    n = count_tokens(GOOD)
    assert reason(GOOD, max_tokens=n) == ""
    assert reason(GOOD, max_tokens=n - 1) == f"longer than {n - 1} tokens"


@pytest.mark.parametrize("tag", ["<search>", "</search>", "<answer>", "</answer>"])
def test_a_candidate_that_lost_a_tag_of_its_parent_s_that_is_parsed_is_rejected(tag):
    assert reason(GOOD.replace(tag, "")) == f"lost {tag}"
    assert reason(GOOD.replace(tag, tag.replace("<", "["))) == f"lost {tag}"
    assert reason(GOOD.replace(tag, tag.upper())) == f"lost {tag}"
    # the parent does not have it either
    assert reason(GOOD.replace(tag, ""), parent=PARENT.replace(tag, "")) == ""
    assert reason(GOOD.replace(tag, ""), parsed=partial(find_lost_tag, names=["calculate"])) == ""


def test_all_other_tags_are_its_own_to_choose():
    assert reason(f"{GOOD} Write a <plan> </plan>.") == ""
    assert reason("Search first.", parent="Just answer, x < y > z.") == ""
    assert reason(GOOD.replace("<think>", "").replace("</think>", "")) == ""
    assert reason(GOOD.replace("answer in", "as in <answer> Paris </answer>: answer in")) == ""


@pytest.mark.parametrize("paper_s", [FIG_4, APP_F])
def test_the_paper_s_own_instructions_may_follow_search_r1_s_whatever_the_golds(paper_s):
    """Every word of theirs, and every phrase in lower case, may be the right answer of a failure.
    Figure 4's has lost <information>, and gives no example of an answer."""
    assert "<information>" in SEARCH_R1 and "<information>" not in FIG_4
    words = paper_s.split()
    golds = ["James Madison", "Citibank", "Munich", "Evidence", *words]
    golds += [" ".join(words[k : k + 2]).lower() for k in range(len(words))]
    assert reason(paper_s, parent=SEARCH_R1, golds=golds, max_tokens=1000) == ""
    for leaked in ("The answer is Munich.", "It was James Madison."):
        text = f"{paper_s} {leaked}"
        assert "gold answer" in reason(text, parent=SEARCH_R1, golds=golds, max_tokens=1000)


@pytest.mark.parametrize(
    "gold, leaked",
    [
        # a name of several words, anywhere
        ("Andrei Tarkovsky", "For films the answer is often andrei  TARKOVSKY."),
        ("Andrei Tarkovsky", "Search (Andrei Tarkovsky)!"),
        ("Andrei Tarkovsky", "Ａｎｄｒｅｉ Ｔａｒｋｏｖｓｋｙ"),
        ("Andrei Tarkovsky", "𝐀𝐧𝐝𝐫𝐞𝐢 𝐓𝐚𝐫𝐤𝐨𝐯𝐬𝐤𝐲"),  # full-width, mathematical
        ("May 1972", "For example, May 1972."),
        ("New Rome", "For New Romeo of New Rome."),  # the second of two places
        ("東京", "日本の首都は東京です。"),
        ("北京", "答案是北京"),
        ("김구", "정답은 김구이다"),
        ("ムスメ", "ﾑｽﾒ"),
        # one word, or a phrase in lower case, as the answer
        ("Munich", "The answer to the question about the film is Munich."),
        ("Munich", "Answers of this kind are in Germany: Munich, say."),
        ("Munich", "Where a film was shot, answer 'Munich'. Go on."),
        ("Munich", "For example: <answer> Munich </answer>"),
        ("Munich", "For example: <answer> in MUNICH, I think </answer>"),
        ("1972", "The final answer was 1972."),
        ("Łódź", "Answer: łódź"),
        ("Москва", "<answer>МОСКВА</answer>"),
        ("Νίκος", "<answer>ΝΊΚΟΣ</answer>"),
        ("red blood cells", "The answer is: the red blood cells!"),
        ("no effect", "<answer>no effect</answer>"),
    ],
)
def test_a_candidate_that_names_a_gold_answer_is_rejected(gold, leaked):
    assert (
        reason(f"{GOOD} {leaked}", golds=["other", "yes", gold])
        == f"contains the gold answer {gold!r}"
    )


@pytest.mark.parametrize(
    "gold, innocent",
    [
        ("Andrei Tarkovsky", "Search for directors such as Andrei."),
        ("hotel", "Search for hoteliers."),  # inside another word
        ("Tarkovsky", "aTarkovskyb"),
        # one word, or a phrase in lower case, that is not the answer
        ("Munich", 'List the facts (e.g., "Munich - filming location, not fictional setting").'),
        ("Munich", "Is this Munich? Then formulate your answer."),
        ("Evidence", "Evidence: quote the text. Then the answer: once it is there."),
        ("1972", "Search for years such as 1972, and give the answer."),
        ("key facts", "List the key facts."),
        # too short to be a leak: "a", "yes", "two" are words of any prompt
        ("one", "Take one step."),
        ("the", "Read the results."),
        ("", "Whatever."),
        ("!!!", "Whatever!!!"),
        ("answer", "Give the answer."),  # the parent names it already
        ("水", "先に水を探す。"),  # one ideograph is a word of any prompt
        ("김", "김밥"),
        ("Jane Austen", "Austen wrote; Jane read."),
        ("New York", "newyork"),
    ],
)
def test_a_gold_answer_leaks_only_as_whole_words_that_are_long_and_new(gold, innocent):
    assert reason(f"{innocent} {PARENT}", golds=[gold]) == ""


@pytest.mark.parametrize(
    "addition, fault",
    [
        ("<|im_end|>\n<|im_start|>assistant", "holds the control token <|im_"),
        ("＜|im_end|＞", "holds the control token <|im_end|>"),
        ("<｜User｜>", "holds the control token <"), ("</s>", "holds the control token </s>"),
        ("[/INST] Sure.", "holds the control token [/INST]"), ("<eos>", "holds the control token <eos>"),
        ("\x1b[2J\x1b[31mred", "holds control characters"), ("a\x00b", "holds control characters"),
        ("One.\\nTwo.", "holds escapes"), ('Say \\"so\\".', "holds escapes"),
        ("\u202eabc", "holds control characters"),
        ("<information>Doc 1(Title: Emma) Emma is a novel by Jane Austen.</information>", "holds a search result"),
        ("<information>Emma is a novel by Austen.</information>", "holds a search result"),
        ("\nQuestion: who wrote Emma?", "asks a question of its own"), ("\n > QUESTION : x", "asks a question"),
    ],
)  # fmt: skip
def test_a_candidate_that_speaks_for_somebody_else_is_rejected(addition, fault):
    assert reason(f"{GOOD} {addition}").startswith(fault)
    assert reason(f"{GOOD} {addition} Really.", parent=f"{PARENT} {addition}") in (
        "",
        "holds control characters",
    )


@pytest.mark.parametrize(
    "harmless",
    [
        "Give <answer> your final answer </answer>.", "Results come in <information> and </information>.",
        "Open with <answer>, write nothing else, and close with </answer>.",
        "<information> five words of any kind </information>",
        "For example <answer>...</answer>.", "The question: is it answered?", "Zoë • “quoted” – 漢字 می\u200cخواهم\tx",
        "Line one.\r\nLine two.", "<search> one entity </search>", "if a < b | c > d",
        r"Write $\nu \neq 0$.",
    ],
)  # fmt: skip
def test_what_an_instruction_says_about_the_format_is_welcome(harmless):
    assert reason(f"{GOOD} {harmless}") == ""
    assert (
        reason(
            "Really: " + SEARCH_R1.replace(" Beijing ", "Beijing"), parent=SEARCH_R1, max_tokens=999
        )
        == ""
    )


def test_a_long_reply_is_checked_in_no_time():
    start = time.thread_time()
    for text in (
        "a " * 100_000,
        "<answer>" * 20_000,
        "<|" * 50_000,
        "question" * 20_000,
        "é\u0301" * 50_000,
    ):
        reason(text, golds=["a" * 50, "aaaa", "Andrei Tarkovsky"], max_tokens=10**9)
    assert time.thread_time() - start < 3


def test_the_example_answer_of_search_r1_s_instruction_is_no_leak():
    assert "Beijing" in SEARCH_R1
    assert (
        reason("Really: " + SEARCH_R1, parent=SEARCH_R1, golds=["Beijing"], max_tokens=1000) == ""
    )
    assert (
        reason("Say <answer>Beijing</answer>. " + PARENT, golds=["Beijing"])
        == "contains the gold answer 'Beijing'"
    )


# --- a whole reply
# ------------------------------------------------------------------------------------------------


def test_a_reply_s_candidates_are_accepted_or_rejected_with_a_reason():
    used = {fold_words(PARENT), "another one"}
    reply = "".join(
        f"<ins_{k}>{text}</ins_{k}>"
        for k, text in enumerate(
            [
                GOOD,
                PARENT.upper(),
                "No tags.",
                f"Say Andrei Tarkovsky. {PARENT}",
                f"Twice. {PARENT}",
            ],
            1,
        )
    )
    accepted, rejected = read_candidates(
        reply, PARENT, used, ["Solaris", "Andrei Tarkovsky"], 100, 6, PARSED
    )
    assert accepted == {1: GOOD, 5: f"Twice. {PARENT}"}
    assert rejected == [
        {"k": 2, "reason": "duplicate"},
        {"k": 3, "reason": "lost <search>"},
        {"k": 4, "reason": "contains the gold answer 'Andrei Tarkovsky'"},
    ]
    assert read_candidates("I cannot help with that.", "parent", set(), [], 100, 6, PARSED) == (
        {},
        [],
    )
    assert used == {fold_words(text) for text in (PARENT, "another one", GOOD, f"Twice. {PARENT}")}
    accepted, _ = read_candidates(reply, PARENT, used, [], 100, 6, PARSED)
    assert accepted == {4: f"Say Andrei Tarkovsky. {PARENT}"}  # others are used


def test_two_candidates_of_one_reply_with_the_same_words_are_one():
    accepted, rejected = read_candidates(
        "<ins_1>A b.</ins_1><ins_2>a, B!</ins_2>", "parent", set(), [], 100, 6, PARSED
    )
    assert accepted == {1: "A b."} and rejected == [{"k": 2, "reason": "duplicate"}]


def test_candidates_are_measured_in_the_optimizer_s_tokens():
    text = "Search for one entity at a time, then answer."
    assert read_candidates(
        f"<ins_1>{text}</ins_1>", "parent", set(), [], count_tokens(text), 1, PARSED
    )[0] == {1: text}
    _, [row] = read_candidates(
        f"<ins_1>{text}</ins_1>", "parent", set(), [], count_tokens(text) - 1, 1, PARSED
    )
    assert row["reason"] == f"longer than {count_tokens(text) - 1} tokens"


# --- the client, against a real HTTP server
# -----------------------------------------------------------------------


def completion(reply="hello", **more):
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply}}]} | more


@pytest.fixture
def endpoint():
    """Start endpoints; they stop with the test."""
    with json_servers() as start:
        yield start


@pytest.fixture(autouse=True)
def no_waits(waits):
    pass


def base(server):
    """Returns the URL of an endpoint as OPENAI_BASE_URL has it."""
    return f"{server.url}/v1"


def test_the_client_speaks_openai_s_chat_completions(endpoint):
    server = endpoint(completion("héllo", usage={"prompt_tokens": 11, "completion_tokens": 7}))
    call = Optimizer(base(server), "some-model", "sk-secret").ask("what?\n☃")
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer sk-secret"
    assert json.loads(body) == {
        "model": "some-model",
        "messages": [{"role": "user", "content": "what?\n☃"}],
    }
    assert call.reply == "héllo"
    assert (call.prompt_tokens, call.completion_tokens) == (11, 7)
    assert 0 <= call.seconds < 5
    assert "sk-secret" not in json.dumps(asdict(call))  # it goes to a log file


def test_without_a_key_there_is_no_authorization_header_and_a_url_may_end_in_a_slash(endpoint):
    server = endpoint(completion(None))
    assert Optimizer(base(server) + "/", "m").ask("p").reply == ""  # of null
    [(path, headers, _)] = server.requests
    assert path == "/v1/chat/completions" and "Authorization" not in headers


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": 0}])
def test_tokens_that_the_endpoint_does_not_count_are_estimated(endpoint, usage):
    call = Optimizer(base(endpoint(completion("r" * 400, usage=usage))), "m").ask("p" * 4000)
    assert (call.prompt_tokens, call.completion_tokens) == (1000, 100)


def test_an_optimizer_that_stays_away_is_down_and_the_fault_is_named(endpoint, waits):
    server = endpoint((503, {}, "overloaded\n"))
    with pytest.raises(
        OptimizerDown, match=f"^{base(server)}/chat/completions: HTTP 503: overloaded$"
    ):
        Optimizer(base(server), "m", retries=2).ask("p")
    assert len({body for _, _, body in server.requests}) == 1 and len(server.requests) == 3
    assert len(waits) == 1  # the first attempt after a fault does not wait
    with pytest.raises(OptimizerDown, match="HTTP 401: no such key$"):
        Optimizer(base(endpoint((401, {}, "no such key"))), "m", "bad").ask("p")
    with pytest.raises(OptimizerDown):
        Optimizer("localhost:8001/v1", "m").ask("p")


@pytest.mark.parametrize(
    "text",
    [
        "<html>gateway</html>", "[]", "null", '"hello"', "{}", '{"error": {"message": "quota"}}', '{"choices": []}',
        '{"choices": [{"text": "legacy"}]}', '{"choices": [{"message": "hello"}]}',
        '{"choices": [{"message": {"content": 7}}]}',
        '{"choices": [{"message": {"content": "A"}}], "usage": "free"}',
        '{"choices": [{"message": {"content": "A"}}], "usage": {"prompt_tokens": "many"}}',
    ],
)  # fmt: skip
def test_a_malformed_completion_is_never_taken_for_a_reply(endpoint, waits, text):
    server = endpoint((200, {"Content-Type": "application/json"}, text))
    with pytest.raises(OptimizerDown, match=r"malformed answer \(\w+Error: ") as down:
        Optimizer(base(server), "m", retries=1).ask("p")
    assert len(server.requests) == 1
    assert "quota" not in text or "quota" in str(down.value)


def test_the_environment_s_proxy_is_asked_where_there_is_a_key(endpoint, monkeypatch):
    proxy = endpoint(completion("by proxy"))
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, proxy.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert (
        Optimizer(base(endpoint(completion("directly"))), "m", retries=0).ask("p").reply
        == "directly"
    )
    assert (
        Optimizer("http://api.inspo.invalid/v1", "m", "k", retries=0).ask("p").reply == "by proxy"
    )
    assert [path for path, _, _ in proxy.requests] == [
        "http://api.inspo.invalid/v1/chat/completions"
    ]


def test_a_reply_that_ended_at_a_limit_is_marked(endpoint):
    for reason, cut in (("length", True), ("stop", False), (None, False), (["length"], False)):
        answer = {"choices": [{"message": {"content": "hello"}, "finish_reason": reason}]}
        assert Optimizer(base(endpoint(answer)), "m").ask("p").cut is cut


def test_a_scripted_optimizer_that_died_is_started_again(endpoint):
    port = free_port()
    restart = lambda: endpoint(completion("back"), port=port)  # noqa: E731
    gone = f"http://127.0.0.1:{port}/v1"
    assert Optimizer(gone, "m", restart=restart).ask("p").reply == "back"


def test_after_max_tokens_no_call_is_made_and_an_earlier_process_s_count(endpoint):
    """--max_optimizer_tokens: a call may go beyond it, the next one is not made."""
    server = endpoint(completion(usage={"prompt_tokens": 60, "completion_tokens": 30}))
    optimizer = Optimizer(base(server), "m", max_tokens=100)
    calls = [optimizer.ask("p") for t in (1, 2)]
    with pytest.raises(OptimizerDown, match="--max_optimizer_tokens 100 is used up: 180 tokens"):
        optimizer.ask("p")
    spent = sum(call.prompt_tokens + call.completion_tokens for call in calls)
    with pytest.raises(OptimizerDown, match="used up: 180 tokens"):
        Optimizer(base(server), "m", max_tokens=100, tokens=spent).ask("p")
    assert len(server.requests) == 2
    unlimited = Optimizer(base(server), "m", tokens=spent)
    assert unlimited.ask("p").reply == "hello" and len(server.requests) == 3


def test_of_a_run_that_is_resumed_the_tokens_of_its_rows_count(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    cfg = parse_flags(["--optimizer_model", "m", "--max_optimizer_tokens", "10"])
    rows = [{"call": {"prompt_tokens": 3, "completion_tokens": 4}}, {"t": 1, "verified": []}]
    assert connect_optimizer(cfg, None, rows * 2).tokens == 14
