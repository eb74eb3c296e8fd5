"""The page's data: the family tree, the sample of trajectories, the first screen, the HTML."""

import base64
import gzip
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from extras.page import __main__ as command
from extras.page import html, read, sample
from extras.page.family import collect_family
from plumbing.faults import Fault

RUN = Path(__file__).parent / "run"  # nine steps of the embedded world, see its README


def write(path: Path, name: str, *rows: dict) -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(file: Path) -> list[dict]:
    packed = file.suffix == ".gz"
    lines = gzip.open(file, "rt", encoding="utf-8") if packed else file.open(encoding="utf-8")
    return [json.loads(line) for line in lines]


def game(path: Path) -> Path:
    """Copies RUN as a run of another task would have written it: its metric is "won", its tool is
    counted as "moves"."""
    shutil.copytree(RUN, path)
    names = {"em": "won", "searches": "moves"}
    for name in ("metrics.jsonl", "summary.json"):
        text = (path / name).read_text()
        text = re.sub(r'\b(em|searches)(?=["/])', lambda found: names[found[0]], text)
        (path / name).write_text(text)
    first, *steps = read_lines(path / "metrics.jsonl")
    write(path, "metrics.jsonl", first | {"metrics": ["won"], "tools": ["moves"]}, *steps)
    return path


def scripts_of(text: str) -> list[tuple[str, str]]:
    """The script elements of a page: their attributes, and what they hold."""
    return re.findall(r"<script\b([^>]*)>(.*?)</script>", text, re.S)


def rows_of(index: dict) -> list[dict]:
    return [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]


# ---- the family tree


def test_the_tree_says_who_left_when_and_who_was_refused():
    def instruction(id: int, text: str, parent=None, born=0) -> dict:
        return {"id": id, "text": text, "parent": parent, "born": born}

    a, b = instruction(0, "a"), instruction(1, "b", 0)
    c, d = instruction(2, "c", 1, born=4), instruction(3, "d", 1, born=4)
    events = [
        {"t": 0, "event": "start", "P": [a, b]}, {"t": 2, "event": "prune", "P": [b]},
        {"t": 4, "event": "evolve", "P": [c, d]},
    ]  # fmt: skip
    steps = [
        {"t": 1, "w": {"0": 0.1, "1": 0.5}, "p": {"0": 0.2, "1": 0.8}, "n": {"1": 10}},
        {"t": 2, "w": {"1": 0.6}, "p": {"1": 1.0}, "n": {"1": 10}},
    ]
    prompt = "<example>\nResponse: Question: q?\nx\nCorrect answer: g\n</example>"
    reply = "Because.\n" + "".join(f"<ins_{k}> {x} </ins_{k}>\n" for k, x in enumerate("chdeg", 1))
    call = {"prompt": prompt, "reply": reply}
    call |= {"prompt_tokens": 7, "completion_tokens": 2, "seconds": 0.5}
    rewards = zip("cdeg", (0.5, 0.3, 0.3, 0.4), strict=True)
    verified = [{"text": text, "r": r, "r_parent": 0.4} for text, r in rewards]
    place, refused = {"t": 4, "round": 1, "parent": 1}, [{"k": 2, "reason": "duplicate"}]
    reflections = [
        place | {"call": call},
        place | {"accepted": [1, 3, 4, 5], "rejected": refused},
        place | {"D_B": ["q"] * 20, "verified": verified},
    ]
    tree = collect_family(read.Run(Path(), {}, steps, events, reflections, {}))
    by_id = {I["id"]: I for I in tree["instructions"]}
    left = [(2, "pruned"), (4, "succeeded"), (None, ""), (None, "")]
    assert [(I["left"], I["why"]) for I in by_id.values()] == left
    assert [I["parents"] for I in by_id.values()] == [[], [0], [1], [1]]
    assert by_id[1]["history"] == [[1, 0.5, 0.8, 10], [2, 0.6, 1.0, 10]]
    assert (by_id[2]["r"], by_id[2]["questions"], by_id[3]["r"]) == (0.5, 20, 0.3)
    whys = [("h", "duplicate"), ("e", "below its parent"), ("g", "no place was left")]
    assert [(c["text"], c["why"]) for c in tree["refused"]] == whys
    assert tree["candidates"] == {"4.1.1": "2", "4.1.2": "3", "4.1.3": "r1", "4.1.4": "r2"}
    told = tree["calls"][by_id[2]["call"]]
    assert told["failures"] == [{"text": "Question: q?\nx", "gold": "g"}]


# ---- trajectories


def test_rollouts_of_a_verification_are_played_under_a_parent_and_its_candidates():
    run = read.read_run(RUN)
    tree = collect_family(run)
    rows = rows_of(sample.sample_trajectories(run, tree, 1)[0])
    parents = {(row["t"], row["round"]): str(row["parent"]) for row in run.reflections}
    wanted = []
    for file in sorted((RUN / "trajectories").glob("verify-*")):
        t, turn = map(int, file.name.removesuffix(".jsonl.gz").split("-")[1:])
        for row in read_lines(file):
            place = f"{t}.{turn}.{row['candidate']}"
            wanted.append(tree["candidates"][place] if row["candidate"] else parents[t, turn])
    assert [row["ins"] for row in rows if row["kind"] == "verification"] == wanted
    assert len(set(wanted)) > 10 and any(name[0] == "r" for name in wanted)


