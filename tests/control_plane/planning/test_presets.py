from __future__ import annotations

import pytest

from control_plane.errors import Unprocessable
from control_plane.planning.admission import require_fit
from control_plane.planning.presets import SETTINGS, Preset, number, resolve, setting
from data_plane.__main__ import _parser as parser


@pytest.mark.parametrize(
    ("preset", "own", "wanted"),
    [
        (None, (), ()),
        (None, ("--threads=2",), ("--threads=2",)),
        ("chat", (), SETTINGS[Preset.CHAT]),
        ("chat", ("--threads=2",), (*SETTINGS[Preset.CHAT], "--threads=2")),
        ("chat", ("--max-waiting=9",), (*SETTINGS[Preset.CHAT][:2], "--max-waiting=9")),
        ("chat", ("--max-waiting", "9"), (*SETTINGS[Preset.CHAT][:2], "--max-waiting", "9")),
        ("edge", ("--no-prefix-cache",), (*SETTINGS[Preset.EDGE], "--no-prefix-cache")),
    ],
)
def test_own_arguments_go_before_a_presets(preset: str | None, own: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    assert resolve(preset, own) == wanted


@pytest.mark.parametrize("preset", list(Preset))
def test_the_engine_takes_every_setting_of_a_preset(preset: Preset) -> None:
    options = parser().parse_args(["serve", "m", *resolve(preset, ("--threads", "2"))])
    assert options.max_num_seqs == number(SETTINGS[preset], "--max-num-seqs")
    assert options.threads == 2


def test_the_last_of_several_counts_as_it_does_for_the_engine() -> None:
    arguments = ("--precision=float32", "--max-model-len", "2048", "--precision", "bfloat16")
    assert setting(arguments, "--precision") == "bfloat16"
    assert number(arguments, "--max-model-len") == 2048
    assert number(("--max-model-len=lots",), "--max-model-len") is None
    assert setting(("--precision",), "--precision") is None


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "arguments"),
    [
        ("llama-3.1-8b-instruct", "L4", 1, ()),
        ("llama-3.1-70b-instruct", "MI300X", 1, ()),
        ("llama-3.1-70b-instruct", "H100", 2, ()),
        ("llama-3.1-70b-instruct", None, 0, ()),
        ("llama-3.1-70b-instruct", "Z9000", 1, ()),
        ("my-own-900b", "L4", 1, ()),
        ("smollm2-135m-instruct", "cpu", 0, ("--max-model-len=8192",)),
    ],
)
def test_what_fits_or_isnt_known_is_let_through(
    model: str, gpu: str | None, gpus: int, arguments: tuple[str, ...]
) -> None:
    require_fit(model, gpu, gpus, arguments)


@pytest.mark.parametrize(
    ("model", "gpu", "arguments", "param", "says"),
    [
        ("llama-3.1-70b-instruct", "H100", (), "gpu", "is MI300X with 192 GB; of H100 it takes 2$"),
        ("llama-3.1-8b-instruct", "L4", ("--max-model-len=131072",), "gpu", "nearest that holds it is A100-40GB"),
        ("qwen3-8b", "l4", ("--precision=float32",), "gpu", "nearest that holds it is A100-40GB"),
        ("llama-3.1-70b-instruct", "RTX4090", ("--precision", "float32"), "gpu", "is MI300Xx2 with 384 GB$"),
        ("qwen3-8b", "L4", ("--max-model-len=900000",), "engine_args", "context must lie between 1 and"),
        ("qwen3-8b", "L4", ("--precision=packed",), "engine_args", "precision packed runs on CPUs"),
        ("qwen3-8b", "L4", ("--precision=int3",), "engine_args", "precision must be one of"),
    ],
)
def test_what_cannot_fit_is_refused_with_a_remedy(
    model: str, gpu: str, arguments: tuple[str, ...], param: str, says: str
) -> None:
    with pytest.raises(Unprocessable, match=says) as caught:
        require_fit(model, gpu, 1, arguments)
    assert caught.value.param == param
