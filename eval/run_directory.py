"""Where a training run keeps what the commands here read."""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """A training run's directory.

    Attributes:
        path: the directory.
        flags: settings by name, as in its flags.txt.
    """

    path: pathlib.Path
    flags: dict[str, str]

    @classmethod
    def open(cls, path: str | pathlib.Path) -> RunDirectory:
        """Reads the settings of a run.

        Raises:
            FileNotFoundError: if there is no such directory or it holds no flags.txt.
            ValueError: if its flags.txt is not UTF-8 text.
        """
        path = pathlib.Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"no run directory at {path}")
        if not (path / "flags.txt").is_file():
            hint = "; it holds several: name the folder of one" if (path / "heads.json").is_file() else ""
            raise FileNotFoundError(f"{path} is no run directory: it has no flags.txt{hint}")
        return cls(path, read_flags(path / "flags.txt"))

    @property
    def target(self) -> str:
        """Source of the target that the run trained for.

        Raises:
            ValueError: if the settings do not name it.
        """
        if not self.flags.get("target"):
            raise ValueError(f"{self.path / 'flags.txt'} names no `--target`")
        return self.flags["target"]

    @property
    def export(self) -> pathlib.Path:
        """Folder of the exported drafter.

        Raises:
            FileNotFoundError: if the run has not exported one yet.
        """
        folder = self.path / "export"
        if not folder.is_dir():
            raise FileNotFoundError(f"{self.path} holds no exported drafter yet: let the training run end first")
        return folder

    @property
    def results(self) -> pathlib.Path:
        """Folder of measured results."""
        return self.path / "eval"


def read_flags(path: pathlib.Path) -> dict[str, str]:
    """Settings of a flagfile by name; `--name` is "true", `--noname` is name "false".

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not UTF-8 text; the message names the file.
    """
    settings: dict[str, str] = {}
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    for line in text.splitlines():
        line = line.strip()
        if not line.startswith("-"):
            continue
        name, equals, value = line.lstrip("-").partition("=")
        if not equals:
            name, value = (name[2:], "false") if name.startswith("no") else (name, "true")
        settings[name] = value
    return settings
