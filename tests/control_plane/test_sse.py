from __future__ import annotations

import pytest

from control_plane.gateway.sse import EventRelay, Usage

FRAMES = b'data: {"a": 1}\n\ndata: {"text": ": usage {}"}\n\n'
USAGE = b': usage {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 1000])
def test_frames_pass_unchanged_whatever_the_chunks_and_usage_is_taken_out(size: int) -> None:
    stream = FRAMES + USAGE + DONE
    relay = EventRelay()
    out = b"".join(relay.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + relay.finish()
    assert out == FRAMES + DONE
    assert relay.usage == Usage(3, 2, 1)


def test_a_whole_frame_is_passed_at_once_and_half_of_one_never() -> None:
    relay = EventRelay()
    assert relay.feed(b"data: 1\n\ndata: ") == b"data: 1\n\n"
    assert relay.feed(b"2\n") == b""
    assert relay.feed(b"\n") == b"data: 2\n\n"
    assert relay.finish() == b""


def test_what_follows_the_last_frame_of_a_whole_stream_is_passed() -> None:
    relay = EventRelay()
    assert relay.feed(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert relay.finish() == b"data: 2\n"


def test_a_frame_without_end_is_not_kept_without_bound() -> None:
    relay = EventRelay()
    passed = sum(len(relay.feed(b"x" * 65536)) for _ in range(40))
    assert passed >= 1024 * 1024


def test_a_usage_comment_that_makes_no_sense_is_dropped() -> None:
    relay = EventRelay()
    assert relay.feed(b": usage nonsense\n\n" + DONE) == DONE
    assert relay.usage is None
