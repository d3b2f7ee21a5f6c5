"""Messages between nodes as frames of bytes, and back.

The first frame is a msgpack header: who sends what to whom, and the message itself with a place
holder for each array. Arrays follow as frames of their own, which nobody copies or parses. What
comes in is checked against the types of the message, so nothing runs because it was received.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from serving.nodes import messages
from serving.nodes.messages import Message
from serving.nodes.node import NodeId

WIRE_VERSION = 1
"""Of the envelope; messages are compared by the version of the code when a node joins."""

_ARRAY_KINDS = "biuf"
_FRAMES_MAX = 4096

Frame = bytes | memoryview


class WireError(ValueError):
    """Frames that are no message."""


class _Envelope(msgspec.Struct, array_like=True):
    version: int
    source: tuple[str, str]
    address: str
    destination: tuple[str, str]
    kind: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A message with where it comes from and where it goes.

    `address` is where the process of `source` listens.
    """

    source: NodeId
    address: str
    destination: NodeId
    message: Message


class Codec:
    """Encodes and decodes on one thread.

    Args:
        kinds: the types of messages that may cross; those that only a driver sends to its own
            nodes are left out.
    """

    def __init__(self, kinds: Iterable[type] = messages.WIRE_MESSAGES) -> None:
        self._frames: Sequence[Frame] = ()
        self._envelopes = msgspec.msgpack.Decoder(_Envelope)
        self._decoders = {
            kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=self._array) for kind in kinds
        }

    def encode(self, parcel: Parcel) -> list[Frame]:
        """The frames of a message.

        Raises:
            WireError: it is not of a kind that crosses.
        """
        kind = type(parcel.message).__name__
        if kind not in self._decoders:
            raise WireError(f"{kind} is no message that leaves its process")
        arrays: list[Frame] = []

        def place(value: object) -> tuple[int, str, tuple[int, ...]]:
            if not isinstance(value, np.ndarray):
                raise WireError(f"{kind} holds a {type(value).__name__}, which does not travel")
            data = np.ascontiguousarray(value)
            arrays.append(data.reshape(-1).view(np.uint8).data if data.size else b"")
            return len(arrays), data.dtype.str, data.shape

        encoder = msgspec.msgpack.Encoder(enc_hook=place)
        source, destination = parcel.source, parcel.destination
        body = encoder.encode(parcel.message)
        envelope = _Envelope(
            WIRE_VERSION,
            (source.role, source.name),
            parcel.address,
            (destination.role, destination.name),
            kind,
            msgspec.Raw(body),
        )
        return [msgspec.msgpack.encode(envelope), *arrays]

    def decode(self, frames: Sequence[Frame]) -> Parcel:
        """The message in frames; its arrays are views of them.

        Raises:
            WireError: they hold none, or one of another version.
        """
        try:
            if not 1 <= len(frames) <= _FRAMES_MAX:
                raise WireError(f"{len(frames)} frames; expected 1 to {_FRAMES_MAX}")
            envelope = self._envelopes.decode(frames[0])
            if envelope.version != WIRE_VERSION:
                raise WireError(f"version {envelope.version} of messages; expected {WIRE_VERSION}")
            decoder = self._decoders.get(envelope.kind)
            if decoder is None:
                raise WireError(f"{envelope.kind!r} is no message that crosses")
            self._frames = frames
            message: Any = decoder.decode(envelope.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireError(str(error)) from None
        finally:
            self._frames = ()
        return Parcel(
            NodeId(*envelope.source), envelope.address, NodeId(*envelope.destination), message
        )

    def _array(self, wanted: type, value: Any) -> object:
        """The array that a place holder stands for."""
        if wanted is not np.ndarray:
            raise WireError(f"{wanted} does not travel")
        index, dtype, shape = msgspec.convert(value, tuple[int, str, tuple[int, ...]], strict=True)
        if not 1 <= index < len(self._frames):
            raise WireError(f"array {index} of {len(self._frames) - 1} frames")
        if len(dtype) != 3 or dtype[1] not in _ARRAY_KINDS or min(shape, default=0) < 0:
            raise WireError(f"an array of {dtype!r} and {shape} is none that crosses")
        return np.frombuffer(self._frames[index], np.dtype(dtype)).reshape(shape)
