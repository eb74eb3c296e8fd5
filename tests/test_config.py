"""Flags: default < preset < flag; an impossible one ends in one line and exit code 2, before
anything is loaded."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic.dataclasses import dataclass
from torch.distributed.run import get_args_parser as torchrun_parser

import config
from config import (
    OPTIMIZER,
    PRESETS,
    REMOVED,
    Config,
    configure,
    find_endpoint,
    list_docs,
    parse_flags,
    read_config,
)
from plumbing.faults import Fault
from tasks.task import read_instruction

HERE = Path(config.__file__).parent
WORLD = HERE / "world" / "files"
POLICY = str(WORLD / "policy")
FIELDS = dataclasses.fields(Config)

# App. B and §4 of the paper, and what both sizes share.
BOTH = dict(
    warmup=0.1,
    T=300,
    eval_every=100,
    batch=512,
    mini_batch=256,
    dither=0,
    G=5,
    eps=0.2,
    beta=0.001,
    temperature=1.0,
    max_prompt=4096,
    max_response=500,
    max_observation=500,
    N_P=7,
    N_parent=1,
    tau_s=0.2,
    K_p=5,
    K_e=15,
    T_e=150,
    window=5,
    failures=4,
    D_B=200,
    rounds=5,
    topk=3,
)
APP_B = {
    "qwen2.5-3b": BOTH | dict(model="Qwen/Qwen2.5-3B", lr=5e-7, max_turns=4),
    "qwen2.5-7b": BOTH | dict(model="Qwen/Qwen2.5-7B", lr=3e-7, max_turns=6),
}


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.fixture
def refuses(capsys):
    """Returns a function that parses impossible flags and returns the one line about them."""

    def why(*argv):
        with pytest.raises(SystemExit) as stop:
            parse_flags(list(argv))
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and out == ""
        assert err.startswith("inspo.py: ") and err.endswith("\n") and err.count("\n") == 1
        return err

    return why


# --- default < preset < flag
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", APP_B)
def test_the_paper_s_presets_have_the_values_of_appendix_b(preset, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    cfg = parse_flags(["--model", preset, "--optimizer_model", "m"])
    assert {name: getattr(cfg, name) for name in APP_B[preset]} == APP_B[preset]
    # the task's own, Search-R1's, which the paper starts from
    assert cfg.mode == "inspo" and cfg.instruction == ""
    assert sorted(name for name, preset in PRESETS.items() if "dither" in preset) == list(APP_B)


@dataclass(frozen=True)
class Switched(Config):
    """Has a switch that nothing else depends on."""

    spare: bool = False
    """a switch"""


@pytest.mark.parametrize("value, want", [([], True), (["1"], True), (["0"], False)])
def test_a_switch_stands_alone_or_takes_0_or_1(value, want):
    cfg = parse_flags(["--spare", *value, "--T", "3"], Switched)
    assert (cfg.spare, cfg.T) == (want, 3)


def test_a_preset_wins_over_the_default_and_a_flag_over_the_preset():
    assert parse_flags([]) == parse_flags(["--model", "world"])
    for f in FIELDS:
        if f.name != "threads":  # at most the preset's number: test_threads.py
            assert getattr(parse_flags([]), f.name) == PRESETS["world"].get(f.name, f.default), (
                f.name
            )
    for lr in ("1e-5", "0", "5e-7"):  # also where the flag is the default
        assert parse_flags(["--lr", lr]).lr == float(lr)
    assert (
        parse_flags(["--model", "some/hub-id", "--mode", "static"]).lr == Config.lr
    )  # of no preset


@pytest.mark.parametrize(
    "argv, kept, said",
    [  # kept: of valid, test, corpus and instruction
        ([], "valid test corpus instruction", ""),
        (["--test", "t"], "valid corpus instruction", ""),
        (["--train", PRESETS["world"]["train"]], "valid test corpus instruction", ""),
        (
            ["--train", os.path.relpath(PRESETS["world"]["train"])],
            "valid test corpus instruction",
            "",
        ),
        (["--train", "own.jsonl"], "", "valid, test, corpus, instruction"),
        (["--train", "own.jsonl", "--test", "t", "--corpus", "c"], "", "valid, instruction"),
        (
            [
                "--train",
                "t",
                "--valid",
                "t",
                "--test",
                "t",
                "--corpus",
                "c",
                "--instruction",
                __file__,
            ],
            "",
            "",
        ),
        (
            ["--preset", "world", "--model", "some/hub-id", "--train", "t"],
            "",
            "valid, test, corpus, instruction",
        ),
        (["--preset", "world", "--model", "some/hub-id"], "valid test corpus instruction", ""),
        (
            ["--model", "smollm2-135m", "--train", "t", "--corpus", "c"],
            "",
            "valid, test, instruction",
        ),
        (["--model", "qwen2.5-3b", "--mode", "static", "--train", "t"], "", "test"),
        (["--model", "some/hub-id", "--mode", "static", "--train", "t"], "", ""),
    ],
)
def test_a_preset_s_data_goes_together(argv, kept, said, capsys):
    cfg, given = parse_flags(argv), {flag[2:] for flag in argv[::2]}
    for name in ("valid", "test", "corpus", "instruction"):
        if name in kept.split():
            assert getattr(cfg, name) == PRESETS["world"][name]
        elif name not in given:
            assert getattr(cfg, name) == "", name
    out = capsys.readouterr().out
    assert out.count("\n") == bool(said) and said in out and (not said or f" {said} " in out)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_knobs_that_exist_with_values_of_their_type_and_files_that_exist(preset):
    defaults = {f.name: f.default for f in FIELDS}
    for name, value in PRESETS[preset].items():
        assert type(value) is type(defaults[name]), name
        assert not str(value).startswith("/") or Path(value).exists()


@pytest.mark.parametrize(
    "model, rank, lr, want",
    [
        ("world", 0, None, PRESETS["world"]["lr"]),
        ("world", 32, None, 3e-3),  # tried out
        ("qwen2.5-1.5b", 32, None, 1e-5),
        ("some/hub-id", 8, None, 5e-6),
        ("qwen2.5-1.5b", 32, "2e-6", 2e-6),
        ("qwen2.5-1.5b", 32, "1e-6", 1e-6),  # the preset's own
        ("world", 32, "0", 0.0),
    ],
)
def test_adapters_learn_at_ten_times_the_rate_unless_a_flag_says_otherwise(model, rank, lr, want):
    argv = [
        "--model",
        model,
        "--mode",
        "static",
        "--lora_rank",
        str(rank),
        *(["--lr", lr] if lr else []),
    ]
    assert parse_flags(argv).lr == want


@pytest.mark.parametrize("lr", [1e-2, 3e-4])
def test_a_resumed_run_keeps_its_own_learning_rate(tmp_path, lr):
    cfg = parse_flags(["--lora_rank", "32", "--lr", str(lr), "--out", str(tmp_path)])
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    for flags in ([], ["--lora_rank", "32"], ["--model", "world", "--lora_rank", "32"]):
        assert parse_flags(["--out", str(tmp_path), "--resume", *flags]) == dataclasses.replace(
            cfg, resume=True
        )


def test_an_instruction_is_read_from_its_file(tmp_path):
    path = tmp_path / "i.txt"
    path.write_text("\n Be brief. \n")
    assert read_instruction(str(path)) == "Be brief."
    for content, says in ((b" \n", "the file is empty"), (b"\xff\xfe", "cannot be read as UTF-8")):
        path.write_bytes(content)
        with pytest.raises(Fault, match=f"--instruction {path}: {says}"):
            read_instruction(str(path))


def test_a_configuration_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_flags([]).lr = 1.0


def test_static_mode_is_one_instruction_that_never_evolves():
    cfg = parse_flags(["--mode", "static"])
    assert (cfg.N_P, cfg.N_parent, cfg.T_e) == (1, 1, 0)
    assert dataclasses.replace(cfg, mode="inspo", N_P=7, T_e=40) == parse_flags([])


# --- help
# ---------------------------------------------------------------------------------------------------------


def help_of(capsys, flag):
    with pytest.raises(SystemExit) as stop:
        parse_flags([flag])
    assert not stop.value.code
    return capsys.readouterr().out


def line_of(shown, name):
    """Returns what the help says about a flag."""
    return re.search(rf"\n  --{name} +(.*)\n", shown)[1]


def test_help_has_every_flag_once(capsys):
    names = re.findall(r"^ *--(\w+)", help_of(capsys, "--help"), re.M)
    assert sorted(names) == sorted([f.name for f in FIELDS] + ["preset"])


def test_help_shows_the_defaults_of_the_world_and_where_they_differ_the_paper_s(capsys):
    shown, docs = help_of(capsys, "--help"), list_docs(Config)
    for f in FIELDS:
        line, doc = line_of(shown, f.name), docs[f.name]
        assert len(doc) > 5 and line.startswith(doc), line
        world = "world" if f.name == "model" else PRESETS["world"].get(f.name, f.default)
        if world == "":
            assert line.endswith(doc)
        elif Path(str(world)).is_absolute():
            assert line.endswith(f"[world/files/{Path(world).name}]")
        elif world == f.default or f.default == "":
            assert line.endswith(f"{doc} [{world}]"), line
        else:
            assert line.endswith(f"{doc} [{world}; {f.default}]"), line


# all that goes with --train
OWN = ["--valid", "", "--test", "T", "--corpus", "T", "--instruction", ""]
LIGHT = [  # program and flags, exit code, what is said
    ("inspo.py --help".split(), 0, "--tau_s"),
    ("inspo.py --G 1".split(), 2, "--G 1"),
    ("inspo.py --tracker wandb".split(), 2, "--tracker wandb: not installed"),
    ("inspo.py --out /nowhere --resume".split(), 2, "/nowhere holds no run"),
    (["inspo.py", *OWN, "--train", "nosuch.jsonl"], 1, "--train nosuch.jsonl: no such"),
    (["inspo.py", "--preset", "world", "--model", POLICY, *OWN, "--train", "none.jsonl"], 1, "--train none.jsonl"),
    ("inspo.py --test .".split(), 1, "--test ."),
    ("inspo.py --instruction /nowhere/i.txt".split(), 1, "--instruction /nowhere/i.txt"),
    ("inspo.py --valid no.parquet".split(), 1, "--valid no.parquet"),
    ("inspo.py --corpus nosuch.jsonl".split(), 1, "--corpus nosuch.jsonl: no such file"),
    (f"inspo.py --model {POLICY}/ --mode static --test T --corpus T".split(), 1, "--train is missing"),
    ("inspo.py --task nowhere:Task".split(), 1, "--task nowhere:Task: nowhere cannot be imported"),
    *((f"{name}.py --help".split(), 0, "--temperature") for name in ("evaluate", "ask")),
    *((f"extras/{name}.py --help".split(), 0, "--instruction") for name in ("cold_start", "collect", "table1")),
]  # fmt: skip
PROGRAM = """
import contextlib, io, json, os, runpy, sys

