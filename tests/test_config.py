"""Flags: default < preset < flag; an impossible one ends in one line and exit code 2, before anything is loaded."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

import config
from config import PRESETS, SEARCH_R1, Config, first_instruction, parse, warnings
from plumbing.faults import Fault

HERE = Path(config.__file__).parent
WORLD = HERE / "world" / "files"
FIELDS = dataclasses.fields(Config)

# App. B and §4 of the paper, and what both sizes share.
BOTH = dict(
    warmup=0.1, T=300, eval_every=100, batch=512, mini=256, G=5, eps=0.2, beta=0.001, temperature=1.0,
    max_prompt=4096, max_response=500, max_observation=500, N_P=7, N_parent=1, tau_s=0.2, K_p=5, K_e=15, T_e=150,
    window=5, failures=4, D_B=200, rounds=5, topk=3,
)  # fmt: skip
APP_B = {
    "qwen2.5-3b": BOTH | dict(model="Qwen/Qwen2.5-3B", lr=5e-7, max_turns=4),
    "qwen2.5-7b": BOTH | dict(model="Qwen/Qwen2.5-7B", lr=3e-7, max_turns=6),
}


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "who ?", "golden_answers": ["x"]}\n')
    return str(path)


@pytest.fixture
def refuses(capsys):
    """Returns a function that parses impossible flags and returns the one line about them."""

    def why(*argv):
        with pytest.raises(SystemExit) as stop:
            parse(list(argv))
        out, err = capsys.readouterr()
        assert stop.value.code == 2
        assert out == ""
        assert err.startswith("inspo.py: ")
        assert err.endswith("\n") and err.count("\n") == 1
        return err

    return why


# --- default < preset < flag --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", APP_B)
def test_the_paper_s_presets_have_the_values_of_appendix_b(preset, questions, endpoint):
    cfg = parse(
        ["--model", preset, "--train", questions, "--test", questions, "--corpus", questions, "--optimizer_model", "m"]
    )
    assert {name: getattr(cfg, name) for name in APP_B[preset]} == APP_B[preset]
    assert cfg.mode == "inspo"
    assert cfg.loss_agg == "trajectory"
    assert cfg.instruction == ""  # Search-R1's, which the paper starts from


def test_the_first_instruction_is_search_r1_s():
    assert config.SEARCH_R1 == (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get "
        "new information. After reasoning, if you find you lack some knowledge, you can call a search engine by "
        "<search> query </search> and it will return the top searched results between <information> and "
        "</information>. You can search as many times as your want. If you find no further external knowledge "
        "needed, you can directly provide the answer inside <answer> and </answer>, without detailed illustrations. "
        "For example, <answer> Beijing </answer>."
    )


def test_a_preset_wins_over_the_default_and_a_flag_over_the_preset():
    assert Config.lr == 5e-7
    assert parse([]).lr == PRESETS["world"]["lr"] != Config.lr
    assert parse(["--lr", "1e-5"]).lr == 1e-5
    assert parse(["--lr", "0"]).lr == 0  # a frozen policy
    assert parse(["--lr", "5e-7"]).lr == 5e-7  # also where the flag is the default


def test_a_preset_changes_only_what_it_names():
    given = PRESETS["world"]
    cfg = parse([])
    for f in FIELDS:
        assert getattr(cfg, f.name) == given.get(f.name, f.default), f.name


def test_no_flags_at_all_run_the_embedded_world_from_files_that_exist():
    cfg = parse([])
    assert cfg == parse(["--model", "world"])
    for path in (cfg.train, cfg.test, cfg.corpus, cfg.instruction):
        assert Path(path).is_file()
    assert Path(cfg.model).is_dir()


def test_an_empty_instruction_flag_means_search_r1_s():
    cfg = parse(["--instruction", ""])
    assert cfg.instruction == "" and first_instruction(cfg) == SEARCH_R1


def test_the_first_instruction_is_read_from_its_file(tmp_path):
    path = tmp_path / "i.txt"
    path.write_text("\n Be brief. \n")
    assert first_instruction(parse(["--instruction", str(path)])) == "Be brief."
    path.write_text(" \n")
    with pytest.raises(Fault, match=f"--instruction {path}: the file is empty"):
        first_instruction(parse(["--instruction", str(path)]))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_only_knobs_that_exist_with_values_of_their_type(preset):
    types = {f.name: f.type for f in FIELDS}
    for name, value in PRESETS[preset].items():
        assert type(value) is types[name], name


def test_a_model_that_is_no_preset_is_a_path_or_an_id(questions):
    argv = ["--train", questions, "--test", questions, "--corpus", questions, "--mode", "static"]
    cfg = parse(["--model", "some/hub-id", *argv])
    assert cfg.model == "some/hub-id"
    assert cfg.lr == Config.lr


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(capsys):
    """Returns the text of --help."""
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def line_of(shown, name):
    """Returns what --help says about a flag, on one line."""
    begin = shown.index(f"\n  --{name} " if f"\n  --{name} " in shown else f"\n  --{name}\n")
    words = shown[begin:].split("\n  --")[1].split("\n\n")[0].split()
    return " ".join(words)


def test_help_shows_the_defaults_of_the_world_and_where_they_differ_the_paper_s(shown):
    for f in FIELDS:
        line, doc = line_of(shown, f.name), " ".join(f.metadata["doc"].split())
        assert line.startswith(f.name) and doc in line, line
        world = PRESETS["world"].get(f.name, f.default)
        if f.name == "model" or f.type is bool or world == "":
            assert line.endswith(doc)
        elif Path(str(world)).is_absolute():
            assert line.endswith(f"[world/files/{Path(world).name}]")
        elif world == f.default or f.default == "":
            assert line.endswith(f"{doc} [{world}]"), line
        else:
            assert line.endswith(f"{doc} [{world}; {f.default}]"), line
    assert line_of(shown, "T") == "T int T: training steps [80; 300]"
    assert line_of(shown, "tau_s").endswith("selection temperature [0.2]")


def test_help_groups_the_flags_by_the_paper_s_sections(shown):
    titles = [f.metadata["section"] for f in FIELDS if f.metadata["section"]]
    assert len(titles) == len(set(titles)) and FIELDS[0].metadata["section"]
    places, title = [], ""
    for f in FIELDS:
        title = f.metadata["section"] or title
        places.append((shown.index(f"\n{title}:\n"), shown.index(f"\n  --{f.name}")))
    heads = sorted({head for head, _ in places}) + [len(shown)]
    for head, place in places:
        assert head < place < heads[heads.index(head) + 1]


def test_help_does_not_wait_for_torch():
    code = (
        "import runpy, sys; sys.argv = ['inspo.py', '--help']\n"
        "try: runpy.run_path('inspo.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "else: raise AssertionError\n"
        "assert not {'torch', 'transformers', 'vllm', 'tiktoken', 'tqdm'} & set(sys.modules)"
    )
    path = {"PYTHONPATH": str(HERE)}
    run = subprocess.run([sys.executable, "-c", code], cwd=HERE, env=os.environ | path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "--tau_s" in run.stdout


def test_a_fault_in_the_flags_does_not_wait_for_torch_either():
    code = (
        "import runpy, sys; sys.argv = ['inspo.py', '--G', '1']\n"
        "try: runpy.run_path('inspo.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    path = {"PYTHONPATH": str(HERE)}
    run = subprocess.run([sys.executable, "-c", code], cwd=HERE, env=os.environ | path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# --- one object ---------------------------------------------------------------------------------------------------


def test_a_configuration_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse([]).lr = 1.0


def test_static_mode_is_one_instruction_that_never_evolves():
    cfg = parse(["--mode", "static"])
    assert (cfg.N_P, cfg.N_parent, cfg.T_e) == (1, 1, 0)
    assert dataclasses.replace(cfg, mode="inspo", N_P=7, T_e=40) == parse([])


def test_only_rank_0_needs_data_files_and_an_optimizer(monkeypatch):
    flags = ["--model", "x", "--train", "/no/t.jsonl", "--test", "/no/t.jsonl", "--corpus", "/no/c.jsonl"]
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert parse(flags).train == "/no/t.jsonl"  # another node need not have them
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        parse(flags)


# --- what cannot work ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--learning_rate", "1"], "--learning_rate"),
        (["--lr=1e-5", "--no_such", "3"], "--no_such"),
        (["stray"], "stray"),
        (["--temp", "0.5"], "--temp"),  # no abbreviations
        (["--eval", "5"], "--eval"),
        (["--res"], "--res"),
        (["--T"], "--T"),
        (["--T", "many"], "--T"),
        (["--T", "1.5"], "--T"),
        (["--lr", "small"], "--lr"),
        (["--resume=yes"], "--resume"),
    ],
)
def test_an_unknown_abbreviated_or_mistyped_flag_is_refused(refuses, argv, said):
    assert said in refuses(*argv)


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--mode evolve", "--mode evolve"),
        ("--loss_agg mean", "--loss_agg mean"),
        ("--tracker mlflow", "--tracker mlflow"),
        ("--N_parent 8", "--N_parent 8 is more than --N_P 7"),
        ("--N_P 2 --N_parent 3", "--N_parent 3 is more than --N_P 2"),
        ("--batch 24 --mini 16", "--batch 24 is not a multiple of --mini 16"),
        ("--batch 12 --mini 24", "--batch 12 is not a multiple of --mini 24"),
        ("--G 1", "--G 1"),
        ("--T 0", "--T 0"),
        ("--batch 0 --mini 1", "--batch 0"),
        ("--mini 0", "--mini 0"),
        ("--K_p 0", "--K_p 0"),
        ("--K_e 0", "--K_e 0"),
        ("--T_e -1", "--T_e -1"),
        ("--N_parent 0", "--N_parent 0"),
        ("--window 0", "--window 0"),
        ("--D_B -1", "--D_B -1"),
        ("--groups pairs", "--groups pairs: choose pair or question"),
        ("--rank best", "--rank best: choose paper or paired"),
        ("--gate upper", "--gate upper: choose paper or lower_bound"),
        ("--rank paired --mode espl", "--mode espl does not follow"),
        ("--gate lower_bound --mode static", "--mode static does not follow"),
        ("--rank paired --groups question", "--groups question: --rank paired compares whole groups"),
        ("--rank paired --rivals 1", "--rivals 1: one instruction alone"),
        ("--rank paired --rivals -1", "--rivals -1"),
        ("--rivals 3", "--rivals 3: only --rank paired and --mode espl"),
        ("--mode espl --groups question", "--groups question: --mode espl compares within a program"),
        ("--gate_samples 0", "--gate_samples 0"),
        ("--gate lower_bound --D_B 1", "--D_B 1: --gate lower_bound needs at least 2"),
        ("--mode fst --D_B 0", "--D_B 0: --mode fst chooses prompts by what they win"),
        ("--mode prompt --lr 1e-3", "--lr 0.001: --mode prompt freezes the policy"),
        ("--mode espl --crossover 1.5", "--crossover 1.5: a probability"),
        ("--crossover 0.5", "only --mode espl crosses"),
        ("--mode espl --buffer 119", "--buffer 119: --mode espl learns from whole steps of 120"),
        ("--failures 0", "--failures 0"),
        ("--buffer 0", "--buffer 0"),
        ("--save_every 0", "--save_every 0"),
        ("--eval_n -1", "--eval_n -1"),
        ("--seed -1", "--seed -1"),
        ("--lr -1", "--lr -1"),
        ("--lr nan", "--lr nan"),
        ("--lr inf", "--lr inf: must be a finite number"),
        ("--tau_s inf", "--tau_s inf"),
        ("--topk 1000", "--topk 1000: the search server returns 100 passages at most"),
        ("--max_optimizer_tokens -1", "--max_optimizer_tokens -1"),
        ("--max_overhead nan", "--max_overhead nan"),
        ("--temperature 0", "--temperature 0"),
        ("--tau_s 0", "--tau_s 0"),
        ("--eps 0", "--eps 0"),
        ("--beta -0.1", "--beta -0.1"),
        ("--beta nan", "--beta nan"),
        ("--warmup 1", "--warmup 1"),
        ("--warmup nan", "--warmup nan"),
        ("--device cuda:7", "--device cuda:7"),
        ("--device tpu", "--device tpu"),
        ("--engine sglang", "--engine sglang"),
        ("--vllm 10.0.0.1:8000", "--vllm 10.0.0.1:8000"),
        ("--engine torch --vllm http://h:1", "not used with --engine torch"),
        ("--vllm_memory 1", "--vllm_memory 1"),
        ("--vllm_memory nan", "--vllm_memory nan"),
        ("--recompute 2", "--recompute 2"),
        ("--tis -1", "--tis -1"),
        ("--lora_rank -1", "--lora_rank -1"),
        ("--lora_alpha 0", "--lora_alpha 0"),
        ("--lora_rank 8 --offload_reference", "--offload_reference: with --lora_rank"),
        ("--adam_beta1 1", "--adam_beta1 1"),
        ("--adam_beta1 -0.1", "--adam_beta1 -0.1"),
        ("--adam_beta2 1.5", "--adam_beta2 1.5"),
        ("--adam_beta2 nan", "--adam_beta2 nan"),
        ("--adam_eps 0", "--adam_eps 0"),
        ("--weight_decay -0.01", "--weight_decay -0.01"),
        ("--weight_decay nan", "--weight_decay nan"),
        ("--max_grad_norm 0", "--max_grad_norm 0"),
        ("--valid_n -1", "--valid_n -1"),
        ("--valid /nowhere/q.jsonl", "--valid /nowhere/q.jsonl: no such file"),
        ("--max_observation 31", "--max_observation 31"),
        ("--top_n 0", "--top_n 0"),
        ("--rounds 0", "--rounds 0"),
        ("--keep 0", "--keep 0"),
        ("--patience 0", "--patience 0"),
        ("--gpus 0", "--gpus 0"),
        ("--resume", "--out"),
        ("--train /nowhere/q.jsonl", "--train /nowhere/q.jsonl: no such file"),
        ("--test /nowhere/q.jsonl", "--test /nowhere/q.jsonl: no such file"),
        ("--corpus /nowhere/c.jsonl", "--corpus /nowhere/c.jsonl: no such file"),
        ("--instruction /nowhere/i.txt", "--instruction /nowhere/i.txt: no such file"),
        ("--train .", "--train .: no such file"),  # a directory
        ("--optimizer_model gpt-5", "no optimizer"),  # and no OPENAI_BASE_URL
    ],
)
def test_an_impossible_configuration_is_refused(refuses, argv, said):
    assert said in refuses(*argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "--tools search,calculator", "--valid_n 0", "--weight_decay 0",
        "--adam_beta1 0", "--adam_beta2 0", "--beta 0", "--T_e 0", "--warmup 0", "--eval_every 0", "--N_P 1",
        "--gate_samples 4", "--max_observation 32", "--tis 2", "--G 2", "--D_B 0", "--tools none", "--groups question",
    ],
)  # fmt: skip
def test_values_at_the_edge_of_the_possible_are_taken(argv):
    flag, value = argv.split()
    assert str(getattr(parse([flag, value]), flag[2:])).removesuffix(".0") == value


def test_every_rank_must_have_a_trajectory_to_train_on(refuses, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "8 ranks for 6 trajectories an update" in refuses("--batch", "3", "--mini", "3", "--G", "2")
    assert parse(["--batch", "4", "--mini", "4", "--G", "2"]).mini == 4


def test_one_rank_speaks_for_all(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as stop:
        parse(["--G", "1"])
    assert stop.value.code == 2 and capsys.readouterr() == ("", "")


def test_a_dry_run_needs_no_data():
    assert parse(["--model", "qwen2.5-7b", "--dry_run", "--gpus", "4"]).gpus == 4


def test_without_questions_a_search_or_an_optimizer_there_is_no_run(refuses, questions, monkeypatch):
    argv = ["--model", "qwen2.5-3b"]
    assert "--train is missing" in refuses(*argv)
    argv += ["--train", questions]
    assert "--test is missing" in refuses(*argv)
    argv += ["--test", questions]
    assert "nothing to search" in refuses(*argv)
    argv += ["--corpus", questions]
    assert "no optimizer" in refuses(*argv)
    assert parse([*argv, "--mode", "static"]).mode == "static"  # which needs none
    assert parse([*argv, "--optimizer_model", "scripted"]).mode == "inspo"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert "no optimizer" in refuses(*argv)
    assert parse([*argv, "--optimizer_model", "m"]).optimizer_model == "m"


def test_a_search_server_that_runs_already_needs_no_corpus(questions):
    argv = ["--model", "qwen2.5-3b", "--mode", "static", "--train", questions, "--test", questions]
    assert parse([*argv, "--retriever", "http://127.0.0.1:8000"]).corpus == ""
    assert parse(["--retriever", "http://127.0.0.1:8000", "--corpus", "/nowhere"]).retriever


def test_a_run_with_a_fault_ends_at_once_and_leaves_nothing_behind(tmp_path):
    run = subprocess.run([sys.executable, HERE / "inspo.py", "--G", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == (
        "inspo.py: --G 1: an advantage needs a group of at least 2 trajectories (Eq. 3)"
        " (inspo.py --help lists the flags)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_periods_that_drift_against_each_other_are_only_a_warning():
    assert warnings(parse(["--K_p", "5", "--K_e", "15"])) == []
    (line,) = warnings(parse(["--K_p", "4", "--K_e", "15"]))
    assert "K_e 15" in line and "K_p 4" in line
    assert warnings(parse(["--K_p", "4", "--K_e", "15", "--mode", "static"])) == []
    (line,) = warnings(parse(["--objective", "consistent"]))  # every question has one instruction
    assert "is grpo here" in line and "--rank paired" in line
    assert warnings(parse(["--objective", "consistent", "--rank", "paired"])) == []
    assert warnings(parse(["--objective", "consistent", "--mode", "espl"])) == []  # its programs play the same problems


# --- torchrun -----------------------------------------------------------------------------------------------------


def test_no_flag_of_ours_is_or_abbreviates_one_of_torchrun_s():
    theirs = [option for action in torchrun_parser()._actions for option in action.option_strings]
    assert "--nproc_per_node" in theirs and "--max-restarts" in theirs
    for f in FIELDS:
        for option in theirs:
            assert not option.startswith(f"--{f.name}"), f"torchrun would take --{f.name} for its {option}"


def test_torchrun_hands_every_flag_of_ours_on_untouched():
    ours = []
    for f in FIELDS:
        ours += [f"--{f.name}"] if f.type is bool else [f"--{f.name}", str(f.default) or "x"]
        ours += [] if f.type is bool else [f"--{f.name}={f.default or 'x'}"]
    args = torchrun_parser().parse_args(["--nproc_per_node=8", "inspo.py", *ours])
    assert args.nproc_per_node == "8"
    assert args.training_script == "inspo.py"
    assert args.training_script_args == ours
