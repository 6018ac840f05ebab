"""A tap's Unix socket: any number of readers, each served from the ring at its own speed.

Rules:
1. Nothing here waits but `turn`, and that only as long as it is told to. No reader can hold up another one.
2. A reader has no queue of its own, only a position in the ring and the bytes that its socket has not taken yet (at
   most a chunk, or one frame). One that is so slow that the ring overtakes it finds a number missing: a gap. One that
   takes nothing at all is cut off after a while, and may come back.
3. The same user only: the socket's file has mode 0600, and a peer of another user is cut off.
4. A path that is no socket is never touched. A socket that nobody serves (of an engine that was killed) is replaced.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
import struct
import time
import weakref
from typing import Final

from .frames import MAX_REQUEST_BYTES, FrameError, Head, Resume, Splitter, Welcome, decode, encode
from .paths import MAX_PATH_BYTES
from .ring import Ring

MAX_READERS: Final = 32
CHUNK_BYTES: Final = 256 << 10
"""What is handed to a reader's socket at once."""

STUCK_S: Final = 30.0
"""How long a reader may take nothing of what there is for it."""

_TURN_BYTES: Final = 4 * CHUNK_BYTES  # then the next reader has its turn
_BACKLOG: Final = 16
_RECEIVE_BYTES: Final = 256
_CREDENTIALS: Final = struct.Struct("3i")


_servers: weakref.WeakSet[TapServer] = weakref.WeakSet()


def _after_fork() -> None:
    for server in _servers:
        server.close_inherited()


os.register_at_fork(after_in_child=_after_fork)


class _Reader:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.splitter = Splitter(MAX_REQUEST_BYTES)
        self.pending = memoryview(b"")
        self.position = -1
        """In the ring; -1 until the reader has said where it wants to begin."""
        self.told = -1
        """All below this number has been sent, or said to be lost."""
        self.blocked = False
        self.took_at = time.monotonic()
        """When its socket took something last, or had nothing to take."""


class TapServer:
    """Listens on `path`. Raises OSError when it cannot, and says why. Not thread-safe; use it from one thread.

    The ring is the caller's to fill; `welcome` is asked for every reader anew.
    """

    def __init__(self, path: str, ring: Ring, life: int, rank: int, engine: str) -> None:
        self._path = path
        self._ring = ring
        self._identity = (life, rank, engine)
        self._readers: dict[socket.socket, _Reader] = {}
        self.accepted = 0
        self.refused = 0
        """Readers that were cut off: of another user, too many, stuck, or not speaking the tap's wire."""
        self._listener = _listen(path)
        _servers.add(self)
        self._inode = os.stat(path).st_ino
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def readers(self) -> int:
        """Connections that are open."""
        return len(self._readers)

    @property
    def blocked(self) -> bool:
        """Whether a reader takes no more for now, but has more to come."""
        return any(reader.blocked for reader in self._readers.values())

    def turn(self, timeout_s: float) -> None:
        """Take in new readers and what they say, wait for that `timeout_s` at most, then send what can be sent."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._receive(self._readers[key.fileobj])  # type: ignore[index]
        for reader in list(self._readers.values()):
            self._send(reader)

    def close(self) -> None:
        """Cut everybody off and remove the socket's file, if it is still this one's."""
        for reader in list(self._readers.values()):
            self._drop(reader)
        self._selector.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        self._listener.close()

    def close_inherited(self) -> None:
        """Forget the sockets in a process that was forked: held there, they would outlive this one unseen."""
        for connection in (self._listener, *self._readers):
            connection.close()

    # --- readers -------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if len(self._readers) >= MAX_READERS or _user_of(connection) not in (0, os.geteuid()):
                self.refused += 1
                connection.close()
                return
            connection.setblocking(False)
            self._readers[connection] = _Reader(connection)
            self._selector.register(connection, selectors.EVENT_READ)
            self.accepted += 1

    def _receive(self, reader: _Reader) -> None:
        try:
            data = reader.socket.recv(_RECEIVE_BYTES)
            if not data:
                self._drop(reader)
            for body in reader.splitter.feed(data):
                self._begin(reader, decode(body))
        except BlockingIOError:
            pass
        except (OSError, FrameError) as error:
            self.refused += isinstance(error, FrameError)
            self._drop(reader)

    def _begin(self, reader: _Reader, frame: object) -> None:
        if not isinstance(frame, Resume) or reader.position >= 0:
            raise FrameError("malformed", "a reader says where to begin, and nothing else")
        life, rank, engine = self._identity
        known = frame.next_seq if frame.life == life else 0
        reader.position = self._ring.seek(known)
        reader.pending = memoryview(encode(Welcome(life, rank, self._ring.next_seq, engine)))

    def _send(self, reader: _Reader) -> None:
        sent = 0
        try:
            while sent < _TURN_BYTES and (reader.pending or self._refill(reader)):
                taken = reader.socket.send(reader.pending)
                reader.pending = reader.pending[taken:]
                sent += taken
        except BlockingIOError:
            pass
        except OSError:
            self._drop(reader)
            return
        blocked = bool(reader.pending) or sent >= _TURN_BYTES
        if sent or not blocked:
            reader.took_at = time.monotonic()
        elif time.monotonic() - reader.took_at > STUCK_S:
            self.refused += 1
            self._drop(reader)
            return
        if blocked != reader.blocked:
            reader.blocked = blocked
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
            self._selector.modify(reader.socket, wanted)

    def _refill(self, reader: _Reader) -> bool:
        """Fetch what comes next for a reader; False when there is nothing."""
        if reader.position < 0:
            return False
        frames, reader.position, after = self._ring.read(reader.position, CHUNK_BYTES)
        if frames:
            reader.pending, reader.told = memoryview(b"".join(frames)), after
        elif reader.told < self._ring.next_seq:
            reader.pending, reader.told = memoryview(encode(Head(self._ring.next_seq))), self._ring.next_seq
        return bool(reader.pending)

    def _drop(self, reader: _Reader) -> None:
        if self._readers.pop(reader.socket, None) is not None:
            self._selector.unregister(reader.socket)
            reader.socket.close()


def _listen(path: str) -> socket.socket:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(f"a socket's path has at most {MAX_PATH_BYTES} bytes: {path}")
    _make_room(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # the file gets this mode as it is made: nobody slips in before chmod
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {path}: {error.strerror}") from error
    return listener


def _make_room(path: str) -> None:
    """Remove the socket of a process that is gone."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(f"{path} exists and is no socket: choose another path, or remove it")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass  # its backlog is full, so somebody listens
    raise OSError(f"{path} is served by another process: give each engine a path of its own")


def _user_of(connection: socket.socket) -> int:
    """The number of the user whose process is at the other end."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(peer)[1]
    return user
