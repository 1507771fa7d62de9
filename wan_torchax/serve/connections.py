"""Limits for connections: a deadline for request headers, and eviction of idle connections."""
import h11

from wan_torchax import private

HEADER_SECONDS = 20  # from the opening of a connection, or a request's first byte, to the end of its headers


def connection_class(limit: int) -> type:
    """uvicorn's connections with a deadline for headers; beyond `limit` connections, the oldest idle one is closed."""

    class Connection(private.h11_protocol()):
        deadline = None

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > limit and (idle := [other for other in self.connections if other.is_idle]):
                min(idle, key=lambda other: other.opened).transport.abort()
            self.opened = self.loop.time()
            self.set_deadline()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.set_deadline()

        def connection_lost(self, error) -> None:
            super().connection_lost(error)
            self.clear_deadline()

        @property
        def is_idle(self) -> bool:
            """No complete request has arrived since the last response."""
            return self.conn.their_state is h11.IDLE

        def set_deadline(self) -> None:
            if not self.is_idle:
                self.clear_deadline()
            elif self.deadline is None:
                self.deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

        def clear_deadline(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Connection
