"""The sidecar's own HTTP client against a server that answers as it is told, byte by byte if need be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from prefixroute_serving.http_client import HttpClient, HttpError, IncomingReply, TimedOut, origin_of

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
MEBIBYTE = 1 << 20


class Server:
    """Answers each request with the next of `answers`, pieces of bytes; None closes the connection."""

    def __init__(self) -> None:
        self.answers: list[list[bytes | None]] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self.left = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.append(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._answer(reader, writer):
                pass
        self.left.set()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.requests.append(head + await reader.readexactly(length))
        for piece in self.answers.pop(0):
            if piece is None:
                return False
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return True


class Bench:
    """A client, a server, and requests from one to the other."""

    def __init__(self, client: HttpClient, server: Server, url: str) -> None:
        self.client = client
        self.server = server
        self.url = url

    async def post(self, *answer: bytes | None, body: bytes = b"{}", read_s: float | None = None) -> IncomingReply:
        self.server.answers.append(list(answer))
        headers = [("content-type", "application/json")]
        return await self.client.post(self.url, "/v1?x=1", headers, body, connect_s=5, read_s=read_s)


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        server = Server()
        async with await asyncio.start_server(server, "127.0.0.1", 0) as listening, HttpClient() as client:
            port = listening.sockets[0].getsockname()[1]
            await test(Bench(client, server, f"http://127.0.0.1:{port}/base/"))
        await asyncio.gather(*server.tasks)

    asyncio.run(main())


def test_a_request_is_sent_whole_and_connections_are_used_again() -> None:
    async def test(bench: Bench) -> None:
        for _ in range(3):
            reply = await bench.post(OK, body=b"[1]")
            assert (reply.status, await reply.read(), await reply.chunk()) == (200, b"ok", b"")
        assert bench.server.connections == 1
        first = bench.server.requests[0]
        assert first.startswith(b"POST /base/v1?x=1 HTTP/1.1\r\nhost: 127.0.0.1:")
        assert first.endswith(b"content-type: application/json\r\ncontent-length: 3\r\n\r\n[1]")

    run(test)


def test_requests_at_the_same_time_have_a_connection_each() -> None:
    async def test(bench: Bench) -> None:
        replies = await asyncio.gather(*(bench.post(OK) for _ in range(3)))
        assert [await reply.read() for reply in replies] == [b"ok"] * 3
        assert bench.server.connections == 3

    run(test)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_comes_as_it_was_sent_however_it_is_cut(size: int) -> None:
    async def test(bench: Bench) -> None:
        answer = STREAM + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
        reply = await bench.post(*(answer[at : at + size] for at in range(0, len(answer), size)))
        assert await reply.read() == b"hello world"
        assert await (await bench.post(OK)).read() == b"ok"
        assert bench.server.connections == 1

    run(test)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.post(b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\nhel", b"lo", None)
        assert (reply.headers, await reply.read()) == ({"x-a": "b"}, b"hello")

    run(test)


@pytest.mark.parametrize(
    "broken",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhel",
        STREAM + b"9\r\nhel",
        STREAM + b"zz\r\n",
        b"HTTP/1.1 200",
        b"",
        b"SSH-2.0\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * (1 << 17),
    ],
)
def test_what_is_no_whole_answer_is_an_error(broken: bytes) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(HttpError):
            await (await bench.post(broken, None)).read()
        assert await (await bench.post(OK)).read() == b"ok"

    run(test)


def test_interim_answers_are_passed_over() -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.post(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)
        assert (reply.status, reply.headers, await reply.read()) == (200, {"content-length": "2"}, b"ok")

    run(test)


def test_a_second_answer_is_neither_mixed_in_nor_kept_for_the_next_request() -> None:
    async def test(bench: Bench) -> None:
        assert await (await bench.post(OK + OK.replace(b"ok", b"no"))).read() == b"ok"
        assert await (await bench.post(OK)).read() == b"ok"
        assert bench.server.connections == 2

    run(test)


def test_a_server_that_closes_is_not_asked_on_that_connection_again() -> None:
    async def test(bench: Bench) -> None:
        closing = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        for _ in range(2):
            assert await (await bench.post(closing)).read() == b"ok"
        assert bench.server.connections == 2

    run(test)


def test_letting_go_of_an_answer_closes_its_connection() -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.post(STREAM + b"2\r\nok\r\n")
        assert await reply.chunk() == b"ok"
        reply.close()
        reply.close()
        await bench.server.left.wait()

    run(test)


def test_a_cancelled_request_closes_its_connection() -> None:
    async def test(bench: Bench) -> None:
        task = asyncio.ensure_future(bench.post(b""))
        while not bench.server.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await bench.server.left.wait()

    run(test)


def test_a_silent_server_is_given_up() -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(TimedOut):
            await bench.post(b"", read_s=0.01)
        with contextlib.closing(await bench.post(STREAM, read_s=0.01)) as reply, pytest.raises(TimedOut):
            await reply.read()

    run(test)


def test_more_than_anybody_takes_makes_the_sender_wait_and_arrives_whole() -> None:
    async def test(bench: Bench) -> None:
        size = 64 * MEBIBYTE
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
        reply = await bench.post(head, *[bytes(MEBIBYTE)] * 64)
        for _ in range(2000):
            await asyncio.sleep(0)
        first = await reply.chunk()
        assert len(first) < 8 * MEBIBYTE
        assert len(first) + len(await reply.read()) == size

    run(test)


def test_nobody_there_is_an_error() -> None:
    async def main() -> None:
        server = await asyncio.start_server(Server(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        async with HttpClient() as client:
            with pytest.raises(HttpError):
                await client.post(f"http://127.0.0.1:{port}", "/", [], b"", connect_s=5)

    asyncio.run(main())


@pytest.mark.parametrize(
    "url", ["", "here", "ftp://a", "http://", "http://a:99999", "http://a:b", "http://[1", "http://a\n"]
)
def test_what_is_no_url_is_an_error(url: str) -> None:
    with pytest.raises(HttpError):
        origin_of(url)


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "header"),
    [
        ("http://a", "a", 80, False, "a"),
        ("https://a.b/", "a.b", 443, True, "a.b"),
        ("http://[::1]:8000", "::1", 8000, False, "[::1]:8000"),
        ("http://user:word@a:1", "a", 1, False, "a:1"),
    ],
)
def test_urls_are_read(url: str, host: str, port: int, tls: bool, header: str) -> None:
    assert origin_of(url) == (host, port, tls, "", header)
