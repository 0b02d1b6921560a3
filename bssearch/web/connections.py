"""Connections as the server keeps them: browsers open some in advance, and leave them unused for minutes."""

from __future__ import annotations

from asyncio import Transport

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 400
"""Connections that are open at once at most, others are told to come again: a choice, fewer than the 1,024 files that a
process may have open where nobody says otherwise, with those of the databases. A browser opens up to six."""

FIRST_REQUEST_S = 10.0
"""Seconds within which a connection must have asked something: a choice, longer than a slow network takes."""


class Connection(H11Protocol):
    """A connection that is closed where it does not ask anything in time; after an answer uvicorn's own limit holds."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST_S, self._close_unused)

    def _close_unused(self) -> None:
        if not self.cycle:  # uvicorn: None until a request has come
            self.transport.close()
