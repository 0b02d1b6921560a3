"""The web application: routes and error pages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from threading import Lock
from typing import Any

from jinja2 import PackageLoader
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from bssearch.errors import BSSearchError, DatabaseError, NotFoundError, TargetNotReachedError, UsageError
from bssearch.figures.html import page_style, templates
from bssearch.records.text import in_words, plural, visible, without_passwords
from bssearch.web.access import Access, Guard
from bssearch.web.calculator.page import calculator_page
from bssearch.web.studies import (
    answer_document,
    best_page,
    compare_page,
    studies_page,
    study_page,
    study_version,
    trial_page,
    trials_page,
)
from bssearch.web.views import Databases, Document, Page, PageRequest

# Status of an error page.
STATUS: tuple[tuple[type[BSSearchError], int], ...] = (
    (NotFoundError, 404),
    (TargetNotReachedError, 404),
    (UsageError, 400),
    (DatabaseError, 503),
)

PAGES: dict[str, Page] = {
    "/studies": Page(studies_page),
    "/studies/{name}": Page(study_page, study_version),
    "/studies/{name}/best.json": Page(answer_document),
    "/studies/{name}/trials": Page(trials_page, study_version),
    "/studies/{name}/trials/{number}": Page(trial_page, study_version),
    "/compare": Page(compare_page),
    "/best": Page(best_page),
    "/calculator": Page(calculator_page),
}

THREADS = 4  # Concurrent requests; they share one interpreter, and each thread keeps memory

MOST_AT_ONCE = 40  # Maximum waiting and active requests, some seconds of work; others get a retry message

KEPT_PAGES = 16  # Number of cached pages

log = logging.getLogger("bssearch.web")


def create_app(databases: Databases, access: Access) -> Starlette:
    """Return the application that serves databases."""
    pages = _Pages(databases)
    return Starlette(
        routes=[
            Route("/", lambda request: RedirectResponse("/studies")),
            *(Route(path, pages.endpoint(page)) for path, page in PAGES.items()),
            Route("/static/page.css", lambda request: Response(page_style(), media_type="text/css")),
            Mount("/static", StaticFiles(packages=[("bssearch.web", "static")])),
        ],
        middleware=[Middleware(Guard, access=access, refuse=pages.refusal, welcome=pages.welcome)],
        exception_handlers={HTTPException: pages.http_error},
    )


class _Pages:
    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._environment = templates(PackageLoader("bssearch.web"))
        self._environment.filters["value"] = in_words
        self._threads = ThreadPoolExecutor(THREADS, "bssearch page")
        self._kept: dict[str, tuple[str, Response]] = {}  # by address, the one asked for last at the end
        self._asked = 0
        # A large study takes memory and the interpreter alone; concurrent requests share one computed page.
        self._one_at_a_time = Lock()
        self._always = {
            "version": version("bssearch"),
            "databases": databases.names,
            "live_seconds": 0,
            "page_version": None,
        }

    def endpoint(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint; requests run in `THREADS` threads."""

        def answer(request: Request) -> Response:
            try:
                return self._answer(page, request)
            except BSSearchError as error:
                status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
                return self._failed(request, status, error.message, error.hint or "")
            except Exception as error:  # here, so that it is answered as all else is: with the headers of `Guard`
                log.exception("%s", request.url.path)
                return self._failed(request, 500, f"{type(error).__name__}: the log of the server has more", "")

        async def answer_in_a_thread(request: Request) -> Response:
            if self._asked >= MOST_AT_ONCE:
                return self._failed(
                    request, 503, f"{plural(self._asked, 'request')} wait already: come again in a moment", ""
                )
            self._asked += 1
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, answer, request)
            finally:
                self._asked -= 1

        return answer_in_a_thread

    def refusal(self, status: int, message: str, hint: str) -> Response:
        """Return a refusal without database content."""
        values = {"status": status, "message": message, "hint": hint, "asks_token": status == 401}
        refused = self._page("refused.html", status, values)
        if status == 405:
            refused.headers["Allow"] = "GET, HEAD"
        return refused

    def welcome(self, place: str) -> Response:
        return self._page("welcome.html", 200, {"place": place})

    def http_error(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        known = {404: f"There is no page {request.url.path}"}
        return self._failed(request, status, known.get(status, str(error)), "")

    def _answer(self, page: Page, request: Request) -> Response:
        query = request.query_params
        several = {name: query.getlist(name) for name in query}
        asked = PageRequest(self._databases, request.path_params, dict(query), several)
        if page.version is None:
            return self._made(page, asked, request.url.path)
        version = page.version(asked)
        tag = {"ETag": f'"{version}"'}
        if version == request.headers.get("if-none-match", "").removeprefix("W/").strip('"'):
            return Response(status_code=304, headers=tag)
        with self._one_at_a_time:
            kept = self._kept.pop(str(request.url), None)
            if kept is None or kept[0] != version:
                kept = version, self._made(page, asked, request.url.path, version)
            self._kept[str(request.url)] = kept
            if len(self._kept) > KEPT_PAGES:
                del self._kept[next(iter(self._kept))]
        kept[1].headers.update(tag)
        return kept[1]

    def _made(self, page: Page, asked: PageRequest, path: str, version: str | None = None) -> Response:
        found = page.show(asked)
        if isinstance(found, Document):
            return JSONResponse(found.content)
        about = {"path": path, "live_seconds": found.live_seconds, "page_version": version}
        return self._page(found.template, 200, {**about, **found.values})

    def _failed(self, request: Request, status: int, message: str, hint: str) -> Response:
        told = {"message": visible(without_passwords(message)), "hint": visible(without_passwords(hint))}
        if request.url.path.endswith(".json") or request.query_params.get("format") == "json":
            return JSONResponse({"error": told["message"], "hint": told["hint"] or None}, status)
        return self._page("error.html", status, {"status": status, "path": request.url.path, **told})

    def _page(self, template: str, status: int, values: dict[str, Any]) -> HTMLResponse:
        return HTMLResponse(self._environment.get_template(template).render(self._always | values), status)
