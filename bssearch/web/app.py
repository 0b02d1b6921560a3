"""The web application: routes, error pages and the HTTP server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import h11
import uvicorn
from jinja2 import PackageLoader
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request, cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from bssearch.errors import BSSearchError, DatabaseError, NotFoundError, TargetNotReachedError, UsageError, require
from bssearch.figures.html import page_style, templates
from bssearch.records.text import in_words, plural, visible, without_passwords
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

TOKEN_BYTES = 32  # 256 random bits resist guessing

MOST_QUERY_BYTES = 16_384  # longest query, far above the forms' queries

ADMITTED = "bssearch_admitted"  # key in the state of a request that `Guard` admitted; `Connection` reads this state

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

HEADERS = {
    # only scripts, styles and requests of this server, without inline code and framing
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache, private",
}


@dataclass(frozen=True, slots=True)
class Access:
    """The host names that the server accepts, and the token if required."""

    names: frozenset[str]
    port: int
    token: str | None = None
    any_address: bool = False  # accepts all IP addresses, because rebinding needs a name

    @classmethod
    def of(cls, host: str, port: int, *, token: str | None, names: Collection[str] = ()) -> Access:
        own = LOOPBACK_NAMES if is_loopback(host) else ("localhost", socket.gethostname(), socket.getfqdn())
        known = frozenset(_normal(name) for name in (host, *names, *own))
        return cls(known, port, token, any_address=not is_loopback(host))

    def _answers_to(self, host: str) -> bool:
        # ports do not matter, because browsers send the port of an SSH tunnel
        parts = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+)(:[0-9]{0,5})?", host)
        if parts is None:
            return False
        name = _normal(parts[1])
        return name in self.names or (self.any_address and _address(name) is not None)

    @property
    def cookie(self) -> str:
        return f"bssearch-{self.port}"  # browsers send a host's cookies to all ports

    @property
    def _pass_value(self) -> str:
        assert self.token is not None, "a cookie needs a token"
        return hmac.new(self.token.encode(), b"bssearch cookie", hashlib.sha256).hexdigest()

    def _accepts_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def _lets_in(self, headers: Headers) -> bool:
        # True if a request has the cookie or the `Authorization: Bearer` token
        if self.token is None:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._accepts_token(given.strip()):
            return True
        kept = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        return hmac.compare_digest(kept.encode(), self._pass_value.encode())


def is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


class Guard:
    """Middleware that enforces `Access` and adds `HEADERS` to each response."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        refuse: Callable[[int, str, str], Response],
        welcome: Callable[[str], Response],
    ) -> None:
        self._app, self._access, self._refuse, self._welcome = app, access, refuse, welcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._answer(scope)
        if answer is not None and answer.status_code >= 400:
            answer.headers["Connection"] = "close"
        else:
            scope.setdefault("state", {})[ADMITTED] = True
        await (answer or self._app)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        headers, access = Headers(scope=scope), self._access
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not access._answers_to(hosts[0]):
            return self._refuse(
                421,
                f"This server does not accept the host {hosts[0] if hosts else ''!r}",
                "Start the server with --allow-host NAME",
            )
        if scope["method"] not in {"GET", "HEAD"}:
            return self._refuse(405, f"{scope['method']} does not work, because pages are read-only", "Use GET")
        if (size := len(scope["query_string"])) > MOST_QUERY_BYTES:
            return self._refuse(
                414, f"The query has {size} bytes, more than {MOST_QUERY_BYTES} bytes", "Shorten the query"
            )
        return None if access.token is None else self._with_token(scope, headers)

    def _with_token(self, scope: Scope, headers: Headers) -> Response | None:
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in pairs if name == "token"]
        if given and self._access._accepts_token(given[-1]):
            rest = urlencode([(name, value) for name, value in pairs if name != "token"])
            # only one leading slash, because two would name another host
            place = "/" + quote(scope["path"].lstrip("/\\"))
            # a page with a link, because a redirect from another site would lose the strict cookie
            kept = self._welcome(f"{place}?{rest}" if rest else place)
            kept.set_cookie(self._access.cookie, self._access._pass_value, httponly=True, samesite="strict", path="/")
            return kept
        if self._access._lets_in(headers):
            return None
        return self._refuse(
            401,
            "The token is wrong" if given else "This server requires a token",
            "Use the address that the server printed at the start",
        )


def _normal(name: str) -> str:
    plain = name.strip().rstrip(".").lower().strip("[]")
    return str(_address(plain) or plain)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


# HTTP status by error
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

THREADS = 4  # concurrent requests, which share an interpreter; each thread takes memory

MOST_AT_ONCE = 40  # most waiting and active requests, some seconds of work

KEPT_PAGES = 16  # cached pages

log = logging.getLogger("bssearch.web")


