"""A TCP proxy between a program and its database, whose wire can be cut or go silent."""

from __future__ import annotations

import select
import socket
import threading


class Wire:
    """`mode` is pass, cut (refuses and breaks connections) or silent (takes everything, answers nothing)."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._mode = "pass"
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listening.getsockname()[1])
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._end = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self, mode: str) -> None:
        self._mode = mode

    def close(self) -> None:
        self._end = True
        self._thread.join(10)
        self._listening.close()

    def _run(self) -> None:
        while not self._end:
            if self._mode == "silent":
                # Connections are made by the kernel; nothing is read or said.
                select.select([], [], [], 0.02)
                continue
            ends = {one: other for pair in self._pairs for one, other in (pair, pair[::-1])}
            ready, _, _ = select.select([self._listening, *ends], [], [], 0.02)
            if self._mode == "cut":
                for pair in self._pairs:
                    _close(*pair)
                self._pairs.clear()
                if self._listening in ready:
                    _close(self._listening.accept()[0])
                continue
            for one in ready:
                if one is self._listening:
                    self._accept()
                elif one.fileno() >= 0:
                    self._pass_on(one, ends[one])
        for pair in self._pairs:
            _close(*pair)

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        try:
            self._pairs.append((client, socket.create_connection(self._to, timeout=5)))
        except OSError:
            _close(client)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            data = one.recv(65536)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        self._pairs = [pair for pair in self._pairs if one not in pair]
        _close(one, other)


def _close(*sockets: socket.socket) -> None:
    for one in sockets:
        one.close()
