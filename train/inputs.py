"""Files and names that flags give: looked at before any work, so that a wrong one costs no answers and no training."""

from __future__ import annotations

from pathlib import Path

from specjax.checkpoints.sources import KNOWN_WHEELS
from specjax.text.prompts import KINDS
from train.artifacts import RunError
from train.config import TrainConfig

_CONVERSATION_FILES = (".json", ".jsonl")
# Hub names may end like this, too.
_OTHER_FILES = (".arrow", ".csv", ".gz", ".parquet", ".txt", ".zip")


def check_inputs(config: TrainConfig) -> None:
    """Looks at all that flags name on this machine; opens no file and asks no hub.

    Raises:
        RunError: naming the flag, if a file or folder is not there or cannot be what the flag wants.
        ValueError: naming the flag, if a name is not one of those there are.
    """
    for flag, folder in (("run_dir", config.run_dir), ("data_dir", config.data_dir)):
        if folder is not None:
            check_directory(flag, Path(folder))
    for flag, path in (("text", config.text), ("frequency_text", config.frequency_text)):
        if path is not None:
            _check_text_file(flag, Path(path))
    if config.dataset is not None:
        _check_dataset(config.dataset)
    elif unknown := sorted(set(config.prompt_kind_list or ()) - set(KINDS)):
        raise ValueError(f"`--prompt_kinds` must be among {', '.join(KINDS)}; got {', '.join(map(repr, unknown))}")
    _check_target(config.target)


def check_directory(flag: str, folder: Path) -> None:
    """Whether a folder is there or can be made.

    Raises:
        RunError: naming the flag, if it or one above it is a file.
    """
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is not None and not there.is_dir():
        got = f"{folder} is a file" if there == folder else f"{there}, above {folder}, is a file"
        raise RunError(f"`--{flag}` must be a directory; {got}")


def _check_text_file(flag: str, path: Path) -> None:
    if not path.is_file():
        reason = "Is a directory" if path.is_dir() else "No such file"
        raise RunError(f"`--{flag}` must be a readable file; {path}: {reason}")


def _check_dataset(source: str) -> None:
    path = Path(source)
    if path.exists():
        return
    suffix = path.suffix.lower()
    beside_others = "/" not in source or path.parent.is_dir()
    is_local = source.startswith((".", "/", "~")) or source.count("/") > 1 or suffix in _CONVERSATION_FILES
    if is_local or (suffix in _OTHER_FILES and beside_others):
        raise RunError(f"`--dataset` must be a JSON(L) file, a folder or a hub name; {source}: No such file or folder")


def _check_target(source: str) -> None:
    name = source.removeprefix("pypi:")
    if name != source and name not in KNOWN_WHEELS:
        raise ValueError(f"`--target` must name a known wheel (pypi:{', pypi:'.join(KNOWN_WHEELS)}); got {source!r}")
    path = Path(source)
    # The plan needs no more than a config.json.
    if path.is_file() and path.suffix not in (".gguf", ".json"):
        raise RunError(f"`--target` must be a model folder, a .gguf file or a name; {source} is another file")
