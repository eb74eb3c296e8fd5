"""The LLM-based optimizer (§3.2): App. E's prompts, strict parsing, and a client that no fault of
an endpoint stops."""

import json
from dataclasses import asdict
from functools import partial

import pytest

from plumbing.faults import OptimizerDown
from reflect import (
    Optimizer,
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
    observed = f"<information>{'lorem ipsum ' * (passage_words // 2)}</information>"
    return "\n".join([QUESTION, ACTIONS[0], observed, ACTIONS[1], observed, ACTIONS[2], END])


@pytest.mark.parametrize("budget", [20_000, 600, 80])
def test_a_long_failure_loses_its_middle(budget):
    long = long_failure(2000)
    short = shorten(long, budget)
    assert long == short if budget == 20_000 else budget - 4 < count_tokens(short) <= budget
    start, _, end = short.partition(" [...] ")
    assert long.startswith(start) and long.endswith(end)
    assert short.startswith(QUESTION) and short.endswith(END)


def test_a_failure_without_right_answers_has_none_in_the_prompt_and_the_only_one_has_the_whole_budget():
    text = long_failure(400)
    prompt = reflection_prompt("Do it.", [(text, ())], 6, count_tokens(text) + 3)
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
        ("1. Too short.\n<ins_1>\n  A\nB  \n</ins_1>\nand <ins_2>C</ins_2>\nBye!", ["A\nB", "C"]),
        ("I would rewrite the prompt with clearer steps.", []),
        ("<ins_1>A", []),  # cut off
        ("<ins_1>A\n<ins_2>B</ins_2>", ["B"]),  # 1 was never closed
        ("<ins_1>A</ins_2> x </ins_1>", []),  # numbers that do not match: which text was meant?
        ("<ins_1>A <ins_2>B</ins_2> C</ins_1>", ["B"]),  # nested: the complete inner block alone
        # an echo of the parent is no candidate
        ("<ins_0>the parent</ins_0><ins_10>A</ins_10>", ["A"]),
        # as I_star.txt is read again
        ("<ins_1>\r\nB\r\nC\r\n</ins_1>\r\n", ["B\nC"]),
        ("<ins_1>A</ins_1><ins_1>B</ins_1>", ["A", "B"]),  # a number twice: two candidates
        # drafts in the thoughts of a reasoning model
        ("<think>Try <ins_1>A</ins_1>. No.</think>\n<ins_1>B</ins_1>", ["B"]),
        # its template wrote <think>
        ("Try <ins_1>A</ins_1>. No.</think>\n<ins_1>B</ins_1>", ["B"]),
        ("<ins_1>Think in <think> </think>.</ins_1>", ["Think in <think> </think>."]),
        ("<think>Try <ins_1>A</ins_1>. Or rather", []),  # cut off
        ("<ins_1>A</ins_1>\n\nIn it the search comes after </think> now.", ["A"]),  # a mere mention
        ("<think>Try <ins_1>A</ins_1>.</think> Sorry, I cannot.", []),
    ],
)
def test_only_complete_numbered_blocks_of_a_reply_count(reply, blocks):
    assert read_blocks(reply) == blocks


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


@pytest.mark.parametrize("tag", ["<search>", "</answer>"])
def test_a_candidate_that_lost_a_tag_of_its_parent_s_that_is_parsed_is_rejected(tag):
    assert reason(GOOD.replace(tag, "")) == reason(GOOD.replace(tag, tag.upper())) == f"lost {tag}"
    # the parent does not have it either
    assert reason(GOOD.replace(tag, ""), parent=PARENT.replace(tag, "")) == ""
    assert reason(GOOD.replace(tag, ""), parsed=partial(find_lost_tag, names=["calculate"])) == ""


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


LEAK = "contains the gold answer"


