"""Text from outside is data: for the tokenizer, for the terminal, and when it arrives."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_like import MAKERS, control_ids, made

import ask
from config import Config
from plumbing.faults import Fault, one_line
from plumbing.outside import clean, plain, printable
from tasks import Question, Trajectory, Turn
from tasks.search_qa import SEARCH_R1
from tasks.task import load_task
from tasks.tools import Action, encode

TASK = load_task(Config(tools="search,calculator"))
SEARCH, TAGS = TASK.tools[0], TASK.make_format().reserved_tags()


def encode_observation(tokenizer, result, limit):
    return TASK.make_format(tokenizer).encode_result(Action("", tool=SEARCH), result, limit)


def prompt(tokenizer, instruction, question):
    return TASK.make_format(tokenizer).encode_prompt(instruction, Question("q", question))


def spellings(tokenizer):
    """Every token of control, and the same in capitals, full width, with a blank and with an
    invisible character."""
    out = []
    for token in tokenizer.added_tokens_decoder.values():
        text = token.content
        wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
        within = [f"{text[0]}{c}{text[1:]}" for c in "\u200b "]
        out += [text, text.upper(), wide, *within, text[1:], text[:-1]]
    return out


def pieces(name):
    tags = [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")]
    words = ["Paris", "Question:", "Doc 1(Title: x)", *" \n<|[1é漢\u202e", "</"]
    return st.sampled_from([*spellings(made(name)), *tags, *words])


def hostile(name):
    return st.lists(pieces(name) | st.text(max_size=3), max_size=8).map("".join).map(clean)


@pytest.mark.parametrize("name", MAKERS)
def test_no_outside_text_becomes_a_control_token(name):
    tokenizer, forbidden = made(name), control_ids(made(name))
    assert forbidden
    scaffold = [i for i in prompt(tokenizer, "x", "x") if i in forbidden]

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(hostile(name), hostile(name), hostile(name), st.sampled_from([7, 40, 10_000]))
    def check(instruction, question, passage, limit):
        ids = prompt(tokenizer, instruction, question)
        assert [i for i in ids if i in forbidden] == scaffold
        ids = encode_observation(tokenizer, [passage, passage], limit)
        assert not forbidden & set(ids)
        end = encode(tokenizer, "</information>\n\n")
        assert ids[-len(end) :] == end and len(ids) <= max(limit, len(end))
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.count("</information>") == 1
        assert not any(
            text.count(f"<{slash}{tag}>")
            for tag in TAGS
            if tag != "information"
            for slash in ("", "/")
        )

    check()


@pytest.mark.parametrize("name", MAKERS)
def test_the_control_tokens_would_come_through_if_nobody_looked(name):
    """What the test above guards against is real for every one of its tokenizers."""
    tokenizer = made(name)
    assert any(
        set(encode(tokenizer, f"a {text} b")) & control_ids(tokenizer)
        for text in spellings(tokenizer)
    )


@pytest.mark.parametrize("name", MAKERS)
def test_harmless_text_keeps_its_tokens(name):
    tokenizer = made(name)
    passages = [
        '"Emma (novel)"\nA novel by Jane Austen, 1815; a < b > c, <i>x</i> [1] {2} R&D.',
        "Zoë\n日本語 \u200c x",
    ]
    text = f"\n\n<information>{SEARCH.show(passages)}</information>\n\n"
    end = encode(tokenizer, "</information>\n\n")
    expected = encode(tokenizer, text[: -len("</information>\n\n")]) + end
    assert encode_observation(tokenizer, passages, 10_000) == expected
    question = "Who wrote “Emma” (the novel) & when?"
    message = {"role": "user", "content": f"{SEARCH_R1}\n\nQuestion: {question}\n"}
    whole = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert prompt(tokenizer, SEARCH_R1, question) == encode(tokenizer, whole)


def test_a_passage_of_megabytes_is_cut_before_it_is_tokenized():
    tokenizer, seen = made("qwen"), []

    class Watched:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, text, **kwargs):
            seen.append(len(text))
            return tokenizer(text, **kwargs)

    ids = encode_observation(Watched(), ["word " * 10**6] * 3, 100)
    assert len(ids) == 100 and max(seen) < 20_000
    assert ids == encode_observation(tokenizer, ["word " * 5000], 100)


# ---- arrival


def test_half_a_surrogate_pair_is_replaced():
    sent = r'{"a\ud800": ["x\udfff y", {"b": 2}, 1, null, true, 0.5], "😀": "\ud83d\ude00"}'
    found = {"a\ufffd": ["x\ufffd y", {"b": 2}, 1, None, True, 0.5], "😀": "😀"}
    assert clean(json.loads(sent)) == found


def test_plain_text_has_one_spelling():
    assert plain("Ｒｏ\u200bm\u00ade ﬁ ²") == "Rome fi 2" and plain("Zoë 漢") == "Zoë 漢"


# ---- the terminal


def test_what_the_agent_and_its_passages_say_moves_no_cursor(capsys):
    tau = Trajectory(0, Question("q", "Who?", (), "s"), 0, [], 0, prediction="\x1b[31mx")
    tau.turns = [Turn("<search>\x1b[2J</search>", "search", "", ["\x9b2J\x1b]0;owned\x07 passage"])]
    ask.show(tau)
    shown = capsys.readouterr().out
    assert (
        "\x1b" not in shown and "\x9b" not in shown and "\\x1b[31mx" in shown and "passage" in shown
    )


def test_no_control_character_reaches_a_terminal():
    hostile = "".join(map(chr, [*range(32), *range(127, 160), 0x202E, 0x2066, 0xD800]))
    assert set(printable(hostile)) - set("\t\n") <= set(map(chr, range(32, 127)))
    with pytest.raises(SystemExit) as ended, one_line("ask.py"):
        raise Fault("HTTP 400: \x1b]0;owned\x07")
    assert ended.value.code == "ask.py: HTTP 400: \\x1b]0;owned\\x07"
    for harmless in ("Zoë 漢字 😀👩\u200d👩 می\u200cخواهم", "a\tb\nc", "x\u00a0y"):
        assert printable(harmless) == harmless
