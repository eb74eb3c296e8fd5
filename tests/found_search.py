"""A search without a server."""

from concurrent.futures import Future

from tasks.search_qa import Search
from tasks.tools import Tool


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
