"""Run by torchrun: rank 0 is busy for longer than ranks wait for each other's answers, as with a
slow optimizer."""

import time

from training.ranks import Ranks


def main() -> None:
    ranks = Ranks("cpu", patience=0.4)
    if ranks.rank == 0:
        time.sleep(0.5 * 60)
    call = ranks.broadcast("evolve" if ranks.rank == 0 else None)
    answers = ranks.gather((ranks.rank, call))
    ranks.leave()
    assert ranks.rank or answers == [(0, "evolve"), (1, "evolve")]


if __name__ == "__main__":
    main()
