"""Which names a server answers to, and HTTP/1.1 connections that cannot be held open for nothing.

A page of any site can make its visitor's browser ask this machine, under a name that the site lets
point here (DNS rebinding) or across sites. Browsers say which name they asked for (Host) and which
page asks (Origin), so both must be names of this server.

uvicorn 0.54 has no time limit for the head of a request, and counts idle connections: some dozens
of half-sent requests would lock everybody out. Here each connection has some seconds to send and to
take, and the oldest without a whole request makes room for a new one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from oneflow_accel.errors import UserError

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# What `--allowed-hosts` may hold: a name, *.name for all below it, or * for any.
_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


class AllowedHosts:
    """The names of a server: localhost and the loopback addresses, where it listens, and more.

    At 0.0.0.0 or :: (all addresses) every address is a name, and this machine's own name is one.
    `further` takes *.example.com for all below a name, * for any; a UserError if it is not a name.
    """

    def __init__(self, bound: str, further: Sequence[str] = ()) -> None:
        self._names = {"localhost", _plain(bound)}
        self._suffixes: list[str] = []
        address = _address(_plain(bound))
        self._all_addresses = address is not None and address.is_unspecified
        if self._all_addresses:
            self._names.add(_plain(socket.gethostname()))
        for text in filter(None, further):
            name = _plain(text)
            if _PATTERN.fullmatch(name) is None and _address(name) is None:
                raise UserError(
                    f"--allowed-hosts {text}: expected a name without scheme and port, such as "
                    "prompts.example.com or *.example.com"
                )
            if name.startswith("*"):
                self._suffixes.append(name[1:])
            else:
                self._names.add(name)

    def has_host(self, header: str | None) -> bool:
        """Whether a Host header, "name" or "name:port", names this server."""
        return header is not None and self._has(f"//{header}")

    def has_origin(self, header: str) -> bool:
        """Whether an Origin header, "scheme://name:port", is a page of this server."""
        return "://" in header and self._has(header)

    def _has(self, url: str) -> bool:
        try:
            parts = urlsplit(url)
            name = _plain(parts.hostname or "")
            # This raises where the port is not a number.
            plain = name != "" and parts.port != 0 and parts.username is None
        except ValueError:
            return False
        if not plain or parts.path or parts.query or parts.fragment:
            return False
        if name in self._names or name.endswith(tuple(self._suffixes)):
            return True
        address = _address(name)
        return address is not None and (self._all_addresses or address.is_loopback)


def _plain(name: str) -> str:
    return name.strip().lower().strip("[]").rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None


# What a client reads over while it has no answer yet (RFC 9110, section 15.2), and how often one
# that sends no more is sent it, in seconds.
_STILL_THERE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STILL_THERE_SECONDS = 0.25


class BoundedProtocol(H11Protocol):
    """One connection of at most `most` at once. It may take `head_seconds` from its opening or the
    last answer to the end of a request's head, `answer_seconds` from there to the last byte."""

    def __init__(
        self, *, head_seconds: float, answer_seconds: float, most: int, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._head_seconds, self._answer_seconds, self._most = head_seconds, answer_seconds, most
        self._timer: asyncio.TimerHandle | None = None
        self._opened = self.loop.time()
        self._sends_no_more = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_timer(self._head_seconds)
        open_ones = [each for each in self.connections if not each.transport.is_closing()]
        if len(open_ones) > self._most:
            idle = [each for each in open_ones if each is not self and not each.has_request]
            # If all connections are at work, which the queue's length bounds, close the new one.
            min(idle, key=lambda each: each._opened, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        was_at_work = self._is_at_work
        super().data_received(data)
        if self._is_at_work and not was_at_work:
            self._start_timer(self._answer_seconds)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next request may have come together with the last one.
        if self._is_at_work:
            self._start_timer(self._answer_seconds)
        elif self._sends_no_more:
            self.transport.close()
        else:
            self._start_timer(self._head_seconds)

    def eof_received(self) -> bool:
        """Keep the connection of a client that has sent a whole request and no more follows."""
        self._sends_no_more = True
        self._ask_whether_there()
        return self.has_request

    def _ask_whether_there(self) -> None:
        # One that has gone altogether looks the same, until it is written to.
        if not self.has_request or self.cycle.response_started or self.transport.is_closing():
            return
        if self.scope["http_version"] == "1.1":
            self.transport.write(_STILL_THERE)
            self.loop.call_later(_STILL_THERE_SECONDS, self._ask_whether_there)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, in the form of the other errors."""
        body = json.dumps({"error": msg}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events = (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    @property
    def has_request(self) -> bool:
        return self._is_at_work and not self.cycle.more_body

    @property
    def _is_at_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # `close` would wait until the client has read what was written.
        self._timer = self.loop.call_later(seconds, self.transport.abort)
