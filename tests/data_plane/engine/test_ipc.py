"""The engine's end of the socket, at its borders: frames in pieces, many at once, too large, and a peer that dies."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from data_plane.engine.ipc import EngineSocket
from data_plane.engine.messages import (
    FRAME,
    MOST_FRAME_BYTES,
    Abort,
    Add,
    Counters,
    FromEngine,
    Output,
    Progress,
    SamplingParams,
    ToEngine,
    frame,
    from_engine_decoder,
)
from data_plane.engine.request import Sequence


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, EngineSocket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, EngineSocket(theirs)


def messages(count: int) -> list[ToEngine]:
    random_ = random.Random(4)
    made: list[ToEngine] = []
    for number in range(count):
        prompt = [random_.randrange(1 << 17) for _ in range(random_.choice((1, 50, 30_000)))]
        made.append(
            Add(f"r{number}", prompt, SamplingParams(max_tokens=5, seed=-(1 << 63), logit_bias={3: -1.5}), b"\0s")
        )
        made.append(Abort([f"r{number}", "é"]))
    return made


def test_frames_come_out_as_they_went_in_however_they_are_cut(pair: tuple[socket.socket, EngineSocket]) -> None:
    ours, engine = pair
    sent = messages(12)
    raw = b"".join(map(frame, sent))
    random_ = random.Random(5)

    def send() -> None:
        at = 0
        while at < len(raw):
            size = random_.choice((1, 3, 4, 1000, 200_000))
            ours.sendall(raw[at : at + size])
            at += size

    thread = threading.Thread(target=send)
    thread.start()
    got: list[ToEngine] = []
    while len(got) < len(sent):
        some = engine.receive(timeout_s=30)
        assert some is not None
        got += some
    thread.join()
    assert got == sent
    assert engine.receive(timeout_s=0) == []


def test_half_a_frame_waits_for_its_rest(pair: tuple[socket.socket, EngineSocket]) -> None:
    ours, engine = pair
    raw = frame(Abort(["a"]))
    ours.sendall(raw[:5])
    assert engine.receive(timeout_s=0) == []
    ours.sendall(raw[5:])
    assert engine.receive(timeout_s=0) == [Abort(["a"])]


def test_a_frame_over_the_bound_is_an_error_before_it_is_read(pair: tuple[socket.socket, EngineSocket]) -> None:
    ours, engine = pair
    ours.sendall(FRAME.pack(MOST_FRAME_BYTES + 1))
    with pytest.raises(ConnectionError, match="a frame of"):
        engine.receive(timeout_s=0)


@pytest.mark.parametrize("unread", [False, True])
def test_a_peer_that_is_gone(unread: bool, pair: tuple[socket.socket, EngineSocket]) -> None:
    """With something of ours unread the socket reports a reset instead of an end."""
    ours, engine = pair
    if unread:
        assert engine.send([Output("a", [1])])
    ours.close()
    assert engine.receive(timeout_s=0) is None
    assert engine.send([Output("a", [1])]) is False


def test_what_the_engine_says_survives_the_wire(pair: tuple[socket.socket, EngineSocket]) -> None:
    ours, engine = pair
    said: list[FromEngine] = [
        Output("a", [5], "stop", None, 16, 12.5),
        Progress(1, 2, 3, 4, 0.5, 6, 7, Counters(steps=8, generated_tokens=9)),
    ]
    assert engine.send(said)
    (size,) = FRAME.unpack(ours.recv(FRAME.size))
    assert from_engine_decoder.decode(ours.recv(size, socket.MSG_WAITALL)) == said


def test_a_blocks_hash_covers_all_before_it_and_whose_it_is() -> None:
    def hashes(tokens: list[int], salt: bytes = b"") -> list[bytes]:
        seq = Sequence("x", tokens, len(tokens), SamplingParams(max_tokens=1), salt)
        return seq.hash_blocks(len(tokens) // 8, 8)

    base = [*range(32)]
    chain = hashes(base)
    assert len({*chain}) == 4
    assert hashes(base[:16]) == chain[:2]
    changed = hashes([99, *base[1:]])
    assert not {*changed} & {*chain}
    assert hashes([*base[:24], 99, *base[25:]])[:3] == chain[:3]
    assert not {*hashes(base, b"a")} & {*hashes(base, b"b")}
    # equal blocks at other places of a text are other contexts
    assert len({*hashes([*base[:8]] * 3)}) == 3
