"""A TCP proxy in front of a server, which can break connections off, leave them hanging, or speak TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator


class Proxy(socketserver.ThreadingTCPServer):
    """`cut` and `stall` are a number of bytes: the first answer longer than that ends, or stops, there."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Pump)
        self.upstream = port
        self.tls = tls
        self.accepted = 0
        self.stopped = threading.Event()
        self.cut: int | None = None
        self.stall: int | None = None

    @property
    def endpoint(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.server_address[1]}"

    def get_request(self) -> tuple[socket.socket, object]:
        client, address = super().get_request()
        self.accepted += 1
        if self.tls is not None:
            client = self.tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return client, address

    def hang_up(self) -> None:
        """End the connections that are there, when they are idle."""
        self.stopped.set()
        self.stopped = threading.Event()

    def fate(self, sent: int) -> str:
        for name in ("cut", "stall"):
            limit = getattr(self, name)
            if limit is not None and sent > limit:
                setattr(self, name, None)
                return name
        return ""


class _Pump(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        stopped, sent = self.server.stopped, 0
        address = ("127.0.0.1", self.server.upstream)
        with contextlib.suppress(OSError), socket.create_connection(address) as up:
            while not stopped.is_set():
                for source in select.select([self.request, up], [], [], 0.02)[0]:
                    if not (data := _received(source)):
                        return
                    sent = sent + len(data) if source is up else 0
                    fate = self.server.fate(sent)
                    if fate == "stall":
                        stopped.wait(60)
                    if fate:
                        return
                    (self.request if source is up else up).sendall(data)


def _received(source: socket.socket) -> bytes:
    data = source.recv(1 << 18)
    while isinstance(source, ssl.SSLSocket) and source.pending():
        data += source.recv(1 << 18)
    return data


@contextlib.contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    """Serve on a thread; whatever goes on at the end is ended."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        if isinstance(server, Proxy):
            server.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()