def test_a_response_is_cut_where_the_policy_stops_and_a_tool_speaks():
    parts = [
        ["act", "<search> x </search>"],
        ["obs", "<information>Doc</information>"],
        ["act", "what"],
        ["obs", "\n\nThat was neither\n\n"],
        ["act", "<answer> x </answer>"],
    ]
    turns = [{"text": text} for kind, text in parts if kind == "act"]
    response = "".join(text for _, text in parts)
    assert sample.split_response({"response": response, "turns": turns}) == parts
    elsewhere = {"response": "all of it", "turns": [{"text": "elsewhere"}]}
    assert sample.split_response(elsewhere) == [["act", "all of it"]]


# ---- the first screen


def test_the_cost_of_an_unfinished_run_is_that_of_the_finished_one():
    run, rows = read.read_run(RUN), read_lines(RUN / "metrics.jsonl")
    whole, calls = read.sum_costs(run), [row["call"] for row in run.reflections if "call" in row]
    run.summary = {}
    part = read.sum_costs(run)
    names = ("optimizer_calls", "training_rollouts", "verification_rollouts", "prompt_tokens")
    assert [part[name] for name in names] == [whole[name] for name in names]
    assert whole["completion_tokens"] == sum(call["completion_tokens"] for call in calls) > 0
    phases, evolve = whole["phases"], sum(row.get("time/evolve", 0) for row in rows)
    assert whole["training_rollouts"] == sum(sum(row["n"].values()) for row in rows if row["t"])
    assert sum(phases.values()) == pytest.approx(whole["seconds"]) and min(phases.values()) >= 0
    # verification is a part of time/evolve
    assert phases["verify"] + phases["evolve"] == pytest.approx(evolve)


def test_a_run_of_another_task_is_shown_by_its_own_metric(tmp_path):
    path = game(tmp_path / "run")
    summary = json.loads((path / "summary.json").read_text())
    page, _ = html.describe_run(read.read_run(path), 10**6)
    assert (page["metric"], page["metrics"], page["tools"]) == ("won", ["won"], ["moves"])
    assert page["learned"]["table"] == summary["held_out"]
    series = page["curves"]["series"]
    assert "em" not in series and series["test/won"][-1] == summary["end"]["won"]


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(RUN / name, tmp_path / name)
    page, _ = html.describe_run(read.read_run(tmp_path), 100)
    assert not page["finished"] and page["t"] == 9 and page["learned"]["rewards"]
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(Fault, match="metrics.jsonl is not in it"):
        read.read_run(tmp_path)


# ---- the HTML


def test_text_of_a_model_cannot_leave_its_element_nor_a_password_reach_the_page(tmp_path):
    evil = "</script><img src=x onerror=alert(1)><!--<script>{{data}}\u2028"
    path = shutil.copytree(RUN, tmp_path / "run")
    rows = read_lines(path / "population.jsonl")
    write(
        path,
        "population.jsonl",
        *[row | {"P": [I | {"text": evil} for I in row["P"]]} for row in rows],
    )
    config = json.loads((path / "config.json").read_text())
    config |= {"retriever": "https://ann:Geheim7@host:8000", "model": evil}
    write(path, "config.json", config)
    text = html.build_page([path])
    [data] = [json.loads(body) for marks, body in scripts_of(text) if 'id="data"' in marks]
    assert "<img" not in text and "<!--<" not in text and "{{data}}" in text
    [run] = data["runs"]
    assert run["tree"]["instructions"][0]["text"] == evil == run["config"]["model"]
    assert run["config"]["retriever"] == "https://host:8000" and "Geheim7" not in text


def test_only_the_page_s_own_script_may_run_and_nothing_is_fetched():
    page = html.build_page([RUN])
    data_only = ('type="application/json"', 'type="text/plain"')
    [running] = [
        body for marks, body in scripts_of(page) if not marks.strip().startswith(data_only)
    ]
    digest = base64.b64encode(hashlib.sha256(running.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in page
    assert not any("src=" in marks for marks, _ in scripts_of(page))
    assert "Leon Sorokin" in page  # the licence of the chart library


def test_the_command_writes_where_it_is_told_or_says_why_not(tmp_path, capsys):
    path = shutil.copytree(RUN, tmp_path / "run")
    command.main([str(path)])
    assert (path / "report.html").read_text().startswith("<!doctype html>")
    assert "report.html" in capsys.readouterr().out
    command.main([str(path), str(RUN), "--out", str(tmp_path / "two.html")])
    assert (tmp_path / "two.html").read_text().count('"curves":') == 2
    for argv, says in (
        ([str(tmp_path)], "holds no run that has begun"),
        ([str(RUN), "--out", "/nowhere/x.html"], "cannot write /nowhere/x.html"),
    ):
        with pytest.raises(SystemExit, match=says):
            command.main(argv)
