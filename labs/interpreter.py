"""The Triton kernel of the GRPO head on a CPU, in Triton's interpreter.

That has to be chosen before triton is imported, so it runs in a process of its own.
"""

import json
import os
import subprocess
import sys
from typing import Any

from config import HERE


def kernel(z: list[list[float]], targets: list[int], **knobs: Any) -> dict[str, Any]:
    """Returns J, logp, entropy, kl, clipped (N,) and dz (N, V) of logits z (N, V), as lists, and `ran`, which code.

    `knobs` are those of kernels.rows_triton.loss_rows, with lists for tensors. Where Triton has no wheel, its twin in
    torch runs.
    """
    done = subprocess.run(
        [sys.executable, "-m", "labs.interpreter"], input=json.dumps({"z": z, "targets": targets, **knobs}), cwd=HERE,
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    import torch

    try:
        from kernels import rows_triton as rows
    except ImportError:
        from kernels import rows_torch as rows

    given = json.load(sys.stdin)
    given = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in given.items()}
    out = rows.loss_rows(given.pop("z"), given.pop("targets"), torch.float32, **given)
    named = zip(("J", "logp", "entropy", "kl", "clipped", "dz"), out, strict=True)
    json.dump({name: values.tolist() for name, values in named} | {"ran": rows.__name__}, sys.stdout)


if __name__ == "__main__":
    main()