found, root = [], sys.argv[2]
sys.path += [root, f"{root}/extras"]
for name, *argv in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = [name, *argv]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(f"{root}/{name}", run_name="__main__")
        except SystemExit as e:
            code = e.code or 0
    text = isinstance(code, str)  # which Python prints, and exits with 1
    heavy = {"torch", "transformers", "vllm", "tiktoken", "tqdm", "scipy"} & sys.modules.keys()
    said = out.getvalue(), f"{code}\\n" if text else err.getvalue()
    found.append([1 if text else code, *said, sorted(heavy)])
print(json.dumps([found, os.listdir()]))
"""


def test_help_and_bad_input_do_not_wait_for_torch_and_leave_nothing(tmp_path):
    """All in one process, which the first that imports torch betrays."""
    data = str(WORLD / "train.jsonl")
    lines = [[data if flag == "T" else flag for flag in argv] for argv, *_ in LIGHT]
    command = [sys.executable, "-c", PROGRAM, json.dumps(lines), str(HERE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, left = json.loads(done.stdout)
    assert not left
    for (argv, code, says), (ended, out, err, heavy) in zip(LIGHT, found, strict=True):
        assert heavy in ([], [] if argv[0] == "inspo.py" else ["tqdm"]), argv
        assert ended == code and says in out + err, (argv, out, err)
        assert not code or (out == "" and err.count("\n") == 1), (argv, out, err)


# --- what cannot work
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--learning_rate", "1"], "nearest is lr"),
        (["--lora_rnk=8"], "nearest is lora_rank"),
        (["--lr=1e-5", "--no_such", "3"], "--no_such"),
        (["stray"], "stray"),
        (["--temp", "0.5"], "--temp"),  # no abbreviations
        (["--eval", "5"], "--eval"),
        (["--T"], "--T"),
        (["--T", "many"], "--T"),
        (["--T", "1.5"], "--T"),
        (["--lr", "small"], "--lr"),
        (["--resume", "2"], "--resume"),
        (["--objective", "grpo"], "--objective"),  # a guest's: extras/ has a program with it
    ],
)
def test_an_unknown_abbreviated_or_mistyped_flag_is_refused(refuses, argv, said):
    assert said in refuses(*argv)


REFUSED = """
--mode evolve|--tracker mlflow|--proposer guess|--device cuda:7|--device tpu|--engine sglang|--recompute 2
--G 1|--K_p 0|--K_e 0|--T 0|--T_e -1|--N_parent 0|--window 0|--D_B -1|--failures 0|--buffer 0
--save_every 0|--eval_n -1|--seed -1|--lr -1|--lr nan|--tau_s inf
--temperature 0|--tau_s 0|--eps 0|--beta -0.1|--beta nan|--warmup 1|--warmup nan|--vllm_memory 1
--vllm_memory nan|--lora_rank -1|--lora_alpha 0
--max_observation 31|--top_n 0
--rounds 0|--keep 0|--patience 0|--temperature 2.1
--micro_tokens 0|--dither 2
"""


@pytest.mark.parametrize("argv", REFUSED.strip().replace("\n", "|").split("|"))
def test_a_value_outside_its_range_is_refused_by_name(refuses, argv):
    assert argv in refuses(*argv.split())


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--N_parent 8", "--N_parent 8 is more than --N_P 7"),
        ("--N_P 2 --N_parent 3", "--N_parent 3 is more than --N_P 2"),
        ("--mini_batch 81", "--mini_batch 81: a step has 80 trajectories (--batch 16 x --G)"),
        ("--batch 4 --G 2 --mini_batch 9", "--mini_batch 9: a step has 8 trajectories"),
        ("--batch 0 --mini_batch 1", "--batch 0"),
        ("--topk 1000", "--topk 1000: should be less than or equal to 100"),
        ("--dry_run 8xh100", "--dry_run is a program of its own (docs/gpus.md)"),
        ("--vllm http://h:1", "--vllm is an engine of its own, which --engine names"),
        ("--resume", "--out"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(refuses, argv, said):
    assert said in refuses(*argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "--tools search,calculator", "--tools none", "--beta 0", "--T_e 0", "--warmup 0",
        "--eval_every 0", "--N_P 1",
        "--max_observation 32", "--G 2", "--D_B 0",
    ],
)  # fmt: skip
def test_values_at_the_edge_of_the_possible_are_taken(argv):
    flag, value = argv.split()
    assert str(getattr(parse_flags([flag, value]), flag[2:])).removesuffix(".0") == value


@pytest.mark.parametrize("name", REMOVED)
def test_a_flag_of_an_earlier_version_is_one_line_and_does_not_close_its_runs(
    refuses, tmp_path, name
):
    for words in ([f"--{name}", "2"], [f"--{name}"]):  # a switch stood alone
        assert f"--{name} {REMOVED[name]}" in refuses(*words)
    with pytest.raises(Fault, match=f"--{name} "):
        configure(**{name: 2})
    old = dataclasses.asdict(Config(batch=4, mini_batch=10)) | {name: 1}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_config(tmp_path) == Config(batch=4, mini_batch=10)
    with pytest.raises(Fault, match="by another version of inspo.py"):
        read_config(tmp_path, resume=True)


def test_every_rank_must_have_a_trajectory_to_train_on(refuses, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert parse_flags(["--mini_batch", "7"]).mini_batch == 7  # a cluster's
    monkeypatch.setenv("RANK", "0")
    assert "8 ranks for --mini_batch 7: " in refuses("--mini_batch", "7")
    assert "8 ranks for --mini_batch 6: " in refuses("--batch", "3", "--G", "2")
    assert parse_flags(["--mini_batch", "8"]).mini_batch == 8


@pytest.mark.parametrize(
    "argv, n",
    [
        ("", 80),  # one update
        ("--batch 4", 20),
        ("--G 8", 80),  # 80 and 48
        ("--model qwen2.5-0.5b", 320),
        ("--model qwen2.5-3b --batch 16", 80),
        ("--model qwen2.5-3b", 256),
        ("--batch 4 --mini_batch 7", 7),
    ],
)
def test_a_preset_s_mini_batch_is_a_smaller_step_s_whole(argv, n):
    assert parse_flags([*argv.split(), "--mode", "static"]).mini_batch == n


def test_another_model_takes_a_preset_s_other_flags(refuses):
    cfg = parse_flags(["--preset", "world", "--model", "runs/x/policy", "--T", "3"])
    assert cfg == dataclasses.replace(parse_flags(["--T", "3"]), model="runs/x/policy")
    lora = parse_flags(["--preset", "world", "--model", "m", "--lora_rank", "4"])
    assert lora.lr == parse_flags(["--lora_rank", "4"]).lr != cfg.lr
    assert parse_flags(["--preset", "world", "--model", "qwen2.5-3b"]).model == "Qwen/Qwen2.5-3B"
    assert "--preset x: choose world, " in refuses("--preset", "x")


def test_one_rank_speaks_for_all_and_others_let_it_speak_first(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    for rank, speaks in ("0", True), ("3", False):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            parse_flags(["--G", "1"])
        out, err = capsys.readouterr()
        assert (
            stop.value.code == 2
            and out == ""
            and ("--G 1" in err) is speaks
            and (sum(waited) > 10) is not speaks
        )


def test_an_optimizer_is_an_endpoint_and_a_model_s_name_or_openai_s_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    argv = ["--model", "qwen2.5-3b"]
    for elsewhere in (["--mode", "static"], ["--optimizer_model", "scripted"]):
        assert find_endpoint(parse_flags([*argv, *elsewhere])) == ("", "")
    with pytest.raises(Fault, match="no optimizer: set OPENAI_API_KEY"):
        find_endpoint(parse_flags(argv))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\n")
    assert find_endpoint(parse_flags(argv)) == ("https://api.openai.com/v1", "sk-1")
    assert parse_flags(argv).optimizer_model == OPTIMIZER
    assert parse_flags([*argv, "--optimizer_model", "m"]).optimizer_model == "m"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    # OpenAI's model is not that endpoint's
    with pytest.raises(Fault, match="no optimizer: set --optimizer_model"):
        find_endpoint(parse_flags(argv))
    assert find_endpoint(parse_flags([*argv, "--optimizer_model", "m"])) == (
        "http://127.0.0.1:9/v1",
        "sk-1",
    )


# --- torchrun
# -----------------------------------------------------------------------------------------------------


def test_no_flag_of_ours_is_or_abbreviates_one_of_torchrun_s():
    theirs = [option for action in torchrun_parser()._actions for option in action.option_strings]
    assert "--nproc_per_node" in theirs and "--max-restarts" in theirs
    for name in ["preset", *(f.name for f in FIELDS)]:
        for option in theirs:
            assert not option.startswith(f"--{name}"), (
                f"torchrun would take --{name} for its {option}"
            )


def test_torchrun_hands_every_flag_of_ours_on_untouched():
    ours = []
    for f in FIELDS:
        ours += [f"--{f.name}"] if f.type is bool else [f"--{f.name}", str(f.default) or "x"]
        ours += [] if f.type is bool else [f"--{f.name}={f.default or 'x'}"]
    args = torchrun_parser().parse_args(["--nproc_per_node=8", "inspo.py", *ours])
    assert (args.nproc_per_node, args.training_script, args.training_script_args) == (
        "8",
        "inspo.py",
        ours,
    )
