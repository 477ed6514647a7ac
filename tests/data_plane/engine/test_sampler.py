from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.engine.loader import Loaded
from data_plane.engine.messages import SamplingParams
from data_plane.engine.request import Sequence
from data_plane.engine.sampler import VERY_UNLIKELY, sample, uniform
from data_plane.models.batch import Array
from data_plane.models.registry import Model
from kernels import sampling
from tests.data_plane import tiny
from tests.data_plane.drive import GREEDY, Driver, changed, generate, load_model, new_core

SIZE = 3000


def sequence(params: SamplingParams, prompt: tuple[int, ...] = (), reply: tuple[int, ...] = ()) -> Sequence:
    return Sequence("s", [*prompt, *reply], len(prompt), params, b"")


def test_uniforms_are_in_range_and_spread() -> None:
    """Neighbouring seeds, choices and places share nothing: each of 100 bins gets its part, and no two are the same."""
    for vary in range(3):
        numbers = [uniform(*(n if place == vary else 7 for place in range(3))) for n in range(20_000)]
        assert all(0 <= number < 1 for number in numbers)
        assert len({*numbers}) == len(numbers)
        bins = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((bins - 200) ** 2 / 200).sum() < 160, "chi-square over 99 degrees of freedom"
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert all(0 <= uniform(seed, 0, 0) < 1 for seed in (-1, -(1 << 63), (1 << 63) - 1, 1 << 70))


def naive_distribution(logits: Array, params: SamplingParams) -> Array:
    """float64 probabilities by the definitions: top-k, then top-p of what is left, then min-p against the likeliest."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda id: (-p[id], id))
    kept = order[: params.top_k] if params.top_k else order
    nucleus: list[int] = []
    total, mass = sum(p[id] for id in kept), 0.0
    for id in kept:
        if mass >= params.top_p * total and nucleus:
            break
        nucleus.append(id)
        mass += p[id]
    kept = [id for id in nucleus if p[id] >= params.min_p * p[order[0]]]
    out = np.zeros(len(p))
    out[kept] = p[kept]
    shares: Array = out / out.sum()
    return shares


FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 40, 5000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.0]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    }
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A packed model with a vocabulary of its own size."""
    folder = tmp_path_factory.mktemp("model")
    tiny.make("llama", vocab_size=SIZE).save_pretrained(folder)
    return load_model(folder, precision="packed", threads=1).runner._model


@pytest.mark.parametrize("backend", ["numpy", "c"])
@settings(max_examples=60)
@given(filters=FILTERS, width=st.sampled_from([0.5, 3.0, 12.0]), data=st.integers(0, 1 << 30))
def test_draws_follow_the_filtered_distribution(
    backend: str, filters: dict[str, float], width: float, data: int, compiled: Model
) -> None:
    """Uniforms that sweep [0, 1) must hit each token as often as its probability says, and no other token ever."""
    rng = np.random.default_rng(data)
    logits = rng.normal(0, width, SIZE).astype(np.float32)
    params = SamplingParams(max_tokens=1, **filters)  # type: ignore[arg-type]
    expected = naive_distribution(logits, params)
    count = 64
    uniforms = (np.arange(count) + 0.5) / count
    draws = sampling.Draws(
        temperature=np.full(count, params.temperature, np.float32),
        top_k=np.full(count, params.top_k, np.int32),
        top_p=np.full(count, params.top_p, np.float32),
        min_p=np.full(count, params.min_p, np.float32),
        uniforms=uniforms,
    )
    draw = compiled.draw if backend == "c" else sampling.draw
    drawn = draw(np.tile(logits, (count, 1)), draws)
    # the order in which tokens are laid out: by id without filters, else the likeliest first
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    order = sorted(range(SIZE), key=lambda id: (-expected[id], id)) if filtered else [*range(SIZE)]
    sums = np.cumsum(expected[order])
    for token, u in zip(drawn, uniforms, strict=True):
        place = order.index(token)
        assert expected[token] > 0 or _on_the_border(logits, params, token)
        low, high = (sums[place - 1] if place else 0.0), sums[place]
        assert low - 2e-3 <= u <= high + 2e-3