@pytest.mark.parametrize(
    "gold, text, flaw",
    [
        # a name of several words, anywhere
        ("Andrei Tarkovsky", "For films the answer is often andrei  TARKOVSKY.", LEAK),
        ("Andrei Tarkovsky", "Ａｎｄｒｅｉ Ｔａｒｋｏｖｓｋｙ", LEAK),  # full-width
        ("Andrei Tarkovsky", "Search for directors such as Andrei.", ""),
        ("東京", "日本の首都は東京です。", LEAK),
        # one word, or a phrase in lower case, as the answer
        ("Munich", "The answer to the question about the film is Munich.", LEAK),
        ("Munich", "Where a film was shot, answer 'Munich'. Go on.", LEAK),
        ("Munich", "For example: <answer> in MUNICH, I think </answer>", LEAK),
        (
            "Munich",
            'List the facts (e.g., "Munich - filming location, not fictional setting").',
            "",
        ),
        ("red blood cells", "The answer is: the red blood cells!", LEAK),
        ("key facts", "List the key facts.", ""),
        # inside another word; too short; known from the parent
        ("hotel", "The answer is hoteliers.", ""),
        ("one", "The answer is one.", ""),
        ("", "Whatever.", ""),
        ("answer", "Give the answer.", ""),
        # what speaks for somebody else
        ("", "<|im_end|>\n<|im_start|>assistant", "holds the control token <|im_"),
        ("", "＜|im_end|＞", "holds the control token <|im_end|>"),
        ("", "</s>", "holds the control token </s>"),
        ("", "\x1b[2J\x1b[31mred", "holds control characters"),
        ("", "One.\\nTwo.", "holds escapes"),
        ("", "\n > QUESTION : x", "asks a question of its own"),
        # what an instruction says about the format
        ("", "Give <answer> your final answer </answer>.", ""),
        ("", "Results come in <information> and </information>.", ""),
        ("", "The question: is it answered?", ""),
        ("", "Zoë • “quoted” – 漢字 می\u200cخواهم\tx\r\nif a < b | c > d", ""),
        ("", r"Write $\nu \neq 0$.", ""),
    ],
)
def test_a_candidate_gives_no_answer_away_and_speaks_for_nobody_else(gold, text, flaw):
    found = reason(f"{GOOD} {text}", golds=["other", "yes", gold])
    assert found.startswith(flaw) and bool(found) == bool(flaw)


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


# --- the client, against a real HTTP server
# -----------------------------------------------------------------------


def completion(reply="hello", **more):
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply}}]} | more


@pytest.fixture(autouse=True)
def no_waits(waits):
    pass


def base(server):
    """Returns the URL of an endpoint as OPENAI_BASE_URL has it."""
    return f"{server.url}/v1"


def test_the_client_speaks_openai_s_chat_completions(serve):
    server = serve(completion("héllo", usage={"prompt_tokens": 11, "completion_tokens": 7}))
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


def test_without_a_key_there_is_no_authorization_header_and_a_url_may_end_in_a_slash(serve):
    server = serve(completion(None))
    assert Optimizer(base(server) + "/", "m").ask("p").reply == ""  # of null
    [(path, headers, _)] = server.requests
    assert path == "/v1/chat/completions" and "Authorization" not in headers


def test_an_optimizer_that_stays_away_is_down_and_the_fault_is_named(serve, waits):
    server = serve((503, {}, "overloaded\n"))
    with pytest.raises(
        OptimizerDown, match=f"^{base(server)}/chat/completions: HTTP 503: overloaded$"
    ):
        Optimizer(base(server), "m", retries=2).ask("p")
    assert len({body for _, _, body in server.requests}) == 1 and len(server.requests) == 3
    assert len(waits) == 1  # the first attempt after a fault does not wait
    with pytest.raises(OptimizerDown, match="HTTP 401: no such key$"):
        Optimizer(base(serve((401, {}, "no such key"))), "m", "bad").ask("p")
    with pytest.raises(OptimizerDown):
        Optimizer("localhost:8001/v1", "m").ask("p")


def test_a_reply_that_ended_at_a_limit_is_marked(serve):
    for reason, cut in (("length", True), ("stop", False), (None, False), (["length"], False)):
        answer = {"choices": [{"message": {"content": "hello"}, "finish_reason": reason}]}
        assert Optimizer(base(serve(answer)), "m").ask("p").cut is cut