def create_app(databases: Databases, access: Access) -> Starlette:
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
        self._kept: dict[
            str, tuple[str, Response]
        ] = {}  # version and response by address, with the latest request last
        self._asked = 0
        # a large study's page takes memory and the whole interpreter, so concurrent requests share the page
        self._one_at_a_time = Lock()
        self._always = {
            "version": version("bssearch"),
            "databases": databases.names,
            "live_seconds": 0,
            "page_version": None,
        }

    def endpoint(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        def answer(request: Request) -> Response:
            try:
                return self._answer(page, request)
            except BSSearchError as error:
                status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
                return self._failed(request, status, error.message, error.hint or "")
            except Exception as error:  # not in Starlette, so that `Guard` adds headers to the error page
                log.exception("%s", request.url.path)
                return self._failed(request, 500, f"Internal error {type(error).__name__}; see the server's log", "")

        async def answer_in_a_thread(request: Request) -> Response:
            if self._asked >= MOST_AT_ONCE:
                return self._failed(
                    request, 503, f"The server is busy with {plural(self._asked, 'request')}", "Try again in a moment"
                )
            self._asked += 1
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, answer, request)
            finally:
                self._asked -= 1

        return answer_in_a_thread

    def refusal(self, status: int, message: str, hint: str) -> Response:
        refused = self._page(
            "refused.html", status, {"status": status, "message": message, "hint": hint, "asks_token": status == 401}
        )
        if status == 405:
            refused.headers["Allow"] = "GET, HEAD"
        return refused

    def welcome(self, place: str) -> Response:
        return self._page("welcome.html", 200, {"place": place})

    def http_error(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 404:
            return self._failed(request, status, f"Unknown page {request.url.path}", "Start at /studies")
        return self._failed(request, status, str(error), "")

    def _answer(self, page: Page, request: Request) -> Response:
        query = request.query_params
        asked = PageRequest(
            self._databases, request.path_params, dict(query), {name: query.getlist(name) for name in query}
        )
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
        return self._page(
            found.template,
            200,
            {"path": path, "live_seconds": found.live_seconds, "page_version": version, **found.values},
        )

    def _failed(self, request: Request, status: int, message: str, hint: str) -> Response:
        shown = {"message": visible(without_passwords(message)), "hint": visible(without_passwords(hint))}
        if request.url.path.endswith(".json") or request.query_params.get("format") == "json":
            return JSONResponse({"error": shown["message"], "hint": shown["hint"] or None}, status)
        return self._page("error.html", status, {"status": status, "path": request.url.path, **shown})

    def _page(self, template: str, status: int, values: dict[str, Any]) -> HTMLResponse:
        return HTMLResponse(self._environment.get_template(template).render(self._always | values), status)


# Browsers open connections in advance, unused for minutes

# Most open connections, below the default limit of 1,024 files per process; a browser opens up to six
MOST_CONNECTIONS = 400

MOST_STRANGERS = 100  # most open connections without an admitted request; a new connection replaces the oldest

REQUEST_S = 10.0  # seconds for a request's head and body on a slow network


class Connection(H11Protocol):
    """A connection with a deadline per request, and a limit on connections without an admitted request."""

    opened_at: float
    _is_admitted = False
    _deadline: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opened_at = self.loop.time()
        strangers = [one for one in self.connections if isinstance(one, Connection) and one._is_stranger]
        if len(strangers) > MOST_STRANGERS:
            min(strangers, key=lambda one: one.opened_at).transport.abort()
        self._deadline = self.loop.call_later(REQUEST_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self._is_admitted = not self._is_stranger
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_deadline()

    @property
    def _is_stranger(self) -> bool:
        # True if open, but without an admitted request
        is_admitted = self._is_admitted or (self.scope is not None and ADMITTED in self.scope["state"])
        return not (is_admitted or self.transport.is_closing())

    def _watch(self) -> None:
        awaits_head = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not (awaits_head or self.conn.their_state is h11.SEND_BODY):
            self._stop_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


GRACE_S = 3  # seconds for requests to finish after a stop

BACKLOG = 128  # of the listening socket


def serve(
    urls: Sequence[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    names: Sequence[str] = (),
    asks_token: bool | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve database pages until Ctrl-C or SIGTERM.

    Pages require a token if other machines reach ``host``, or if ``asks_token`` is True.

    Args:
        port: TCP port; 0 takes a free port.
        names: More host names that the server accepts.
        tell: Prints a line of the start message.

    Raises:
        UsageError: The address is unusable, or ``asks_token`` is False although other machines reach ``host``.
    """
    databases = Databases(urls)
    needs_token = not is_loopback(host)
    require(
        asks_token is not False or not needs_token,
        f"--no-token is unsafe, because other machines reach {host}",
        hint="use --host 127.0.0.1, and `ssh -L` from other machines",
    )
    token = secrets.token_urlsafe(TOKEN_BYTES) if asks_token or needs_token else None
    with _listening(host, port) as listener:
        port = listener.getsockname()[1]
        app = create_app(databases, Access.of(host, port, token=token, names=names))
        for line in _welcome(host, port, token, databases.names):
            tell(line)
        config = uvicorn.Config(
            app,
            access_log=False,  # an access log would have the token
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            http=Connection,
            ws="none",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_S,
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _welcome(host: str, port: int, token: str | None, databases: Sequence[str]) -> list[str]:
    shown = socket.gethostname() if host in {"0.0.0.0", "::"} else f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/"
    about_token = "the token appears only once and travels unencrypted; on a shared network, use `ssh -L`"
    return [
        f"serving {', '.join(databases)}, read-only",
        address if token is None else f"{address}?token={token}",
        *([] if token is None else [about_token]),
        "press Ctrl-C to stop the server",
    ]


def _listening(host: str, port: int) -> socket.socket:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host} is not a name or address of this machine; use 127.0.0.1 or 0.0.0.0") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"listening on --host {host} --port {port} failed: {error.strerror}",
            hint="use --port 0 for a free port, or --host 0.0.0.0 for all addresses of this machine",
        ) from None
    return listener
