"""Which names a server answers to.

A page of any site can make its visitor's browser ask this machine: under a name of its own that it
lets point here (DNS rebinding), or across sites. Browsers say which name they asked for (Host) and
which page asks (Origin), so both must be names of this server. An address as a name cannot be
pointed elsewhere; names can.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from oneflow_accel.errors import UserError

# What `--allowed-hosts` may hold: a name, *.name for all below it, or * for any.
_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


class AllowedHosts:
    """The names of a server: localhost and the loopback addresses, where it listens, and more.

    Args:
        bound: the name or address to listen at. At 0.0.0.0 or :: (all addresses) every address is
            a name, and this machine's own name is one.
        further: other names; *.example.com for all below a name, * for any name at all.

    Raises:
        UserError: a name that is none.
    """

    def __init__(self, bound: str, further: Sequence[str] = ()) -> None:
        self._names = {"localhost", _plain(bound)}
        self._suffixes: list[str] = []
        address = _address(_plain(bound))
        self._all_addresses = address is not None and address.is_unspecified
        if self._all_addresses:
            self._names.add(_plain(socket.gethostname()))
        for text in further:
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
            # Raises where the port is no number.
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
