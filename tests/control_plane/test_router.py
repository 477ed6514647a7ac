"""Routing and waiting: pure decisions."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from control_plane.gateway.line import Line, Ticket
from control_plane.gateway.router import MOST_OPEN, PREFIX_BYTES, Target, choose, prefix_of


def targets(count: int) -> list[Target]:
    return [Target(f"rep_{number}", f"127.0.0.1:{number}", "Bearer x") for number in range(count)]


def test_without_a_prefix_the_fewest_outstanding_tokens_win() -> None:
    a, b, c = targets(3)
    a.take(500)
    b.take(20)
    b.take(20)
    c.take(400)
    assert choose([a, b, c], (), None, 0.0) is b
    assert choose([a, b, c], {"rep_1"}, None, 0.0) is c
    b.give_back(20)
    b.give_back(20)
    a.give_back(500)
    assert (a.tokens, a.in_flight, b.tokens, b.in_flight) == (0, 0, 0, 0)
    assert choose([], (), None, 0.0) is None


def test_the_same_beginning_goes_to_the_same_replica_and_moves_only_with_it() -> None:
    five = targets(5)
    prefixes = [prefix_of(f"{number:04}".encode() * PREFIX_BYTES) for number in range(400)]
    homes = {prefix: choose(five, (), prefix, 0.0) for prefix in prefixes}
    spread = Counter(home.id for home in homes.values() if home)
    assert len(spread) == 5
    assert min(spread.values()) > 40
    four = five[1:]
    moved = [prefix for prefix in prefixes if choose(four, (), prefix, 0.0) is not homes[prefix]]
    assert all(homes[prefix] is five[0] for prefix in moved)
    assert prefix_of(b"x" * (PREFIX_BYTES - 1)) is None
    assert prefix_of(b"x" * PREFIX_BYTES) == prefix_of(b"x" * PREFIX_BYTES + b"another question")


def test_a_home_that_is_loaded_beyond_the_others_is_passed_by() -> None:
    three = targets(3)
    prefix = prefix_of(b"system prompt " * 30)
    home = choose(three, (), prefix, 0.0)
    assert home is not None
    home.take(2000)
    assert choose(three, (), prefix, 0.0) is home
    home.take(4000)
    assert choose(three, (), prefix, 0.0) is not home
    for other in three:
        if other is not home:
            other.take(6000)
    assert choose(three, (), prefix, 0.0) is home


def test_a_failing_replica_is_left_out_longer_each_time_and_comes_back_gradually() -> None:
    (target,) = targets(1)
    first = target.failed(100.0)
    assert not target.has_room(100.0 + first - 0.1)
    assert target.has_room(100.0 + first)
    target.take(1)
    assert not target.has_room(200.0)  # one at first
    target.served()
    assert target.has_room(200.0)
    assert target.failed(200.0) > first
    for _ in range(20):
        target.failed(300.0)
    assert target.failed(300.0) == 30.0
    for _ in range(11):
        target.served()
    assert (target.ramp, target.failures) == (0, 0)
    assert target.failed(400.0) == first


def test_a_full_replica_gets_what_it_had_and_slowly_more() -> None:
    (target,) = targets(1)
    for _ in range(10):
        target.take(1)
    target.full(5.0)
    assert target.capacity == 9
    assert not target.has_room(5.1)
    target.give_back(1)
    target.give_back(1)
    assert target.has_room(6.0)
    for _ in range(3):
        target.served()
    assert target.capacity == 12
    for _ in range(2 * MOST_OPEN):
        target.served()
    assert target.capacity == MOST_OPEN


@pytest.fixture
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def ticket(loop: asyncio.AbstractEventLoop, key_id: str, size: int = 1) -> Ticket:
    return Ticket("e", key_id, size, 1, None, frozenset(), loop.create_future())


def test_a_line_serves_keys_in_turn_and_each_in_order(loop: asyncio.AbstractEventLoop) -> None:
    line = Line()
    order: list[int] = []
    tickets = [ticket(loop, "greedy", 10) for _ in range(4)] + [ticket(loop, "b"), ticket(loop, "c"), ticket(loop, "b")]
    for one in tickets:
        line.push(one)
    assert (line.count, line.bytes) == (7, 43)
    (target,) = targets(1)
    places = 5

    def place(one: Ticket) -> Target | None:
        if len(order) == places:
            return None
        order.append(tickets.index(one))
        return target

    line.serve(place)
    assert order == [0, 4, 5, 1, 6]
    line.drop(tickets[2])
    line.drop(tickets[2])
    line.drop(tickets[0])
    assert (line.count, line.bytes) == (1, 10)
    line.fail(lambda: ValueError("gone"))
    assert isinstance(tickets[3].turn.exception(), ValueError)
    assert (line.count, line.bytes) == (0, 0)
