"""What the stages of one model say to each other: frames on a stream socket, msgpack and the bytes of arrays.

A frame is a little-endian 32-bit length, an `Envelope` of that length, and its arrays one after the other. Nothing on
this wire can run code.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence

import msgspec

from data_plane.errors import StageLost

Bytes = bytes | bytearray | memoryview
_LENGTH = struct.Struct("<I")
_MOST_MESSAGE_BYTES = 1 << 20
_MOST_ARRAY_BYTES = 1 << 30
_MOST_ARRAYS = 16
_SILENT_SECONDS = 15


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """A stage's first word: the replica's token, by which the first stage knows it. Answered by Joined or Refused."""

    token: str


class Joined(msgspec.Struct, frozen=True, tag="joined", array_like=True):
    pass


class Open(msgspec.Struct, frozen=True, tag="open", array_like=True):
    """Load layers `start` to `stop` of a model. Answered by Opened or Refused."""

    model: str
    precision: str
    device: str
    threads: int
    max_model_len: int
    start: int
    stop: int
    here: int
    """Stages that share this machine's memory."""


class Opened(msgspec.Struct, frozen=True, tag="opened", array_like=True):
    """`room`: tokens that its memory has room for beside the weights."""

    room: int
    weight_bytes: int


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """Why it can't load, or isn't taken; `code` is a StartError's."""

    code: str
    message: str


class Cache(msgspec.Struct, frozen=True, tag="cache", array_like=True):
    """Have an empty KV cache of this size. Answered by Done, as are Release, Restore and Shut."""

    num_blocks: int
    block_size: int


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """Run its layers. Arrays: positions, slot_mapping, block_tables, cu_seqlens_q, seq_lens and logit_rows of a `Batch`
    of `tokens` and `sequences`, then x and the residual stream [2, T, H]. Answered by Done with the next pair, of
    `logit_rows` alone if `last`, or by Fault.
    """

    tokens: int
    sequences: int
    max_query_len: int
    last: bool


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """Move the weights to host memory and give the cache back."""


class Restore(msgspec.Struct, frozen=True, tag="restore", array_like=True):
    """Move the weights back."""


class Shut(msgspec.Struct, frozen=True, tag="shut", array_like=True):
    """Forget the model."""


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    pass


class Fault(msgspec.Struct, frozen=True, tag="fault", array_like=True):
    """What was asked raised an error of this kind; the stage stands as before."""

    kind: str
    message: str


Message = Hello | Joined | Open | Opened | Refused | Cache | Step | Release | Restore | Shut | Done | Fault


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message and the sizes in bytes of the arrays that follow it."""

    message: Message
    sizes: list[int] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class StageLink:
    """One end of a connection between two stages; one thread owns it. Methods raise StageLost when it is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            set_up(connection)

    def patience(self, seconds: float | None) -> None:
        """How long a send or a receive may take; None for as long as the other side lives."""
        self._socket.settimeout(seconds)

    def send(self, message: Message, arrays: Sequence[Bytes] = ()) -> None:
        views = [memoryview(array).cast("B") for array in arrays]
        head = _encoder.encode(Envelope(message, [view.nbytes for view in views]))
        try:
            self._socket.sendall(_LENGTH.pack(len(head)) + head)
            for view in views:
                self._socket.sendall(view)
        except OSError as error:
            raise _lost(error) from error

    def receive(self) -> tuple[Message, list[bytearray]]:
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > _MOST_MESSAGE_BYTES:
                raise StageLost(f"a stage sent a message of {length} bytes")
            envelope = _decoder.decode(self._exactly(length))
            if len(envelope.sizes) > _MOST_ARRAYS or not all(0 <= s <= _MOST_ARRAY_BYTES for s in envelope.sizes):
                raise StageLost("a stage sent arrays beyond all bounds")
            return envelope.message, [self._exactly(size) for size in envelope.sizes]
        except msgspec.DecodeError as error:
            raise StageLost("a stage sent what is no message") from error
        except OSError as error:
            raise _lost(error) from error

    def check(self) -> None:
        """Raises StageLost where the other side is gone; nothing may be under way."""
        try:
            readable = bool(select.select([self._socket], [], [], 0.0)[0])
        except (OSError, ValueError) as error:
            raise StageLost("a stage is gone") from error
        if readable:
            # it has nothing to say now, but that it ends
            raise StageLost("a stage ended")

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view, at = memoryview(buffer), 0
        while at < size:
            got = self._socket.recv_into(view[at:])
            if not got:
                raise StageLost("a stage ended")
            at += got
        return buffer


def set_up(connection: socket.socket) -> None:
    """Frames are sent as they are, and a host that is silent for long is given up."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_SECONDS // 3),
        ("TCP_KEEPINTVL", _SILENT_SECONDS // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", _SILENT_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _lost(error: OSError) -> StageLost:
    if isinstance(error, TimeoutError):
        return StageLost("a stage did not answer in time")
    return StageLost(f"a stage is gone: {error.strerror or type(error).__name__}")