def _on_the_border(logits: Array, params: SamplingParams, token: int) -> bool:
    """A token that float32 may let in where float64 does not: let in once the limits are a hair wider."""
    wider = changed(params, top_p=min(params.top_p + 1e-4, 1.0), min_p=max(params.min_p - 1e-4, 0.0))
    return bool(naive_distribution(logits, wider)[token] > 0)


def test_greedy_takes_the_likeliest_and_of_equals_the_first() -> None:
    logits = np.array([[0, 3, 3, 1], [5, 0, 0, 0]], np.float32)
    tokens, logprobs = sample(logits, [sequence(GREEDY)] * 2, sampling.draw)
    assert tokens == [1, 0]
    assert logprobs == [None, None]


def test_penalties_and_bias_by_their_formulas() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, 50).astype(np.float32)
    params = SamplingParams(
        max_tokens=1, temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25,
        logit_bias={7: 3.0, 9: -100.0},
    )  # fmt: skip
    seq = sequence(params, (1, 2, 2, 9), (2, 3, 3, 3))
    expected = logits.astype(np.float64)
    for token in (1, 2, 9, 3):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token, count in ((2, 1), (3, 3)):
        expected[token] -= 0.5 + 0.25 * count
    expected[7] += 3
    expected[9] -= 100
    row = logits[None].copy()
    tokens, _ = sample(row, [seq], sampling.draw)
    np.testing.assert_allclose(row[0], expected, rtol=1e-5)
    assert tokens == [int(expected.argmax())]


def test_a_row_is_drawn_the_same_whatever_stands_beside_it() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (20, 400)).astype(np.float32)
    settings = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0}, {"presence_penalty": 1.0}]
    seqs = [
        sequence(SamplingParams(max_tokens=1, seed=row, **settings[row % 6]), (1,), (2, 3))  # type: ignore[arg-type]
        for row in range(20)
    ]
    together, _ = sample(logits.copy(), seqs, sampling.draw)
    alone = [sample(logits[row : row + 1].copy(), [seq], sampling.draw)[0][0] for row, seq in enumerate(seqs)]
    assert together == alone


def test_logprobs_are_of_the_model_and_always_numbers() -> None:
    """Before penalties, bias and temperature; -9999 where a token is impossible, so that JSON can hold it."""
    logits = np.array([[2.0, 1.0, -math.inf, 0.0]], np.float32)
    params = SamplingParams(max_tokens=1, temperature=1, top_k=1, logprobs=4, logit_bias={2: 100.0, 0: -100.0})
    _, (logprob,) = sample(logits, [sequence(params)], sampling.draw)
    assert logprob is not None
    total = math.log(math.exp(2) + math.exp(1) + 1)
    assert logprob.token == 1
    assert logprob.logprob == pytest.approx(1 - total, abs=1e-5)
    assert [id for id, _ in logprob.top] == [0, 1, 3, 2]
    assert [value for _, value in logprob.top] == pytest.approx([2 - total, 1 - total, -total, VERY_UNLIKELY], abs=1e-5)
    json.dumps(logprob.top, allow_nan=False)


def test_a_seed_gives_the_same_text_in_any_batch_and_after_preemption(
    packed: Loaded, prompts: dict[str, list[int]]
) -> None:
    prompt = prompts["story"]
    wanted = [
        changed(GREEDY, max_tokens=40, temperature=0.9, seed=5, **more)
        for more in ({}, {"choice": 1}, {"top_p": 0.9}, {"top_k": 20, "repetition_penalty": 1.2})
    ]
    alone = [generate(new_core(packed), {"a": prompt}, params)["a"].tokens for params in wanted]
    assert alone[0] != alone[1]
    core = new_core(packed, tokens=224)
    driver = Driver(core)
    for number, params in enumerate(wanted):
        driver.add(f"r{number}", prompt, params)
    driver.add("other", prompts["question"])
    replies = driver.finish()
    assert core.scheduler.preemptions > 0
    assert [replies[f"r{number}"].tokens for number in range(4)] == alone
