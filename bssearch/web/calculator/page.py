"""The page of the calculator, and its results alone, which its script asks for as one types."""

from __future__ import annotations

from bssearch.web.calculator.form import calculated
from bssearch.web.views import Answered, Asked, View

RESULTS = "results"
"""The part of the page that the script replaces."""


def calculator_page(asked: Asked) -> Answered:
    """Show the calculator with what a query asks of it."""
    template = "calculator_results.html" if asked.text("part") == RESULTS else "calculator.html"
    return View(template=template, values={"calculator": calculated(asked.query)})
