"""Turn a checkpoint of a run into a plain Hugging Face directory, with its best instruction beside
the weights.

python export.py runs/NAME                  # the newest checkpoint
python export.py runs/NAME --step 100       # or --best: the best on the validation questions
python export.py runs/NAME --adapters       # of a run with --lora_rank: the adapters alone, for peft and vLLM
vllm serve runs/NAME/step-000100            # the directory loads in vLLM and in transformers
hf upload OWNER/NAME runs/NAME/step-000100

For a run with --lora_rank the weights are those that the policy computed with, adapters merged
(models/lora.py).
"""

import argparse
from pathlib import Path

from plumbing import stop
from plumbing.faults import one_line


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory of the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    which.add_argument(
        "--best",
        action="store_true",
        help="the best on the validation questions, by the first metric",
    )
    parser.add_argument(
        "--adapters", action="store_true", help="LoRA's adapters alone, not merged into the weights"
    )
    parser.add_argument("--out", type=Path, help="directory to write; default: runs/NAME/step-N")
    args = parser.parse_args(argv)
    from evaluation.checkpoints import export_checkpoint  # here: torch takes seconds to import

    with one_line("export.py"), stop.listening(), stop.may_stop():
        out, step, I = export_checkpoint(args.run, args.out, args.step, args.best, args.adapters)
        print(f"{out}: the policy after step {step}, and I_star.txt: instruction #{I}")


if __name__ == "__main__":
    main()
