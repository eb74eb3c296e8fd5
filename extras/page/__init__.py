"""The page of a run: `python -m extras.page` writes it, and a run writes it at its end."""

from extras.page.html import write_page

__all__ = ["write_page"]
