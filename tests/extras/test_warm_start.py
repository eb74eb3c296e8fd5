"""The warm start from nothing (`python -m extras.world.warm_start`): instructions steer the
resulting policy."""

import os
import subprocess
import sys

import pytest

from config import HERE


@pytest.mark.slow
def test_one_seed_gives_one_policy_to_the_byte_with_any_number_of_threads(tmp_path):
    made = []
    for threads in ("1", "2"):
        build = [sys.executable, "-m", "extras.world.warm_start", "--tokens", "6000"]
        build += ["--out", str(tmp_path / threads)]
        env = os.environ | {"OMP_NUM_THREADS": threads}
        subprocess.run(build, cwd=HERE, env=env, check=True, capture_output=True)
        made.append((tmp_path / threads / "policy" / "model.safetensors").read_bytes())
    assert made[0] == made[1]
