"""A tiny application that serves the calculator as a server of its pages does, and a browser to look at it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import pytest
import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from bssearch.web.calculator.form import calculated

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)

LAYOUT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{% block title %}{% endblock %}</title>
<link rel="stylesheet" href="static/page.css"></head><body><main>{% block main %}{% endblock %}</main></body></html>
"""

STAND_IN = '<svg role="img" aria-label="{title}" viewBox="0 0 560 300"><title id="{name}">{title}</title></svg>'
"""What stands for a drawn figure."""

ASSETS = {
    "page.css": ("bssearch.pages", "page.css", "text/css"),
    "calculator.css": ("bssearch.web", "static/calculator.css", "text/css"),
    "calculator.js": ("bssearch.web", "static/calculator.js", "text/javascript"),
}


@cache
def environment() -> jinja2.Environment:
    made = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.ChoiceLoader([jinja2.DictLoader({"layout.html": LAYOUT}), jinja2.PackageLoader("bssearch.web")]),
    )
    made.filters["svg"] = lambda figure, name, title: Markup(STAND_IN).format(name=name, title=title)
    return made


def rendered(query: Mapping[str, str], template: str = "calculator.html") -> str:
    """Return the page of a query as HTML."""
    return environment().get_template(template).render(calculator=calculated(query))


class Server:
    """The calculator at a port of its own. ``delays`` are seconds to wait before an answer about a query's part."""

    def __init__(self) -> None:
        self.delays: dict[str, float] = {}
        self.asked: list[str] = []
        self.is_broken = False
        routes = [Route("/calculator", self._page), Route("/static/{name}", self._asset)]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)

    def _page(self, request: Request) -> Response:
        query = str(request.url.query)
        is_part = request.query_params.get("part") == "results"
        self.asked.append(query)
        if is_part and self.is_broken:
            return Response(status_code=503)
        time.sleep(next((seconds for words, seconds in self.delays.items() if words in query), 0) if is_part else 0)
        template = "calculator_results.html" if is_part else "calculator.html"
        text = rendered(request.query_params, template)
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})

    def _asset(self, request: Request) -> Response:
        package, name, kind = ASSETS[request.path_params["name"]]
        return Response(resources.files(package).joinpath(name).read_text(encoding="utf-8"), media_type=kind)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Yield the address of the calculator while it is served."""
        thread = threading.Thread(target=self._server.run, daemon=True)
        thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}/calculator"
        finally:
            self._server.should_exit = True
            thread.join()


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield headless Chromium; without it skip the test, or fail where a machine must have it."""
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium")
        pytest.skip("no chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()
