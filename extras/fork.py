"""inspo.py with your classes in place of its own: a Learner (grpo.py), a Population, an Evolution
(inspo.py).

    python extras/fork.py --parts extras.examples.margin:Margin,extras.examples.opo:OPO      # and the flags of inspo.py

Several of one kind become one class that inherits from all. A run resumes with the parts that it
started with.
"""

if not __package__:
    import root  # noqa: F401
from typing import Any

from pydantic.dataclasses import dataclass

from config import Config, parse_flags
from inspo import list_overrides, train
from plumbing import stop
from plumbing.faults import Fault, one_line
from tasks.task import import_named


@dataclass(frozen=True)
class ForkConfig(Config):
    """parts of yours"""

    parts: str = ""
    """the classes, comma-separated: module:Class,..."""


def load_parts(cfg: ForkConfig) -> dict[str, Any]:
    """Returns the arguments of `inspo.train` that the parts replace. Raises Fault."""
    kinds: dict[str, list[type]] = {"Learner": [], "Population": [], "Evolution": []}
    for spec in filter(None, map(str.strip, cfg.parts.split(","))):
        part = import_named(f"--parts {spec}", spec, "class")
        bases = [base for base in part.__mro__ if base.__name__ in kinds]
        if not bases:
            raise Fault(f"--parts {spec}: extends neither Learner nor Population nor Evolution")
        list_overrides(part, bases[-1])
        kinds[bases[-1].__name__].append(part)
    return {
        name.lower(): type("+".join(part.__name__ for part in some), tuple(some), {})
        for name, some in kinds.items()
        if some
    }


def main(argv: list[str] | None = None) -> None:
    with one_line(), stop.listening():
        cfg = parse_flags(argv, ForkConfig)
        train(cfg, **load_parts(cfg))


if __name__ == "__main__":
    main()
