"""The engine's loop on a model whose text is known, so that any slip of its books shows as a wrong token."""

from __future__ import annotations

import random

import pytest

from data_plane.engine.core import EngineCore
from tests.data_plane.context_model import BLOCK, POISON, continuation, load_context_model
from tests.data_plane.drive import GREEDY, Driver, changed, generate, new_core


def prompt(length: int, seed: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(700, 1000) for _ in range(length)]


def test_a_row_of_the_block_table_holds_nothing_of_its_last_user() -> None:
    """A prefix hit starts a sequence in the middle, on a row that another has just left."""
    core = new_core(load_context_model())
    long, short, params = prompt(40, 1), prompt(10, 2), changed(GREEDY, max_tokens=4)
    for _ in range(2):
        assert generate(core, {"long": long}, params)["long"].tokens == continuation(long, 4)
        assert generate(core, {"short": short}, params)["short"].tokens == continuation(short, 4)


def test_poison_alone_fails() -> None:
    core = new_core(load_context_model())
    driver = Driver(core)
    prompts = {f"s{number}": prompt(5 + 7 * number, number) for number in range(8)}
    prompts["s3"][-1] = POISON
    prompts["s6"][2] = POISON
    for id, tokens in prompts.items():
        driver.add(id, tokens, changed(GREEDY, max_tokens=20))
    replies = driver.finish()
    for id, reply in replies.items():
        if id in ("s3", "s6"):
            assert (reply.finish, reply.tokens, reply.error) == ("error", [], "the engine failed on this request")
        else:
            assert (reply.finish, reply.tokens) == ("length", continuation(prompts[id], 20))
    assert core.counters.step_errors > 0
    assert generate(core, {"after": prompts["s0"]})["after"].tokens == continuation(prompts["s0"], 64)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("tokens", [4096, 400])
def test_64_at_once_of_different_lengths(tokens: int, prefix_cache: bool) -> None:
    """Each complete and right; blocks free and used make the pool after every step; all free at the end."""
    core = new_core(load_context_model(tokens=tokens, prefix_cache=prefix_cache))
    driver = Driver(core)
    shared = prompt(24, 99)
    prompts = {f"s{n}": [*shared[: n % 3 * 12], *prompt(1 + n * 7 % 90, n)] for n in range(64)}
    for n, (id, tokens_) in enumerate(prompts.items()):
        driver.add(id, tokens_, changed(GREEDY, max_tokens=1 + n * 5 % 60))
    while core.scheduler.has_work:
        progress = driver.step()
        assert progress.blocks_used == core.pool.num_used
        assert core.pool.num_used + core.pool.num_free == core.pool.num_blocks
    assert core.pool.num_free == core.pool.num_blocks
    for n, (id, tokens_) in enumerate(prompts.items()):
        assert driver.replies[id].tokens == continuation(tokens_, 1 + n * 5 % 60)
        assert driver.replies[id].finish == "length"
    assert (core.scheduler.preemptions > 0) == (tokens == 400)


@pytest.mark.parametrize("seed", range(15))
def test_whatever_comes_and_goes_every_text_is_right(seed: int) -> None:
    """Arrivals, departures and poison at random, in a pool too small for them, with and without the prefix cache."""
    random_ = random.Random(seed)
    core = new_core(load_context_model(tokens=400, prefix_cache=seed % 3 > 0))
    driver = Driver(core)
    wanted: dict[str, tuple[list[int], int]] = {}
    poisoned: set[str] = set()
    families = [prompt(80, family) for family in range(3)]
    for turn in range(500):
        for _ in range(random_.choice((0, 0, 1, 3)) if turn < 400 else 0):
            id, count = f"r{len(wanted)}", random_.randrange(1, 50)
            own = prompt(random_.randrange(1, 30), random_.randrange(10**6))
            tokens = [*random_.choice(families)[: random_.choice((0, 8, 24, 40, 77))], *own]
            if random_.random() < 0.03:
                tokens[-1] = POISON
                poisoned.add(id)
            wanted[id] = (tokens, count)
            driver.add(id, tokens, changed(GREEDY, max_tokens=count), salt=random_.choice((b"", b"", b"tenant")))
        if random_.random() < 0.2:
            leaving = [id for id, reply in driver.replies.items() if reply.finish is None]
            driver.abort(*random_.sample(leaving, min(len(leaving), 2)), "unknown")
        driver.step()
        assert core.pool.num_used == blocks_held(core)
    driver.finish()
    finished = 0
    for id, (tokens, count) in wanted.items():
        reply = driver.replies[id]
        if id in poisoned:
            assert reply.tokens == []
            assert reply.finish in ("error", None)
        else:
            right = continuation(tokens, count)
            assert reply.tokens == right[: len(reply.tokens)]
            assert reply.finish in ("length", None)
            assert reply.finish is None or reply.tokens == right
            finished += reply.finish == "length"
    assert finished > len(wanted) // 3
    assert core.scheduler.preemptions > 0
    assert (core.scheduler.cached_tokens > 0) == (seed % 3 > 0)


def blocks_held(core: EngineCore) -> int:
    return len({block for seq in core.scheduler.running for block in seq.blocks})


def test_a_tenants_prefix_is_not_found_by_another() -> None:
    core = new_core(load_context_model())
    driver = Driver(core)
    tokens = prompt(50, 1)
    driver.add("mine", tokens, salt=b"me")
    driver.finish()
    driver.add("theirs", tokens, salt=b"them")
    driver.add("mine again", tokens, salt=b"me")
    replies = driver.finish()
    assert replies["theirs"].cached_tokens == 0
    assert replies["mine again"].cached_tokens == 50 // BLOCK * BLOCK
    assert replies["theirs"].tokens == replies["mine again"].tokens == continuation(tokens, 64)


def test_what_ends_a_reply() -> None:
    core = new_core(load_context_model(tokens=128))
    tokens = prompt(20, 3)
    right = continuation(tokens, 128)
    driver = Driver(core)
    driver.add("one", tokens, changed(GREEDY, max_tokens=1))
    driver.add("token", tokens, changed(GREEDY, stop_token_ids=(right[5],)))
    driver.add("room", tokens, changed(GREEDY, max_tokens=1000))
    driver.add("eos", tokens, changed(GREEDY, logit_bias={2: 100.0}, ignore_eos=False))
    driver.add("no eos", tokens, changed(GREEDY, max_tokens=3, logit_bias={2: 100.0}))
    replies = driver.finish()
    assert (replies["one"].tokens, replies["one"].finish) == (right[:1], "length")
    assert (replies["token"].tokens, replies["token"].finish) == (right[: right.index(right[5]) + 1], "stop")
    assert (replies["room"].tokens, replies["room"].finish) == (right[: 128 - 20], "length")
    assert (replies["eos"].tokens, replies["eos"].finish) == ([2], "stop")
    assert (replies["no eos"].tokens, replies["no eos"].finish) == ([2, 2, 2], "length")


def test_counters_agree_with_what_ran() -> None:
    core = new_core(load_context_model())
    tokens = prompt(40, 5)
    generate(core, {"first": tokens, "other": prompt(9, 6)}, changed(GREEDY, max_tokens=10))
    generate(core, {"again": tokens}, changed(GREEDY, max_tokens=10))
    counters = core.counters
    cached = 39 // BLOCK * BLOCK
    assert (counters.prompt_tokens, counters.cached_tokens) == (40 + 9 + 40 - cached, cached)
    assert (counters.prefix_queries, counters.generated_tokens, counters.step_errors) == (89, 30, 0)
