"""Tools for tests: a search without a server, products, the moves of a game."""

from concurrent.futures import Future

from tasks import Task
from tasks.search_qa import Search
from tasks.tools import WORDS, Function, Tool


class Found(Tool):
    """It finds the same documents, whatever is asked, and keeps the queries."""

    tag, noun, argument, plural, result_tag = (
        "search",
        "a search",
        "query",
        "searches",
        "information",
    )
    show = Search.show

    def __init__(self, *documents):
        self.documents, self.queries = list(documents), []

    def submit(self, argument):
        self.queries.append(argument)
        future = Future()
        future.set_result(self.documents)
        return future


class Product(Function):
    """`6 * 7` is 42."""

    tag, noun, argument = "calculate", "a calculation", "expression"
    plural, result_tag = "calculations", "result"

    def run(self, argument):
        a, b = map(int, argument.split("*"))
        return str(a * b)


class Move(Function):
    """A move of a Game, which has its words."""

    def __init__(self, game, tau=None):
        self.game, self.tau = game, tau
        vars(self).update({word: getattr(game, word) for word in WORDS})

    def bind(self, tau):
        return Move(self.game, tau)

    def run(self, argument):
        return self.game.step(self.tau, argument)


class Game(Task):
    """A move is `step(tau, argument)`, which may change the episode."""

    tag, noun, argument, plural, result_tag = "move", "a move", "move", "moves", "reply"

    def __init__(self, cfg):
        super().__init__(cfg)
        self.tools = [Move(self)]
