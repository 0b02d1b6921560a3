"""The pages at a port of their own, and a tiny application of the calculator, whose answers a test may break."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import resources

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from bssearch.figures.html import page_style, templates
from bssearch.web.app import HEADERS, MOST_CONNECTIONS, Access, Connection, create_app
from bssearch.web.calculator.page import calculated
from bssearch.web.views import Databases

KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
AROUND = {"path": "/calculator", "live_seconds": 0, "page_version": None, "version": "1", "databases": ["a database"]}
"""What the layout shows around the calculator."""


@cache
def environment() -> jinja2.Environment:
    return templates(jinja2.PackageLoader("bssearch.web"))


def rendered(query: Mapping[str, str], template: str = "calculator.html") -> str:
    """Return the page of a query as HTML."""
    return environment().get_template(template).render(calculator=calculated(query), **AROUND)


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
        return HTMLResponse(rendered(request.query_params, template), headers=HEADERS)

    def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        own = resources.files("bssearch.web").joinpath("static", name)
        text = page_style() if name == "page.css" else own.read_text(encoding="utf-8")
        return Response(text, media_type=KINDS[name.rpartition(".")[2]])

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


class Served:
    """Pages at a port of their own, which may go away."""

    def __init__(self, *urls: str, token: str | None = None) -> None:
        app = create_app(Databases(urls), Access.of("127.0.0.1", 80, token=token))
        config = uvicorn.Config(
            app,
            port=0,
            http=Connection,
            log_level="error",
            lifespan="off",
            ws="none",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """End the server, as Ctrl-C does."""
        self._server.should_exit = True
        self._thread.join()


@contextmanager
def served(*urls: str, token: str | None = None) -> Iterator[Served]:
    server = Served(*urls, token=token)
    try:
        yield server
    finally:
        server.stop()
