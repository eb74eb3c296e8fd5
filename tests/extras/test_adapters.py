"""peft computes with the adapters of a run as the run does."""

import pytest
import torch
from test_inspo import SMALL, finish, start
from transformers import AutoModelForCausalLM

from config import WORLD
from extras.adapters import main


@pytest.mark.slow
def test_peft_loads_the_adapters_of_a_run(tmp_path):
    from peft import PeftModel

    flags = "--lora_rank 4 --lora_alpha 8 --lr 0.01".split()
    code, _, stderr = finish(start("--out", out := tmp_path / "run", *SMALL, *flags))
    assert code == 0, stderr
    main([str(out), str(tmp_path / "adapters")])
    assert "bfloat16" in (tmp_path / "adapters" / "README.md").read_text()
    for file in (tmp_path / "adapters").iterdir():
        assert file.stat().st_mode & 0o044 == 0o044  # safetensors writes 0600
    base = AutoModelForCausalLM.from_pretrained(WORLD / "policy", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    final = AutoModelForCausalLM.from_pretrained(out / "policy", dtype=torch.float32)
    for W, V in zip(loaded.parameters(), final.parameters(), strict=True):
        torch.testing.assert_close(W, V, atol=1e-6, rtol=0)
    with pytest.raises(SystemExit, match="has no adapters|holds no run"):
        main([str(tmp_path), str(tmp_path / "x")])
