"""INSPO against Search-R1's static instruction on the embedded world (`make bench-learn`): table, picture, JSON last.

Runs inspo.py itself for every mode, seed and learning rate, with a held-out evaluation every few steps. Runs go to
runs/bench-learn/; finished ones are not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

from harness.directory import read_jsonl  # noqa: E402


def run(mode: str, seed: int, lr: str, every: int, folder: Path) -> Path:
    out = folder / f"{mode}-lr{lr}-seed{seed}"
    if not (out / "summary.json").exists():
        flags = ["--mode", mode, "--seed", seed, "--lr", lr, "--eval_every", every, "--out", out]
        flags += ["--resume"] if (out / "config.json").exists() else []
        subprocess.run([sys.executable, "inspo.py", *map(str, flags)], cwd=HERE, check=True)
    return out


def draw(runs: dict[tuple[str, str], list[Path]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lrs = list(dict.fromkeys(lr for _, lr in runs))
    fig, axes = plt.subplots(2, len(lrs), figsize=(4.6 * len(lrs), 5), sharex=True, squeeze=False, height_ratios=(3, 2))
    for (mode, lr), outs in runs.items():
        color, label = ("C0", "INSPO, best instruction") if mode == "inspo" else ("C3", "static (Search-R1)")
        for k, out in enumerate(outs):
            rows = [row for row in read_jsonl(out / "metrics.jsonl") if "test/em" in row]
            end = json.loads((out / "summary.json").read_text())
            t = [row["t"] for row in rows] + [end["steps"]]
            ends = {"em": "em_best", "searches": "searches_end"}
            for ax, (name, last) in zip(axes[:, lrs.index(lr)], ends.items(), strict=True):
                y = [row[f"test/{name}"] for row in rows] + [end[last]]
                ax.plot(t, y, color=color, lw=1.5, alpha=0.8, label=label if k == 0 else None)
    for column, lr in enumerate(lrs):
        axes[0, column].set(title=f"learning rate {lr}", ylim=(0, 1.02), ylabel="held-out exact match, greedy")
        axes[1, column].set(ylim=(0.8, 2.4), ylabel="searches a question", xlabel="step t")
        for ax in axes[:, column]:
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", alpha=0.3)
    axes[0, 0].legend(frameon=False, loc="upper left", fontsize=9)
    fig.tight_layout()
    fig.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", nargs="*", default=["1e-4", "3e-4"])
    parser.add_argument("--every", type=int, default=6, help="steps between held-out evaluations")
    parser.add_argument("--out", type=Path, default=HERE / "runs" / "bench-learn")
    parser.add_argument("--picture", type=Path, default=HERE / "assets" / "learning.png")
    args = parser.parse_args()
    runs = {
        (mode, lr): [run(mode, seed, lr, args.every, args.out) for seed in range(args.seeds)]
        for lr in args.lr
        for mode in ("inspo", "static")
    }
    args.picture.parent.mkdir(exist_ok=True)
    draw(runs, args.picture)
    found = []
    print("| mode | lr | seed | EM start | EM end | searches start | searches end | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for (mode, lr), outs in runs.items():
        for seed, out in enumerate(outs):
            s = json.loads((out / "summary.json").read_text())
            numbers = [s["em_start"], s["em_best"], s["searches_start"], s["searches_end"]]
            print(f"| {mode} | {lr} | {seed} | " + " | ".join(f"{x:.2f}" for x in numbers) + f" | {s['seconds']:.0f} |")
            found.append({"lr": lr, **{k: v for k, v in s.items() if k not in ("held_out", "ledger")}})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
