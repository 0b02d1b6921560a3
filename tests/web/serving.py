"""The pages on a free port, and a small application of the calculator, whose answers a test may break."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import resources
from typing import Any

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
# Values of the layout around the calculator.
AROUND = {"path": "/calculator", "live_seconds": 0, "page_version": None, "version": "1", "databases": ["a database"]}


environment = cache(lambda: templates(jinja2.PackageLoader("bssearch.web")))


def rendered(query: Mapping[str, str], template: str = "calculator.html") -> str:
    """Page of a query, as HTML."""
    return environment().get_template(template).render(calculator=calculated(query), **AROUND)


class Server:
    """The calculator; ``delays`` are seconds before the answer to a query with these words."""

    def __init__(self) -> None:
        self.delays: dict[str, float] = {}
        self.asked: list[str] = []
        self.is_broken = False

    def _page(self, request: Request) -> Response:
        query, is_part = request.url.query, request.query_params.get("part") == "results"
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
        """The calculator's address, while it is served."""
        routes = [Route("/calculator", self._page), Route("/static/{name}", self._asset)]
        with _running(Starlette(routes=routes), log_level="warning") as address:
            yield f"{address}/calculator"


@contextmanager
def _running(app: Starlette, **options: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", ws="none", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def served(*urls: str, token: str | None = None) -> AbstractContextManager[str]:
    """Serve databases; give the address."""
    return _running(
        create_app(Databases(urls), Access.of("127.0.0.1", 80, token=token)),
        http=Connection,
        log_level="error",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
