from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from kernels import BackendUnavailable, UnknownBackend, dispatch, select

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGLE_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch._select.cache_clear()


def test_the_override_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_KERNELS", "reference")
    assert select(CPU).name == "reference"
    assert select(torch.device("cuda", 1)).name == "reference"


def test_triton_on_a_cpu_only_when_it_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_KERNELS", "triton")
    with pytest.raises(BackendUnavailable, match="serves cuda and hip devices, not cpu"):
        select(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select(CPU).name == "triton"


def test_cuda_is_served_by_triton() -> None:
    assert select(torch.device("cuda")).name == "triton"


def test_an_unknown_name_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_KERNELS", "cublas")
    with pytest.raises(UnknownBackend, match=r"INGLE_KERNELS is 'cublas'; it must be one of: .*reference.*triton"):
        select(CPU)


def test_a_device_that_no_backend_serves_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="no kernels for device type 'xla'"):
        select(torch.device("xla"))


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kernels.dispatch"):
        assert select(CPU) is select(CPU)
    (record,) = caplog.records
    assert record.message == "kernels_selected"
    assert vars(record)["device"] == "cpu"


def test_importing_the_package_loads_neither_torch_nor_triton() -> None:
    code = "import sys, kernels; sys.exit(any(name in sys.modules for name in ('torch', 'triton')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
