"""Table 1's rows of Search-R1 and INSPO, from passages to the table: index them, serve the index,
train both arms, take each run's best checkpoint, measure it greedily and at temperature 1, print.

    python extras/recipe.py                                 # in small: the world, nothing is fetched
    python extras/recipe.py --preset smollm2-135m --model runs/real/cold/policy      # after `make real`
    python extras/recipe.py --ranks 8 --data nq popqa --model qwen2.5-3b --optimizer_model gemini-2.5-pro

Other flags are those of inspo.py, for every run. Every part is a command, printed as it could be
typed. One that has left its result is skipped and a run that was stopped resumes: the same command
again finishes the rest. docs/real.md has the cards and the hours.
"""

if not __package__:
    import root  # noqa: F401
import shlex
from argparse import Namespace
from pathlib import Path

from config import PRESETS, Config, read_flags
from extras.bench.harness import parser_of
from extras.published import make_table
from extras.real.__main__ import Part, play
from plumbing import stop
from plumbing.faults import one_line
from plumbing.servers import Servers
from tasks.search_qa import DEFAULT


def serve(index: Path, corpus: str, servers: Servers) -> str:
    """Builds an index of the passages where there is none; returns the URL of its server."""
    argv = ["retrieval_server.py", "--corpus", corpus, "--index", str(index)]
    if not index.exists():
        play(Part("the index", [*argv, "--build", "bm25"], index))
    return servers(*argv)


def list_parts(args: Namespace, flags: list[str], url: str) -> list[Part]:
    """Lists what is done with each seed of each arm: training, its best checkpoint, measuring that."""
    at = shlex.quote(str(args.out))
    asked = f"--data {shlex.join(args.data)} --retriever {url}"
    start = "inspo.py"
    if args.ranks > 1:
        start = f"-m torch.distributed.run --nproc_per_node={args.ranks} inspo.py"
    parts = []
    for seed in args.seeds:
        for arm in ("static", "inspo"):
            name = f"{arm}-{seed}"
            best = f"{at}/{name}/best"
            how = f"{shlex.join(flags)} --mode {arm} --seed {seed} --retriever {url}"
            commands = {
                f"{name}/summary.json": f"{start} {how} --out {at}/{name}",
                f"{name}/best": f"export.py {at}/{name} --best --out {best}",
            }
            for t in (0, 1):
                out = f"evaluation/{name}-t{t}"
                command = f"evaluate.py {best} {asked} --temperature {t} --out {at}/{out}"
                commands[f"{out}/summary.json"] = command
            for leaves, command in commands.items():
                parts.append(Part(name, shlex.split(command), args.out / leaves))
    return parts


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "extras/recipe.py")
    add = parser.add_argument
    add("--seeds", nargs="+", default=["0", "1", "2"])
    add("--ranks", type=int, default=1, help="GPUs of a run")
    add("--data", nargs="+", default=["test"], help="sets of evaluate.py")
    add("--out", type=Path, default=Path("runs/recipe"))
    args, flags = parser.parse_known_args(argv)
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "server.log"
    with one_line("extras/recipe.py"), stop.listening(), stop.may_stop(), Servers(log) as servers:
        given = read_flags(flags, Config)
        preset = given.get("preset", given.get("model", "world"))
        settings = PRESETS.get(preset, {}) | given
        if not settings.get("eval_every", Config.eval_every):  # the best checkpoint needs it
            flags += ["--eval_every", str(2 * int(settings["save_every"]))]
        url = settings.get("retriever", DEFAULT)
        if "corpus" in settings and "retriever" not in settings:
            url = serve(args.out / "index", settings["corpus"], servers)
        for part in list_parts(args, flags, url):
            if not part.leaves.exists():
                play(part)
        print(f"\n{make_table(args.out / 'evaluation', preset)}")


if __name__ == "__main__":
    main()
