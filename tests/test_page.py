"""The page's data: what is read of a run, the family tree, the sample of trajectories, the first screen, the HTML."""

import base64
import gzip
import hashlib
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import requests
import uvicorn

import report
from journal.summary import ending, lineage
from page import html, sample
from page.curves import curves, groups
from page.family import family
from page.html import build, embed
from page.read import Run, read_run
from page.sample import COLUMNS
from page.serve import app, stamp
from page.verdict import cost, learned, status, warnings, winner
from plumbing.faults import Fault
from plumbing.servers import listen

RUN = Path(__file__).parent / "fixture" / "run"  # nine steps of the embedded world, see its README


def write(path: Path, name: str, *rows: dict) -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def instruction(id: int, text: str, parent: object = None, born: int = 0, **more: object) -> dict:
    return {"id": id, "text": text, "parent": parent, "born": born} | more


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in (gzip.open(file, "rt") if file.suffix == ".gz" else file.open())]


def game(path: Path) -> Path:
    """Copies RUN as a run of another task would have written it.

    Its metric is "won", its tool is counted as "moves", nobody predicts an answer, and a trajectory that fails may be
    rewarded more than one that wins.
    """
    shutil.copytree(RUN, path)
    names = {"em": "won", "searches": "moves"}

    def renamed(row: dict) -> dict:
        parts = {key: [names.get(part, part) for part in key.split("/")] for key in row}
        return {"/".join(parts[key]): value for key, value in row.items() if "f1" not in parts[key]}

    rows = [renamed(row) for row in read_lines(path / "metrics.jsonl")]
    for row in filter(lambda row: "w" in row, rows):
        row |= {"reward": 4 * row["reward"] - 1, "w": {j: 4 * x - 1 for j, x in row["w"].items()}}
    rows[0]["metrics"] = ["won", "fuel"]
    write(path, "metrics.jsonl", *rows)
    summary = json.loads((path / "summary.json").read_text())
    summary["held_out"] = {name: renamed(row) for name, row in summary["held_out"].items()}
    summary |= {"metric": "won", "metrics": ["won", "fuel"], "tools": ["moves"], "end": renamed(summary["end"])}
    write(path, "summary.json", summary | {"conclusion": "won +0.08; the policy alone has +0.08"})
    config = json.loads((path / "config.json").read_text())
    write(path, "config.json", config | {"mode": "tournament", "unheard_of": [1]})
    for file in (path / "trajectories").iterdir():
        rows = read_lines(file)
        for k, row in enumerate(rows):
            failed = row["reward"] < 1 if "I_star" not in file.name else "first" in file.name
            reward = [-1.0, 0.5, 1.5][k % 3] if failed else [3.0, 0.5][k % 2]
            row |= {"failed": failed, "reward": reward, "metrics": {"won": float(not failed), "fuel": 2.5}}
            row |= {"prediction": None, "golds": []}
        with gzip.open(file, "wt") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@contextmanager
def served(path: Path):
    """Serves the page of a run, as report.py --serve does; yields its URL."""
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app([path], 100), log_level="warning"))
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join()


