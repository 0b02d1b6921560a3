"""Access control: host names, a token if other machines can connect, and GET only.

Checking the Host header prevents DNS rebinding. Response headers deny other origins.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_BYTES = 32  # Bytes of a token; 256 bits cannot be guessed

MOST_QUERY_BYTES = 16_384  # Maximum query length in bytes, far above any form's

ADMITTED = "bssearch_admitted"  # Key of a request's state if `Guard` admitted it, which the server's connections read

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

HEADERS = {
    # Scripts, styles and requests from this server only; no inline code, no framing.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache, private",
}

Refuse = Callable[[int, str, str], Response]  # Returns a refusal page for a status, message and hint

# Returns a page with a link; a redirect from another site would lose the strict cookie.
Welcome = Callable[[str], Response]


@dataclass(frozen=True, slots=True)
class Access:
    """A server's accepted host names and its token, None if not required."""

    names: frozenset[str]
    port: int
    token: str | None = None
    any_address: bool = False  # accepts every IP address: unlike names, addresses cannot be rebound

    @classmethod
    def of(cls, host: str, port: int, *, token: str | None, names: Collection[str] = ()) -> Access:
        """Return the access of a server; ``names`` are further accepted names."""
        known = {host, *names}
        if is_loopback(host):
            known |= {*LOOPBACK_NAMES}
        else:
            known |= {"localhost", socket.gethostname(), socket.getfqdn()}
        return cls(frozenset(_normal(name) for name in known), port, token, any_address=not is_loopback(host))

    def answers_to(self, host: str) -> bool:
        """True if a Host header names this server."""
        # Ports are not compared, because a tunnel has its own and browsers send that one.
        parts = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+)(:[0-9]{0,5})?", host)
        if parts is None:
            return False
        name = _normal(parts[1])
        return name in self.names or (self.any_address and _is_address(name))

    @property
    def cookie(self) -> str:
        """The cookie's name, with the port: browsers send a host's cookies to all ports."""
        return f"bssearch-{self.port}"

    @property
    def pass_value(self) -> str:
        """Cookie value, derived from the token."""
        assert self.token is not None, "a cookie needs a token"
        return hmac.new(self.token.encode(), b"bssearch cookie", hashlib.sha256).hexdigest()

    def accepts_token(self, given: str) -> bool:
        """Compare a token in constant time."""
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def lets_in(self, headers: Headers) -> bool:
        """True if a request carries the cookie or ``Authorization: Bearer`` token."""
        if self.token is None:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.accepts_token(given.strip()):
            return True
        kept = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        return hmac.compare_digest(kept.encode(), self.pass_value.encode())


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Middleware that enforces `Access` and adds `HEADERS`."""

    def __init__(self, app: ASGIApp, access: Access, refuse: Refuse, welcome: Welcome) -> None:
        self._app, self._access, self._refuse, self._welcome = app, access, refuse, welcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or forward a request."""
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
        if len(hosts) != 1 or not access.answers_to(hosts[0]):
            named = hosts[0] if hosts else "nothing"
            return self._refuse(
                421, f"This server is not {named}", "--allow-host NAME lets it answer to a further name"
            )
        if scope["method"] not in {"GET", "HEAD"}:
            return self._refuse(405, f"{scope['method']} is refused: pages are read here", "")
        if len(scope["query_string"]) > MOST_QUERY_BYTES:
            size = len(scope["query_string"])
            return self._refuse(414, f"A query of {size} bytes is too long: at most {MOST_QUERY_BYTES}", "")
        return None if access.token is None else self._with_token(scope, headers)

    def _with_token(self, scope: Scope, headers: Headers) -> Response | None:
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in pairs if name == "token"]
        if given and self._access.accepts_token(given[-1]):
            rest = urlencode([(name, value) for name, value in pairs if name != "token"])
            # One leading slash only, because two would name another host.
            place = "/" + quote(scope["path"].lstrip("/\\"))
            kept = self._welcome(f"{place}?{rest}" if rest else place)
            kept.set_cookie(self._access.cookie, self._access.pass_value, httponly=True, samesite="strict", path="/")
            return kept
        if self._access.lets_in(headers):
            return None
        return self._refuse(
            401,
            "The token is not this server's" if given else "This server asks for its token",
            "It was printed once, when the server was started",
        )


def _normal(name: str) -> str:
    plain = name.strip().rstrip(".").lower().strip("[]")
    try:
        return str(ipaddress.ip_address(plain))
    except ValueError:
        return plain


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
