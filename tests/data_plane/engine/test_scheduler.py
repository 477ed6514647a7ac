"""The scheduler as a pure unit: no model, no clock; tokens are numbers that the test makes up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.engine.kv_cache import BlockPool
from data_plane.engine.messages import SamplingParams
from data_plane.engine.request import Sequence
from data_plane.engine.scheduler import Scheduler, SchedulerLimits

SIZE = 8


def make(blocks: int = 64, **limits: Any) -> Scheduler:
    settings = {"max_num_seqs": 8, "max_batched_tokens": 64, "prefill_chunk": 32, **limits}
    return Scheduler(BlockPool(blocks), SchedulerLimits(block_size=SIZE, **settings))


def sequence(id: str, length: int, *, first: int = 0, salt: bytes = b"") -> Sequence:
    """A prompt of `length` tokens first, first + 1, …: equal firsts share their prefix."""
    tokens = list(range(first, first + length))
    return Sequence(id, tokens, length, SamplingParams(max_tokens=1000), salt)


def step(scheduler: Scheduler) -> dict[str, int]:
    """One step: what was planned, by id. A sequence that is up to date gets a token."""
    plan = scheduler.schedule()
    for item in plan:
        samples = item.samples
        scheduler.computed(item)
        if samples:
            item.seq.tokens.append(10_000 + item.seq.num_tokens)
            item.seq.reported = True
    scheduler.pool.check()
    return {item.seq.id: item.count for item in plan}


def test_a_long_prompt_is_cut_into_chunks_and_the_last_one_samples() -> None:
    scheduler = make()
    a, b = sequence("a", 5, first=1000), sequence("b", 80)
    scheduler.add(a)
    assert step(scheduler) == {"a": 5}
    scheduler.add(b)
    assert [step(scheduler) for _ in range(4)] == [
        {"a": 1, "b": 32},
        {"a": 1, "b": 32},
        {"a": 1, "b": 16},
        {"a": 1, "b": 1},
    ]
    assert (a.num_generated, b.num_generated) == (5, 2)


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    scheduler = make()
    scheduler.add(sequence("a", 80))
    # a chunk is for the sake of others; there are none
    assert [step(scheduler) for _ in range(3)] == [{"a": 64}, {"a": 16}, {"a": 1}]


def test_a_step_keeps_to_its_budget_and_what_runs_goes_before_what_waits() -> None:
    scheduler = make(max_batched_tokens=16, prefill_chunk=16)
    for number in range(4):
        scheduler.add(sequence(f"s{number}", 10, first=1000 * number))
    assert [step(scheduler) for _ in range(4)] == [
        {"s0": 10, "s1": 6},
        {"s0": 1, "s1": 4, "s2": 10, "s3": 1},
        {"s0": 1, "s1": 1, "s2": 1, "s3": 9},
        {"s0": 1, "s1": 1, "s2": 1, "s3": 1},
    ]


def test_at_most_as_many_run_as_there_are_rows() -> None:
    scheduler = make(max_num_seqs=2)
    for number in range(5):
        scheduler.add(sequence(f"s{number}", 4, first=1000 * number))
    assert [*step(scheduler)] == ["s0", "s1"]
    assert (len(scheduler.running), scheduler.num_waiting) == (2, 3)
    scheduler.finish(scheduler.running[0])
    assert [*step(scheduler)] == ["s1", "s2"]
    assert len({seq.row for seq in scheduler.running}) == 2


def test_a_prompt_waits_while_another_computes_its_prefix_and_then_reuses_it() -> None:
    scheduler = make()
    scheduler.add(sequence("first", 48))
    scheduler.add(sequence("twin", 48))
    scheduler.add(sequence("other", 8, first=5000))
    assert step(scheduler) == {"first": 48, "other": 8}
    twin = scheduler.get("twin")
    assert twin is not None
    # five blocks of six: the last token always runs, because its logits are wanted
    assert step(scheduler) == {"first": 1, "other": 1, "twin": 8}
    assert twin.cached_tokens == 40
    assert scheduler.cached_tokens == 40


def test_a_prompt_does_not_wait_for_one_that_shares_nothing_new() -> None:
    scheduler = make()
    scheduler.add(sequence("first", 20))
    step(scheduler)
    scheduler.add(sequence("twin", 20))
    # both full blocks are computed; what is left of `first` is no block
    assert step(scheduler) == {"first": 1, "twin": 4}


@pytest.mark.parametrize("way", ["finish", "preempt"])
def test_a_prompt_that_waited_for_a_prefix_goes_on_alone_when_its_owner_leaves(way: str) -> None:
    scheduler = make(max_batched_tokens=16, prefill_chunk=16)
    owner = sequence("owner", 64)
    scheduler.add(owner)
    scheduler.add(sequence("twin", 64))
    assert step(scheduler) == {"owner": 16}
    assert step(scheduler) == {"owner": 16}
    if way == "finish":
        scheduler.finish(owner)
    else:
        scheduler._preempt(owner)
        scheduler.finish(owner)
    assert step(scheduler) == {"twin": 16}
    twin = scheduler.get("twin")
    assert twin is not None
    assert twin.cached_tokens == 32


def test_tenants_do_not_share() -> None:
    scheduler = make()
    scheduler.add(sequence("mine", 32, salt=b"me"))
    step(scheduler)
    scheduler.add(sequence("theirs", 32, salt=b"them"))
    assert step(scheduler) == {"mine": 1, "theirs": 32}


def test_without_the_prefix_cache_nobody_waits_and_nothing_is_kept() -> None:
    scheduler = make(prefix_cache=False)
    scheduler.add(sequence("first", 24))
    scheduler.add(sequence("twin", 24))
    assert step(scheduler) == {"first": 24, "twin": 24}
    assert scheduler.pool.num_cached == 0


def test_the_latest_gives_way_and_comes_back_first() -> None:
    scheduler = make(blocks=6, prefix_cache=False)
    for number in range(4):
        scheduler.add(sequence(f"s{number}", 8, first=1000 * number))
    # a block more for each that runs is kept free, so s3 waits
    assert [*step(scheduler)] == ["s0", "s1", "s2"]
    for _ in range(8):
        assert step(scheduler) == {"s0": 1, "s1": 1, "s2": 1}
    assert step(scheduler) == {"s0": 1, "s1": 1}, "the 17th token needs a third block, and s2 gave its two"
    assert scheduler.preemptions == 1
    s2 = scheduler.get("s2")
    assert s2 is not None
    assert (s2.num_computed, s2.blocks, s2.row, s2.num_generated) == (0, [], -1, 9)
    for seq in [*scheduler.running]:
        scheduler.finish(seq)
    # it goes before s3, and computes its own reply again, not only its prompt
    assert [*step(scheduler).items()] == [("s2", 17), ("s3", 8)]


def test_one_sequence_may_fill_the_whole_pool() -> None:
    scheduler = make(blocks=4)
    a, b = sequence("a", 30), sequence("b", 20, first=500)
    scheduler.add(a)
    scheduler.add(b)
    while a.num_tokens < 4 * SIZE:
        step(scheduler)
    step(scheduler)
    assert scheduler.pool.num_used == 4
    scheduler.finish(a)
    assert [*step(scheduler)] == ["b"]


def test_after_a_failure_each_runs_alone_and_the_ended_are_skipped() -> None:
    scheduler = make()
    for number in range(4):
        scheduler.add(sequence(f"s{number}", 8, first=1000 * number))
    failed = [item.seq.id for item in scheduler.schedule()]
    scheduler.isolate(failed)
    s1 = scheduler.get("s1")
    assert s1 is not None
    scheduler.finish(s1)
    assert [step(scheduler) for _ in range(4)] == [{"s0": 8}, {"s2": 8}, {"s3": 8}, {"s0": 1, "s2": 1, "s3": 1}]


@pytest.mark.parametrize("state", ["waiting", "running", "deferred", "preempted", "isolated", "unknown"])
def test_finishing_frees_everything_in_any_state(state: str) -> None:
    scheduler = make(max_batched_tokens=16, prefill_chunk=16)
    seq = sequence("x", 40)
    if state == "deferred":
        scheduler.add(sequence("owner", 40))
        step(scheduler)
    if state != "unknown":
        scheduler.add(seq)
    if state in ("running", "preempted", "isolated"):
        step(scheduler)
        assert seq.row >= 0
    if state == "deferred":
        step(scheduler)
        assert seq.row < 0
    if state == "preempted":
        scheduler._preempt(seq)
    if state == "isolated":
        scheduler.isolate(["x"])
    scheduler.finish(seq)
    scheduler.finish(seq)
    assert scheduler.get("x") is None
    for other in [*scheduler.running]:
        scheduler.finish(other)
    assert not scheduler.has_work
    assert scheduler.schedule() == []
    assert scheduler.pool.num_used == 0
    assert sorted(scheduler._rows) == list(range(8))
    assert not scheduler._filling


def test_a_long_queue_of_ended_sequences_is_swept() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(sequence("busy", 8))
    step(scheduler)
    for number in range(1000):
        seq = sequence(f"s{number}", 8)
        scheduler.add(seq)
        scheduler.finish(seq)
    assert len(scheduler._queue) < 100


Op = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 60), st.integers(0, 3)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("fail"), st.just(0), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
)


@settings(max_examples=150)
@given(st.lists(Op, min_size=5, max_size=40), st.sampled_from([8, 9, 20]), st.booleans())
def test_whatever_comes_every_sequence_ends_and_the_books_balance(
    ops: list[tuple[str, int, int]], blocks: int, prefix_cache: bool
) -> None:
    """Adds, aborts, failed steps and finishes in any order; each sequence stops after its own number of tokens."""
    scheduler = make(blocks, prefix_cache=prefix_cache, max_num_seqs=4, max_batched_tokens=24, prefill_chunk=16)
    live: dict[str, Sequence] = {}
    names: list[str] = []

    def turn() -> None:
        plan = scheduler.schedule()
        assert plan or not live, "work is left, and nothing runs"
        assert len({item.seq.id for item in plan}) == len(plan)
        assert sum(item.count for item in plan) <= 24
        for item in plan:
            seq, samples = item.seq, item.samples
            assert 0 < item.count <= seq.num_tokens - seq.num_computed
            assert len(seq.blocks) * SIZE >= seq.num_computed + item.count
            scheduler.computed(item)
            if samples:
                seq.tokens.append(7)
                if seq.num_generated >= 1 + seq.prompt_len % 5:
                    scheduler.finish(seq)
                    del live[seq.id]
        scheduler.pool.check()
        held = {block for seq in scheduler.running for block in seq.blocks}
        assert scheduler.pool.num_used == len(held)

    for kind, number, first in ops:
        if kind == "add":
            seq = sequence(f"s{len(names)}", number, first=first)
            names.append(seq.id)
            live[seq.id] = seq
            scheduler.add(seq)
        elif kind == "abort" and names:
            ended = live.pop(names[number % len(names)], None)
            if ended is not None:
                scheduler.finish(ended)
        elif kind == "fail":
            scheduler.isolate([item.seq.id for item in scheduler.schedule()])
        else:
            for _ in range(number):
                turn()
    for _ in range(500):
        if not live:
            break
        turn()
    assert not live
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0
    assert sorted(scheduler._rows) == [0, 1, 2, 3]
    assert not scheduler._filling
