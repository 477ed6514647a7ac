"""The engine's loop on a model whose text is known, so that any slip of its books shows as a wrong token."""

from __future__ import annotations

import random

from tests.data_plane.context_model import POISON, continuation, load_context_model
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
