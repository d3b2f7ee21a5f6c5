"""A storage node's first words to the others: that it is there, and where.

Whoever asks them what they hold hears of it from them, so a node joins by being started with the
address of any other.
"""

from collections.abc import Mapping

import zmq

from serving.kv import storage_wire, wire
from serving.kv.cluster_key import ClusterKey


class Greeter:
    """Tells `others`, name -> address, of the node `name` until each of them has answered.

    Call `greet` again and again, every second or so, and `close` at the end.
    """

    every_s = 1.0

    def __init__(
        self, name: str, address: str, others: Mapping[str, str], key: ClusterKey | None
    ) -> None:
        self._message = wire.encode(storage_wire.Meet(1, name, address))
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._sockets = {
            other: wire.connect(self._context, at, key) for other, at in others.items()
        }

    @property
    def waiting_for(self) -> list[str]:
        """Those that have not answered yet."""
        return list(self._sockets)

    def greet(self) -> None:
        """Tell those that have not answered; waits for nobody."""
        for other, socket in list(self._sockets.items()):
            if socket.poll(0):
                socket.close()
                del self._sockets[other]
            elif socket.poll(0, zmq.POLLOUT):
                socket.send(self._message, zmq.NOBLOCK)

    def close(self) -> None:
        """Give up those that have not answered."""
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
        self._context.term()
