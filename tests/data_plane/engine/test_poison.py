"""Requests that make the model fail or give no numbers end alone; only an engine that is broken itself ends."""

from __future__ import annotations

import numpy as np
import pytest

from data_plane.engine.loader import Loaded
from data_plane.models.batch import Array, Batch
from tests.data_plane.context_model import POISON, continuation, load_context_model
from tests.data_plane.drive import GREEDY, Driver, changed, generate, new_core
from tests.data_plane.engine.test_core import prompt

MANY = 60


def test_a_stream_of_poison_does_not_end_the_engine() -> None:
    core = new_core(load_context_model())
    driver = Driver(core)
    for number in range(MANY):
        driver.add(f"p{number}", [*prompt(5, number), POISON])
    driver.add("good", prompt(9, 1))
    replies = driver.finish()
    assert core.counters.step_errors > MANY
    assert {reply.finish for id, reply in replies.items() if id != "good"} == {"error"}
    assert replies["good"].tokens == continuation(prompt(9, 1), 64)


def test_poison_among_so_many_that_the_pool_is_full() -> None:
    core = new_core(load_context_model(tokens=400))
    driver = Driver(core)
    for number in range(MANY):
        driver.add(f"p{number}", [*prompt(5, number), POISON])
        driver.add(f"g{number}", prompt(9, number), changed(GREEDY, max_tokens=30))
    replies = driver.finish()
    for number in range(MANY):
        assert replies[f"p{number}"].finish == "error"
        assert replies[f"g{number}"].tokens == continuation(prompt(9, number), 30)


class Broken(RuntimeError):
    pass


def test_a_broken_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_context_model()
    core = new_core(loaded)

    def broken(*_: object) -> None:
        raise Broken

    monkeypatch.setattr(loaded.runner, "_model", broken)
    driver = Driver(core)
    for number in range(MANY):
        driver.add(f"r{number}", prompt(9, number))
    with pytest.raises(Broken):
        driver.finish()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("number", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("precision", ["packed", "float32"])
def test_no_numbers_end_one_request(
    precision: str, number: float, temperature: float, prompts: dict[str, list[int]],
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded: Loaded = request.getfixturevalue(precision)
    params = changed(GREEDY, max_tokens=4, temperature=temperature, logprobs=2)
    chosen = {id: prompts[id] for id in ("question", "list")}
    right = generate(new_core(loaded), chosen, params)
    model = loaded.runner._model
    target = prompts["story"]

    class Sick:
        def __getattr__(self, name: str) -> object:
            return getattr(model, name)

        def __call__(self, batch: Batch, kv: object) -> Array:
            logits = model(batch, kv)
            ends = batch.cu_seqlens_q[1:]
            for row, place in enumerate(batch.logit_rows):
                owner = int(np.searchsorted(ends, place, side="right"))
                if batch.seq_lens[owner] == len(target) + 1:
                    logits[row] = number
            return logits

    monkeypatch.setattr(loaded.runner, "_model", Sick())
    assert len(target) + 1 not in {len(tokens) + count for tokens in chosen.values() for count in range(5)}
    core = new_core(loaded)
    replies = generate(core, {**chosen, "sick": target}, params)
    assert (replies["sick"].finish, len(replies["sick"].tokens)) == ("error", 1)
    assert replies["sick"].error == "the model gave no numbers for this request"
    assert core.counters.step_errors == 0
    for id in chosen:
        assert (replies[id].tokens, replies[id].finish) == (right[id].tokens, "length")
