"""The model card of an exported policy: what the hub reads, and the command without this machine."""

import json
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from config import PRESETS, Config, parse_flags
from extras import card

RUN = Path(__file__).parent / "run"
OTHER = "license: other\nlicense_name: mine\nlicense_link: "


@pytest.mark.parametrize(
    "said, fields",
    [
        ("license: apache-2.0", {"license": "apache-2.0"}),
        (f"{OTHER}https://x.org/l", {"license": "other", "license_name": "mine", "license_link": "https://x.org/l"}),
        (f"{OTHER}LICENSE", {"license": "other", "license_name": "mine"}), ("tags: [x]", {}),
    ],
)  # fmt: skip
def test_the_license_is_the_base_model_s(tmp_path, said, fields):
    (tmp_path / "README.md").write_text(f"---\n{said}\n---\n# A model\n")
    assert card.find_license(str(tmp_path)) == fields


def test_a_card_has_the_instruction_the_table_and_the_command(tmp_path):
    run, policy = shutil.copytree(RUN, tmp_path / "r"), tmp_path / "policy"
    cfg = Config(**PRESETS["world"] | {"T": 9, "out": str(run)})
    about = {"program": "inspo.py", "commit": "abc", "id": "1"}
    (run / "config.json").write_text(json.dumps(asdict(cfg) | about))
    policy.mkdir()
    (policy / "I_star.txt").write_text("Search twice.\n")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"empty_places": 0, "steps_of_one": 0}))
    for _ in range(2):  # a card is written again as well
        card.main([str(run), str(policy)])
    found = ModelCard.load(policy / "README.md")
    assert found.data.library_name == "transformers" and found.data.base_model is None
    assert "Search twice." in found.text
    for name, row in summary["held_out"].items():
        [line] = [line for line in found.text.splitlines() if line.startswith(f"{name}  ")]
        assert f"{row['em']:.3f}" in line.split()

    # the command says what the run had, and nothing of this machine
    [command] = [line for line in found.text.splitlines() if line.startswith("python inspo.py ")]
    made = parse_flags(shlex.split(command)[2:])
    differ = {name for name, x in vars(cfg).items() if x != getattr(made, name)}
    assert differ <= {"out", "threads"} and str(run) not in found.text
