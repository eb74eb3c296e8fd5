"""A model behind a chat endpoint, as an engine of evaluations."""

import json

import pytest
from test_evaluate import WORLD, run, write_jsonl

from config import Config
from extras.engines.chat import ChatEngine, Words
from plumbing.faults import EngineFault
from plumbing.files import read_jsonl

ENGINE = "--engine", "extras.engines.chat:ChatEngine"


def said(text):
    return {"choices": [{"message": {"content": text}}]}


MODELS = {"data": [{"id": "qwen"}]}


def test_a_chat_endpoint_plays_the_loop_with_observations_as_messages(serve, retriever, tmp_path):
    chat = serve(
        MODELS,
        said("I search. <search> Krevux Babith"),
        said("<answer> Trebak Faisticorp </answer>"),
    )
    write_jsonl(
        tmp_path / "q.jsonl", [json.loads((WORLD / "test.jsonl").read_text().splitlines()[0])]
    )
    flags = ["--data", tmp_path / "q.jsonl", "--retriever", retriever, "--out", tmp_path / "o"]
    _, fault = run(chat.url + "/v1", *ENGINE, *flags)
    [row] = read_jsonl(tmp_path / "o" / "results.jsonl")
    assert not fault and (row["em"], row["searches"]) == (1.0, 1)
    first, second = (json.loads(body) for _, _, body in chat.requests[1:])
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    # the endpoint cuts stop strings
    assert second["messages"][1]["content"].endswith(" Krevux Babith</search>")
    assert second["messages"][2]["content"].startswith("<information>Doc 1(Title:")
    assert first["model"] == "qwen" and first["stop"] == ["</search>", "</answer>"]
    assert first["temperature"] == 0 and "seed" not in first


def test_words_come_back_whole_and_answers_that_are_no_chat_end_the_evaluation(serve):
    words = Words()
    for text in ("a b\n\n<x>c</x>  ", " leading", "", "tab\tand\u00a0more\n"):
        assert words.decode(words(text)["input_ids"]) == text
    url = serve(MODELS, {"choices": []}).url
    engine = ChatEngine(Config(model=url), None, ("</answer>",), retries=0)
    with pytest.raises(EngineFault, match="malformed answer"):
        while True:
            list(
                engine.generate(
                    {0: words("hello")["input_ids"]} if not engine.running else {}, 5, 0.0
                )
            )
    engine.close()


def turns_of(engine, texts, temperature=0.0):
    """Plays one turn of each row; returns (text, why the row ended) by row."""
    contexts, ended = {k: engine.tokenizer(text)["input_ids"] for k, text in enumerate(texts)}, {}
    engine.reset(0)
    while len(ended) < len(texts):
        for turn in engine.generate(contexts, 50, temperature):
            ended[turn.key] = engine.tokenizer.decode(turn.ids), turn.stop
        contexts = {}
    return ended


def chatting(serve, answer, name="qwen", models=MODELS, retries=0):
    """Returns an engine whose server says answer(body) to each completion, and the bodies of what
    was asked."""
    asked = []

    def respond(handler):
        if handler.command == "POST":
            asked.append(json.loads(handler.body))
        return answer(asked[-1]) if handler.command == "POST" else models

    cfg = Config(model=f"{serve(respond).url}#{name}")
    return ChatEngine(cfg, None, ("</search>", "</answer>"), retries=retries), asked


LONG = "a very long question " * 20
TOO_LONG = "This model's maximum context length is 128 tokens. However, your prompt contains 129"
FILTERED = "The response was filtered due to the prompt triggering our content management policy."


@pytest.mark.parametrize("status, words, stop", [
    (400, TOO_LONG, "length"), (413, "Payload Too Large", "length"), (400, FILTERED, "refused"),
])  # fmt: skip
def test_one_conversation_that_a_server_refuses_ends_and_the_others_go_on(
    serve, status, words, stop
):
    def answer(body):
        if len(body["messages"][0]["content"]) > 128:
            return status, {}, json.dumps({"error": {"message": words}})
        return said("<answer> Bern </answer>")

    engine, asked = chatting(serve, answer)
    bern = ("<answer> Bern </answer>", "")
    assert turns_of(engine, ["Short", LONG, "Hi", LONG]) == {
        0: bern,
        1: ("", stop),
        2: bern,
        3: ("", stop),
    }
    assert turns_of(engine, [LONG]) == {0: ("", stop)}  # also where no other is played
    assert turns_of(engine, ["Short"]) == {0: bern}
    assert {"max_tokens", "stop"} <= asked[-1].keys()
    engine.close()


@pytest.mark.parametrize("text, ended, turn", [
    ("<search> who", "stop", "<search> who</search>"), ("<search> who", "length", "<search> who"),
    ("<answer> x </answer> and", "length", "<answer> x </answer>"),
])  # fmt: skip
def test_a_turn_that_was_cut_at_a_limit_neither_calls_nor_answers(serve, text, ended, turn):
    reply = {"choices": [{"message": {"content": text}, "finish_reason": ended}]}
    engine, _ = chatting(serve, lambda body: reply)
    assert turns_of(engine, ["Who?"]) == {0: (turn, "")}
    engine.close()


@pytest.mark.parametrize("status", [400, 401])
def test_a_server_that_refuses_everything_ends_the_evaluation(serve, status):
    engine, _ = chatting(serve, lambda body: (status, {}, "context length: 0 tokens"))
    with pytest.raises(EngineFault, match=f"HTTP {status}: context length"):
        turns_of(engine, ["Who?"])
    engine.close()
