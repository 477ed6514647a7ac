"""How likely a prompt's own tokens were, against transformers, however the prompt was cut up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from data_plane.engine.loader import Loaded
from data_plane.engine.scheduler import MOST_SCORED
from tests.data_plane.drive import GREEDY, Driver, changed, new_core

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Prompts = dict[str, list[int]]
SCORED = changed(GREEDY, max_tokens=3, prompt_logprobs=3)


@pytest.fixture(scope="module")
def right(reference: LlamaForCausalLM, prompts: Prompts) -> dict[str, list[float]]:
    """The log-probability of each token but the first."""
    from tests.data_plane.reference import logits_of

    return {
        id: logits_of(reference, prompt)[:-1].log_softmax(-1)[range(len(prompt) - 1), prompt[1:]].tolist()
        for id, prompt in prompts.items()
    }


@pytest.mark.parametrize("precision", ["packed", "float32"])
def test_against_another_implementation(
    precision: str, right: dict[str, list[float]], prompts: Prompts, request: pytest.FixtureRequest
) -> None:
    loaded: Loaded = request.getfixturevalue(precision)
    assert len(prompts["long"]) > 3 * MOST_SCORED
    driver = Driver(new_core(loaded, prefill_chunk=48))
    # what was computed before has no logits: the prefix cache must not be used
    driver.add("first", prompts["long"])
    driver.finish()
    for id, prompt in prompts.items():
        driver.add(id, prompt, SCORED)
        driver.add(f"plain {id}", prompt, changed(SCORED, prompt_logprobs=-1))
    replies = driver.finish()
    for id, prompt in prompts.items():
        scores = replies[id].prompt_logprobs
        assert [score.token for score in scores] == prompt[1:]
        off = np.abs(np.array([score.logprob for score in scores]) - right[id])
        # weights and activations of few bits are off by a little everywhere, and by more where little is likely
        mean, most = (0.1, 1.0) if precision == "packed" else (1e-3, 5e-3)
        assert off.mean() < mean
        assert off.max() < most
        assert all(len(score.top) == 3 and score.top[0][1] >= score.logprob for score in scores)
        assert replies[id].tokens == replies[f"plain {id}"].tokens
        assert replies[f"plain {id}"].prompt_logprobs == []


def test_after_preemption_they_are_the_same(packed: Loaded, prompts: Prompts) -> None:
    chosen = {id: prompts[id] for id in ("question", "story", "code", "list")}
    alone = {}
    for id, prompt in chosen.items():
        driver = Driver(new_core(packed))
        driver.add(id, prompt, SCORED)
        alone[id] = driver.finish()[id].prompt_logprobs
    core = new_core(packed, tokens=176)
    driver = Driver(core)
    for id, prompt in chosen.items():
        driver.add(id, prompt, changed(SCORED, max_tokens=100))
    assert {id: reply.prompt_logprobs for id, reply in driver.finish().items()} == alone
    assert core.scheduler.preemptions > 0
