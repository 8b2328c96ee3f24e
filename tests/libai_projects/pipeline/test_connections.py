"""Who may connect to --serve, for how long, and under which name; over real connections."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator

from oneflow_accel.errors import UserError

import httpx
import pytest

from libai_projects.inference import server
from libai_projects.inference.connections import AllowedHosts

CLIENT = httpx.Client(verify=False, timeout=30)
NOTHING = b""
HALF_A_HEAD = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Ty"
HEAD = (
    b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n"
)
HALF_A_BODY = HEAD + b'{"prompt": '


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def connections(url: str, sent: list[bytes]) -> Iterator[list[socket.socket]]:
    """One for each of `sent`, which is all that it sends."""
    with contextlib.ExitStack() as stack:
        opened = []
        for data in sent:
            connection = socket.create_connection(address(url), timeout=20)
            opened.append(stack.enter_context(connection))
            connection.sendall(data)
        yield opened


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection, by a goodbye or without one."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return found


@pytest.mark.parametrize("sent", [NOTHING, HALF_A_HEAD, HALF_A_BODY])
def test_half_sent_requests_lock_nobody_out(
    serve: Callable, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """More of them than there may be connections, and none of them has timed out."""
    monkeypatch.setattr(server, "_MORE_CONNECTIONS", 40)
    url = serve(arrival_seconds=60.0, queue=10).url
    with connections(url, [sent] * 90) as opened:
        for _ in range(3):
            assert httpx.get(f"{url}api/health", timeout=10).status_code == 200
            body = {"prompt": "a", "max_new_tokens": 3}
            assert httpx.post(f"{url}api/generate", json=body, timeout=10).status_code == 200
        # The oldest made room.
        assert rest_of(opened[0]) == b""
        opened[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            opened[-1].recv(1)


def test_work_makes_no_room(serve: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is being answered outlives a flood of half-sent ones."""
    monkeypatch.setattr(server, "_MORE_CONNECTIONS", 5)
    running = serve(delay=0.02, arrival_seconds=60.0, queue=10)
    body = {"prompt": "a", "max_new_tokens": 100, "stream": True}
    with CLIENT.stream("POST", f"{running.url}api/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        with connections(running.url, [HALF_A_HEAD] * 60):
            assert '"done"' in list(lines)[-1]


@pytest.mark.parametrize("sent", [NOTHING, HALF_A_HEAD, HALF_A_BODY, HALF_A_HEAD[:1]])
def test_a_request_has_to_arrive_in_time(serve: Callable, sent: bytes) -> None:
    url = serve(arrival_seconds=0.3).url
    with connections(url, [sent]) as (connection,):
        answer = rest_of(connection)
        assert answer.startswith(b"HTTP/1.1 408 ") if sent == HALF_A_BODY else answer == b""
    # Also one that comes on a connection which has had an answer.
    with connections(url, [b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n" + sent]) as (
        connection,
    ):
        assert rest_of(connection).startswith(b"HTTP/1.1 200 ")


def test_answers_have_to_be_taken_in_time(serve: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for far more than the buffers between the two hold, and nobody who reads."""
    monkeypatch.setattr(server, "_TAKE_SECONDS", 0.3)
    url = serve(seconds=0.2, arrival_seconds=0.2).url
    size = len(CLIENT.get(f"{url}app.js").content)
    count = 40_000_000 // size
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(address(url))
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * count)
            # It reads nothing until the server has ended the connection.
            while True:
                connection.sendall(b"\r\n")
        assert len(rest_of(connection)) < count * size
    assert CLIENT.get(f"{url}api/health").status_code == 200


@pytest.mark.parametrize("path", ["api/generate", "app.js"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_sends_no_more_is_answered(serve: Callable, path: str, stream: bool) -> None:
    """It has closed its half of the connection after one whole request, or after two."""
    url = serve(delay=0.05).url
    body = json.dumps({"prompt": "a", "max_new_tokens": 20, "stream": stream}).encode()
    sent = HEAD.replace(b"100", str(len(body)).encode()) + body
    if path == "app.js":
        sent = b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" + sent
    with connections(url, [sent]) as (connection,):
        connection.shutdown(socket.SHUT_WR)
        answer = rest_of(connection)
    assert answer.count(b"HTTP/1.1 200 ") == (2 if path == "app.js" else 1)
    assert b'"finish_reason"' in answer


ERRORS: list[tuple[str, str, dict[str, str], int]] = [
    ("GET", "nothing/here", {}, 404),
    ("GET", "api/generate", {}, 405),
    ("POST", "", {}, 405),
    ("DELETE", "api/health", {}, 405),
    ("POST", "api/generate", {}, 415),
    ("GET", "", {"Host": "evil.example.com"}, 400),
    ("GET", "api/health", {"Host": "evil.example.com:8000"}, 400),
    ("GET", "nothing/here", {"Host": "localhost.evil.example.com"}, 400),
    ("POST", "api/generate", {"Origin": "http://evil.example.com"}, 403),
    ("POST", "api/generate", {"Origin": "null"}, 403),
]


@pytest.mark.parametrize(("method", "path", "headers", "status"), ERRORS)
def test_every_error_has_one_form(
    serve: Callable, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = CLIENT.request(method, serve().url + path, headers=headers)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert "\n" not in answer.json()["error"]


def test_what_is_no_http_gets_the_same_form(serve: Callable) -> None:
    with connections(serve().url, [b"nonsense\r\n\r\n"]) as (connection,):
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert body == b'{"error": "Invalid HTTP request received."}'


def test_names_and_pages_of_this_server_are_served(serve: Callable) -> None:
    url = serve().url
    port = address(url)[1]
    for host in (f"localhost:{port}", "LOCALHOST", "127.0.0.1", "[::1]:80"):
        assert CLIENT.get(f"{url}api/health", headers={"Host": host}).status_code == 200, host
    for origin in (f"http://localhost:{port}", "http://127.0.0.1:1", "http://[::1]:80"):
        body = {"prompt": "a", "max_new_tokens": 1}
        answer = CLIENT.post(f"{url}api/generate", json=body, headers={"Origin": origin})
        assert answer.status_code == 200, origin


@pytest.mark.parametrize(
    ("bound", "further", "good", "bad"),
    [
        ("127.0.0.1", [], ["localhost:8000", "127.0.0.2", "[::1]", "localhost."],
         ["192.0.2.1", "example.com", "", "localhost:x", "a@localhost", "localhost/x", ":80"]),
        ("192.0.2.1", [], ["192.0.2.1:80", "localhost"], ["192.0.2.2", "host"]),
        ("box.example.com", [], ["Box.example.com:80"], ["x.box.example.com", "example.com"]),
        ("::", [], ["192.0.2.1", "[2001:db8::1]:8000", socket.gethostname()], ["example.com"]),
        ("0.0.0.0", ["a.example.com"], ["192.0.2.1", "a.example.com"], ["b.example.com"]),
        ("127.0.0.1", ["*.example.com"], ["a.example.com:1", "b.a.example.com"],
         ["example.com", "aexample.com", "example.org"]),
        ("127.0.0.1", ["*"], ["anything:80", "192.0.2.1"], ["", "a@b", "x:y"]),
    ],
)  # fmt: skip
def test_allowed_names(bound: str, further: list[str], good: list[str], bad: list[str]) -> None:
    hosts = AllowedHosts(bound, further)
    assert {name: hosts.has_host(name) for name in good} == dict.fromkeys(good, True)
    assert {name: hosts.has_host(name) for name in bad} == dict.fromkeys(bad, False)
    assert all(hosts.has_origin(f"https://{name}") for name in good)
    assert not any(hosts.has_origin(f"https://{name}") for name in bad)
    assert not hosts.has_host(None)
    assert not hosts.has_origin("localhost")


@pytest.mark.parametrize("name", ["http://a.example.com", "a.example.com:80", "a/b", "*a", "a b"])
def test_refuses_what_is_no_name(name: str) -> None:
    with pytest.raises(UserError, match="--allowed-hosts"):
        AllowedHosts("127.0.0.1", [name])