class Elements(HTMLParser):
    """Collects the script elements and every start tag."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.scripts, self.policy, self.inside = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.inside = tag == "script"
        if tag == "script":
            self.scripts.append([attrs, ""])
        if attrs.get("http-equiv"):
            self.policy = attrs["content"]

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1][1] += data


def unpack(text: str) -> object:
    return json.loads(gzip.decompress(base64.b64decode(text)))


# ---- reading


def test_a_directory_without_a_run_is_a_fault(tmp_path):
    with pytest.raises(Fault, match="holds no run: none of config.json"):
        read_run(tmp_path)
    with pytest.raises(Fault, match="no such directory"):
        read_run(tmp_path / "nothing")


def test_lines_cut_short_and_damaged_are_counted_and_left_out(tmp_path):
    write(tmp_path, "config.json", {"T": 5})
    rows = ['{"t": 1, "reward": 0.5}', "not json", '{"reward": 1}', "[1]", '{"t": 1, "reward": 0.75}', '{"t": 2, "rew']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    run = read_run(tmp_path)
    assert run.steps == [{"t": 1, "reward": 0.75}] and (run.t, run.T) == (1, 5)  # of two rows of a step the later one
    said = " ".join(run.missing)
    assert "metrics.jsonl: 4 lines are cut short or damaged" in said
    assert "population.jsonl is missing: there is no family tree" in said and "reflections.jsonl is missing" in said


def test_a_line_nested_too_deep_is_a_damaged_one(tmp_path):
    write(tmp_path, "config.json", {"T": 5})
    (tmp_path / "metrics.jsonl").write_text('{"t": 1, "reward": 0.5}\n' + "[" * 5000)
    run = read_run(tmp_path)
    assert run.steps == [{"t": 1, "reward": 0.5}] and "metrics.jsonl: 1 line is cut short" in " ".join(run.missing)


@pytest.mark.parametrize("gone", [[p.name] for p in RUN.iterdir()] + [["config.json", "reflections.jsonl"]])
def test_whatever_is_missing_a_page_is_made_that_says_so(tmp_path, gone):
    path = shutil.copytree(RUN, tmp_path / "run")
    for name in gone:
        (shutil.rmtree if (path / name).is_dir() else Path.unlink)(path / name)
    found, _ = html.describe(read_run(path), 100)
    if gone == ["README.md"]:
        assert found["missing"] == []
    elif gone == ["summary.json"]:  # then the run is not finished
        assert found["status"]["state"] != "finished" and found["missing"] == []
    else:
        assert any(name.partition(".")[0] in text for text in found["missing"] for name in gone)


@pytest.mark.parametrize("cut", range(0, 9))
def test_files_cut_anywhere_make_a_page(tmp_path, cut):
    path = shutil.copytree(RUN, tmp_path / "run")
    for file in path.rglob("*"):
        if file.is_file() and file.suffix in (".json", ".jsonl", ".gz"):
            data = file.read_bytes()
            file.write_bytes(data[: len(data) * cut // 9 + cut % 3])
    (path / "metrics.jsonl").write_bytes((RUN / "metrics.jsonl").read_bytes())
    assert len(build([path])) > 100_000


@pytest.mark.parametrize("name, row", [
    ("metrics.jsonl", {"t": 3, "w": [1], "reward": "high"}), ("reflections.jsonl", {"t": 3, "verified": [1]}),
    ("population.jsonl", {"t": 1, "event": "prune", "P": [3]}), ("summary.json", {"generations": 3}),
])  # fmt: skip
def test_what_no_run_writes_is_a_fault(tmp_path, name, row):
    path = shutil.copytree(RUN, tmp_path / "run")
    write(path, name, row)
    with pytest.raises(Fault, match=f"^{path} holds what no run writes .*: restore it$"):
        build([path])


def test_numbers_that_json_lacks_do_not_reach_the_page(tmp_path):
    path = shutil.copytree(RUN, tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as f:
        f.write('{"t": 10, "reward": NaN, "loss": Infinity, "logp_gap": NaN}\n')
    found, _ = html.describe(read_run(path), 100)
    assert "NaN" not in embed(found) and found["curves"]["series"]["reward"][-1] is None
    assert {w["panel"] for w in found["warnings"]} >= {"reward", "loss"}


# ---- the family tree


def test_the_tree_says_who_left_when_and_who_was_refused(tmp_path):
    a, b = instruction(0, "a"), instruction(1, "b", 0)
    c, d = instruction(2, "c", 1, born=4), instruction(3, "d", 1, born=4)
    write(
        tmp_path, "population.jsonl", {"t": 0, "event": "start", "P": [a, b]}, {"t": 2, "event": "prune", "P": [b]},
        {"t": 4, "event": "evolve", "P": [c, d]},
    )  # fmt: skip
    write(
        tmp_path, "metrics.jsonl", {"t": 1, "w": {"0": 0.1, "1": 0.5}, "p": {"0": 0.2, "1": 0.8}, "n": {"1": 10}},
        {"t": 2, "w": {"1": 0.6}, "p": {"1": 1.0}, "n": {"1": 10}},
    )  # fmt: skip
    blocks = "".join(f"<ins_{k}> {text} </ins_{k}>\n" for k, text in enumerate("chdeg", 1))
    call = {"prompt": "<example>\nResponse: Question: q?\nx\nCorrect answer: g\n</example>", "prompt_tokens": 7}
    call |= {"reply": f"Because.\n{blocks}<ins_7> j </in", "completion_tokens": 2, "seconds": 0.5}
    verified = [{"text": text, "r": r, "r_parent": 0.4} for text, r in zip("cdeg", (0.5, 0.3, 0.3, 0.4), strict=True)]
    write(
        tmp_path, "reflections.jsonl", {"t": 4, "round": 1, "parent": 1, "call": call},
        {"t": 4, "round": 1, "parent": 1, "accepted": [1, 3, 4, 5], "rejected": [{"k": 2, "reason": "duplicate"}]},
        {"t": 4, "round": 1, "parent": 1, "D_B": ["q"] * 20, "verified": verified},
    )  # fmt: skip
    tree = family(read_run(tmp_path))
    by_id = {I["id"]: I for I in tree["instructions"]}
    assert [(I["left"], I["why"]) for I in by_id.values()] == [(2, "pruned"), (4, "succeeded"), (None, ""), (None, "")]
    assert [I["parents"] for I in by_id.values()] == [[], [0], [1], [1]]
    assert by_id[1]["history"] == [[1, 0.5, 0.8, 10], [2, 0.6, 1.0, 10]] and by_id[0]["history"][0][3] == 0
    assert (by_id[2]["r"], by_id[2]["questions"], by_id[3]["r"]) == (0.5, 20, 0.3)
    assert [(c["text"], c["why"]) for c in tree["refused"]] == [
        ("h", "duplicate"), ("e", "below its parent"), ("g", "no place was left"),
    ]  # fmt: skip
    assert tree["candidates"] == {"4.1.1": "2", "4.1.2": "3", "4.1.3": "r1", "4.1.4": "r2"}
    told = tree["calls"][by_id[2]["call"]]
    assert told["analysis"] == "Because." and told["failures"] == [{"text": "Question: q?\nx", "gold": "g"}]
    assert lineage({0: None, 1: 0, 2: 1, 3: 1}, 2) == [0, 1, 2]


def test_every_instruction_of_a_real_run_has_its_place(tmp_path):
    tree = family(read_run(RUN))
    events = read_lines(RUN / "population.jsonl")
    last = {I["id"] for I in events[-1]["P"]}
    for I in tree["instructions"]:
        assert (I["left"] is None) == (I["id"] in last)
        assert I["born"] == 0 or (I["parents"] and I["call"] in tree["calls"] and isinstance(I["r"], float))
        steps = [t for t, *_ in I["history"]]
        assert steps == list(range(I["born"] + 1, (I["left"] or 9) + 1))


# ---- trajectories


def test_the_sample_takes_watched_groups_first_and_says_how_many_there_were(tmp_path):
    path = shutil.copytree(RUN, tmp_path / "run")
    for file in (path / "trajectories").glob("step-*"):
        lines = gzip.open(file, "rt").readlines()
        with gzip.open(file, "wt") as f:
            f.writelines(lines[5:] + lines[:5])  # the watched group comes last
    run = read_run(path)
    index, pages = sample.sample(run, family(run), 45)
    rows = [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]
    training = [row for row in rows if row["kind"] == "training"]
    assert len(training) == 45 and all(row["tokens"] for row in training)  # 9 steps, one group of five each
    assert index["all"] > index["seen"] == len(rows)
    everything, _ = sample.sample(run, family(run), 10**6)
    assert everything["all"] == everything["seen"] == index["all"]
    names = list(pages)
    for row in rows:
        shown = unpack(pages[names[row["page"]]])[row["place"]]
        assert ("token_data" in shown) == row["tokens"] and shown["parts"][0][0] == "act"
        if row["tokens"]:
            acted = [text for kind, text in shown["parts"] if kind == "act"]
            data, start = shown["token_data"], 0
            for text, n in zip(acted, data["turns"], strict=True):
                assert "".join(data["text"][start : start + n]).strip() == text.strip()
                start += n


def test_rollouts_of_a_verification_are_played_under_a_parent_and_its_candidates():
    run = read_run(RUN)
    tree = family(run)
    index, _ = sample.sample(run, tree, 1)
    rows = [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]
    played = [row["ins"] for row in rows if row["kind"] == "verification"]
    reflections = read_lines(RUN / "reflections.jsonl")
    wanted = []  # the text that each of these rollouts was played under
    for file in sorted((RUN / "trajectories").glob("verify-*")):
        t, turn = map(int, file.name.removesuffix(".jsonl.gz").split("-")[1:])
        called, round, _ = (r for r in reflections if (r["t"], r["round"]) == (t, turn))
        blocks = re.findall(r"<ins_\d+>\s*(.*?)\s*</ins_\d+>", called["call"]["reply"], re.S)
        texts = [tree["instructions"][round["parent"]]["text"], *(blocks[k - 1] for k in round["accepted"])]
        wanted += [texts[row["candidate"]] for row in read_lines(file)]
    assert len(set(wanted)) > 10 and any(name[0] == "r" for name in played)
    for name, text in zip(played, wanted, strict=True):
        I = tree["refused"][int(name[1:])] if name[0] == "r" else tree["instructions"][int(name)]
        assert I["text"] == text
    settings = {row["kind"] for row in rows} - {"training", "verification"}
    assert {"first policy, first instruction", "trained policy, first instruction"} <= settings


def test_a_trajectory_has_failed_if_its_row_says_so_whatever_its_reward(tmp_path):
    run = read_run(game(tmp_path / "run"))
    index, pages = sample.sample(run, family(run), 10**6)
    names = list(pages)
    found = Counter(
        (names[row[0]], row[COLUMNS.index("reward")], row[COLUMNS.index("failed")]) for row in index["rows"]
    )
    stored = {name: read_lines(run.path / "trajectories" / f"{name}.jsonl.gz") for name in names}
    assert found == Counter(
        (name, row["reward"], row["failed"]) for name, rows in stored.items() for row in rows
    )


def test_a_response_is_cut_where_the_policy_stops_and_a_tool_speaks():
    turns = [{"text": "<search> x </search>"}, {"text": "what"}, {"text": "<answer> x </answer>"}]
    response = "<search> x </search><information>Doc</information>what\n\nThat was neither\n\n<answer> x </answer>"
    parts = [["act", "<search> x </search>"], ["obs", "<information>Doc</information>"], ["act", "what"]]
    parts += [["obs", "\n\nThat was neither\n\n"], ["act", "<answer> x </answer>"]]
    assert sample.parts({"response": response, "turns": turns}) == parts
    assert sample.parts({"response": "all of it", "turns": [{"text": "elsewhere"}]}) == [["act", "all of it"]]


# ---- the first screen

GOOD = {"reward": 0.5, "entropy": 0.3, "answered": 0.9, "zero_variance_groups": 0.4, "logp_gap": 1e-6}
GOOD |= {"search/faults": 0, "loss": 0.1, "grad_norm": 1.0}


def run_of(*rows: dict) -> Run:
    return Run(Path("x"), {"T": 20}, [{"t": t} | row for t, row in enumerate(rows, 1)])


def test_a_healthy_run_has_no_warning():
    assert warnings(run_of(*[GOOD] * 20)) == []


@pytest.mark.parametrize(
    "name, late, says",
    [
        ("entropy", 0.01, ["0.3", "0.01"]),
        ("logp_gap", 0.2, ["0.2", "step 11"]),
        ("loss", float("nan"), ["step 11"]),
        ("reward", 0.1, ["0.50", "0.10"]),
        ("skipped_updates", 2, ["20 optimizer steps", "not finite"]),
    ],
)
def test_each_failure_is_pointed_at(name, late, says):
    [found] = warnings(run_of(*[GOOD] * 10, *[GOOD | {name: late}] * 10))
    assert all(text in found["text"] for text in says) and found["panel"] == ("" if "/" in name else name)


@pytest.mark.parametrize(
    "rewards, fell",
    [
        (np.linspace(-1, 3, 20), False),
        (-0.5 + 0.05 * (-1.0) ** np.arange(20), False),  # hovers below zero
        ([*np.linspace(-1, 3, 10), *np.linspace(3, 0, 10)], True),
        (np.linspace(-0.2, -1, 20), True),
    ],
)
def test_a_fall_is_one_of_any_range_of_rewards(rewards, fell):
    found = warnings(run_of(*(GOOD | {"reward": float(r)} for r in rewards)))
    assert [warning["panel"] for warning in found] == ["reward"] * fell


def test_a_run_whose_groups_teach_nothing_is_pointed_at():
    [found] = warnings(run_of(*[GOOD | {"reward": 0, "zero_variance_groups": 1}] * 10))
    assert "nothing to learn" in found["text"]
    assert warnings(run_of()) and "No step" in warnings(run_of())[0]["text"]


def test_the_cost_of_an_unfinished_run_is_that_of_the_finished_one(tmp_path):
    whole = cost(read_run(RUN))
    path = shutil.copytree(RUN, tmp_path / "run")
    (path / "summary.json").unlink()
    part = cost(read_run(path))
    for name in ("calls", "prompt_tokens", "completion_tokens", "training", "verification"):
        assert part[name] == whole[name] > 0, name
    ledger = json.loads((RUN / "summary.json").read_text())["ledger"]
    assert whole["prompt_tokens"] + whole["completion_tokens"] == ledger["optimizer_tokens"]
    phases, rows = whole["phases"], read_lines(RUN / "metrics.jsonl")
    assert sum(phases.values()) == pytest.approx(whole["seconds"]) and min(phases.values()) >= 0
    assert phases["verify"] == sum(row.get("time/verify", 0) for row in rows) > 0  # it is a part of time/evolve
    assert phases["verify"] + phases["evolve"] == pytest.approx(sum(row.get("time/evolve", 0) for row in rows))


def test_the_first_screen_of_a_real_run():
    run = read_run(RUN)
    tree, summary = family(run), json.loads((RUN / "summary.json").read_text())
    won = winner(run, tree)
    assert won["id"] == summary["generations"][-1] and won["lineage"] == summary["generations"]
    assert learned(run)["table"] == summary["held_out"] and learned(run)["sentence"].startswith("EM +0.08: nothing")
    assert status(run)["state"] == "finished" and status(run)["t"] == 9
    run.summary, run.written = {}, 0.0
    assert status(run)["state"] == "stopped" and learned(run)["table"] == {} and winner(run, tree)


def test_a_run_of_another_task_is_shown_by_its_own_metric(tmp_path):
    path = game(tmp_path / "run")
    found, pages = html.describe(read_run(path), 10**6)
    summary = json.loads((path / "summary.json").read_text())
    assert (found["metric"], found["metrics"], found["tools"]) == ("won", ["won", "fuel"], ["moves"])
    assert found["learned"]["table"] == summary["held_out"] and found["missing"] == found["warnings"] == []
    assert found["learned"]["sentence"] == "won +0.08; the policy alone has +0.08"
    assert "EM" not in json.dumps(found["learned"]) and "em" not in found["curves"]["series"]
    series = found["curves"]["series"]
    assert series["test/won"][-1] == summary["held_out"]["trained policy, I_star"]["won"]
    assert found["winner"]["id"] == summary["generations"][-1] and found["winner"]["w"] > 0.4
    instructions, refused = found["tree"]["instructions"], found["tree"]["refused"]
    assert min(w for I in instructions for _, w, *_ in I["history"]) == -1
    assert {c["why"] for c in refused} == {"below its parent"}
    [shown, *_] = unpack(pages["test-trained_policy-I_star"])
    assert shown["prediction"] is None and shown["golds"] == [] and shown["metrics"]["fuel"] == 2.5
    assert found["cost"]["tool_calls"] == cost(read_run(RUN))["tool_calls"] > 0
    (path / "summary.json").unlink()
    unfinished = read_run(path)
    assert unfinished.metrics == ["won", "fuel"] and unfinished.tools == ["moves"]
    assert learned(unfinished)["table"] == {}
    assert Run(path).metrics == ["em"]


def test_the_last_screen_has_a_line_for_each_pair_of_policy_and_instruction():
    means = {"em": 0.5, "em/source": 0.1, "f1": 0.4, "searches": 1.0}
    summary = {
        "held_out": {f"{policy} policy, first instruction": means for policy in ("first", "trained")},
        "metric": "em", "metrics": ["em", "f1"],
        "tools": ["searches"], "conclusion": "EM +0.00", "generations": [0], "I_star": "I", "steps": 1,
        "seconds": 1.0, "ledger": {"optimizer_calls": 0},
    }  # fmt: skip
    text = ending(summary, Path("run"))
    assert re.search("^ +EM +F1 +searches$", text, re.M)
    assert re.search(r"^trained policy, first instruction +0.500 +0.400 +1.00$", text, re.M)


def test_runs_that_differ_by_their_seed_are_one_group():
    def run(name, **config):
        return Run(Path(name), {"lr": 0.1, "mode": "inspo"} | config)

    runs = [run("a", seed=0), run("b", seed=1), run("c", mode="static", seed=0), run("d", seed=2, out="elsewhere")]
    assert groups(runs) == [
        {"label": "a (3 seeds)", "runs": [0, 1, 3], "unlike": []}, {"label": "c", "runs": [2], "unlike": ["mode"]}
    ]  # fmt: skip
    content = {"golds of test": "12", "weights": "34"}
    runs = [run("a", seed=0, content=content), run("b", seed=1, content=content | {"golds of test": "56"}),
            run("c", seed=2, content=content, commit="x", train="moved.jsonl")]  # fmt: skip
    assert groups(runs) == [
        {"label": "a (2 seeds)", "runs": [0, 2], "unlike": ["commit"]},
        {"label": "b", "runs": [1], "unlike": ["golds of test"]},
    ]
    assert [g["label"] for g in groups([Run(Path("a")), Run(Path("b"))])] == ["a", "b"]
    assert curves(run_of({"reward": 1.0, "w": {}}, {"kl": float("inf")})) == {
        "t": [1, 2], "series": {"reward": [1.0, None]}
    }  # fmt: skip


# ---- the HTML


def test_text_of_a_model_cannot_leave_its_element(tmp_path):
    evil = "</script><img src=x onerror=alert(1)><!--<script>{{data}}\u2028"
    path = shutil.copytree(RUN, tmp_path / "run")
    rows = read_lines(path / "population.jsonl")
    for row in rows:
        for I in row["P"]:
            I["text"] = evil
    write(path, "population.jsonl", *rows)
    write(path, "config.json", json.loads((path / "config.json").read_text()) | {"model": evil, evil: 1})
    text = build([path])
    elements = Elements(text)
    assert "img" not in elements.tags and "onerror=alert" not in text.replace("\\u003cimg src=x onerror=alert", "")
    data = next(json.loads(body) for attrs, body in elements.scripts if attrs.get("id") == "data")
    assert data["runs"][0]["tree"]["instructions"][0]["text"] == evil and data["runs"][0]["config"]["model"] == evil


def test_a_password_in_an_address_does_not_reach_the_page(tmp_path):
    shutil.copytree(RUN, tmp_path / "r")
    config = json.loads((RUN / "config.json").read_text()) | {"retriever": "https://ann:Geheim7@host:8000"}
    (tmp_path / "r" / "config.json").write_text(json.dumps(config))
    page = build([tmp_path / "r"])
    assert "https://host:8000" in page and "Geheim7" not in page


def test_only_the_page_s_own_script_may_run_and_nothing_is_fetched():
    elements = Elements(build([RUN]))
    running = [body for attrs, body in elements.scripts if attrs.get("type") not in ("application/json", "text/plain")]
    assert len(running) == 1
    digest = base64.b64encode(hashlib.sha256(running[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in elements.policy and "default-src 'none'" in elements.policy
    assert not [attrs for attrs, _ in elements.scripts if "src" in attrs]
    assert "Leon Sorokin" in build([RUN])  # the licence of the chart library


def test_report_py_writes_where_it_is_told(tmp_path, capsys):
    path = shutil.copytree(RUN, tmp_path / "run")
    report.main([str(path)])
    assert (path / "report.html").read_text().startswith("<!doctype html>") and "report.html" in capsys.readouterr().out
    report.main([str(path), str(RUN), "--out", str(tmp_path / "two.html")])
    assert (tmp_path / "two.html").read_text().count('"curves":') == 2
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    "argv, says",
    [
        (["nowhere"], "report.py: nowhere: no such directory"),
        ([str(RUN), "--out", "/nowhere/x.html"], "cannot write /nowhere/x.html"),
    ],
)
def test_a_fault_of_report_py_is_one_line(argv, says, capsys):
    with pytest.raises(SystemExit) as ended:
        report.main(argv)
    assert says in str(ended.value) and "\n" not in str(ended.value)


def test_of_a_page_that_does_not_fit_nothing_is_left(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the write fails half way, as on a disk that is full
    try:
        with pytest.raises(Fault, match="cannot write"):
            html.write([RUN], tmp_path / "page.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_the_server_answers_this_machine_alone_and_follows_the_run(tmp_path):
    path = shutil.copytree(RUN, tmp_path / "run")
    with served(path) as url:

        def get(where, **headers):
            reply = requests.get(url + where, headers=headers, timeout=10)
            return reply.status_code, reply.text

        before = get("/stamp")[1]
        assert get("/")[0] == 200 and f'"live":"{before}"' in get("/")[1] and before == stamp([path])
        assert get("/etc/passwd")[0] == 404 and get("/", Host="evil.example:80")[0] == 400
        with (path / "metrics.jsonl").open("a") as f:
            f.write('{"t": 10, "reward": 0.987654}\n')
        assert get("/stamp")[1] != before and "0.987654" in get("/")[1]
        shutil.rmtree(path)
        assert get("/") == (503, f"{path}: no such directory; give a run's, runs/<name>")


def test_report_py_serves_until_it_is_interrupted(tmp_path):
    command = [sys.executable, "report.py", str(RUN), "--serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=RUN.parents[2])
    url = process.stdout.readline().strip().removeprefix("listening on ")
    assert url.startswith("http://127.0.0.1:") and "<!doctype html>" in requests.get(url, timeout=10).text
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "stopped by SIGINT\n")
