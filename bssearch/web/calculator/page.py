"""The page of the calculator."""

from __future__ import annotations

from bssearch.web.views import Answered, Asked, View


def calculator_page(asked: Asked) -> Answered:
    """Show the calculator."""
    return View(template="error.html", values={"status": 200, "message": "soon", "hint": ""})
