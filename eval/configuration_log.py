"""The growing file of a measurement: whatever a configuration gave is on disk before the next one starts.

One JSON object a line: `{"kind": "settings", "digest": ..}` once for each set of settings, then for each configuration
its answers (`kind` "answer": rows in Spec-Bench's form) and, behind them, the row that makes it complete (`kind`
"configuration"). Every row carries the digest of its settings; rows of other settings stay untouched.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Names a set of settings: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


class ConfigurationLog:
    """Rows of one set of settings in a file that may hold others.

    Attributes:
        path: the file.
        digest: of the settings.
        rows: complete configurations, by `model_id`.
        answers: their answers' rows, by `model_id`.
    """

    def __init__(self, path: pathlib.Path, settings: Mapping[str, Any]) -> None:
        """Reads what is there. Half a line at the end, of a killed process, is cut off.

        Args:
            path: the file; it need not exist.
            settings: all that decides what a configuration's rows hold.

        Raises:
            ValueError: if a line is no row of such a file.
        """
        self.path = path
        self.digest = settings_digest(settings)
        self.rows: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {}
        is_known = False
        # By question: answers of a configuration that was never completed come once more when it is measured again.
        pending: dict[str, dict[str | int, dict[str, Any]]] = {}
        for row in self._read():
            if row.get("settings_digest") != self.digest:
                continue
            if row["kind"] == "settings":
                is_known = True
            elif row["kind"] == "answer":
                pending.setdefault(row["model_id"], {})[row["question_id"]] = row
            else:
                self.rows[row["model_id"]] = row
                self.answers[row["model_id"]] = list(pending.pop(row["model_id"], {}).values())
        if not is_known:
            self._append([{"kind": "settings", "settings_digest": self.digest, **settings}])

    def add(self, row: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        """Appends a configuration, and waits until it is on disk."""
        common = {"settings_digest": self.digest}
        answers = [{"kind": "answer", **common, **answer} for answer in answers]
        row = {"kind": "configuration", **common, **row}
        self._append([*answers, row])
        self.rows[row["model_id"]] = row
        self.answers[row["model_id"]] = answers

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        rows = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or row.get("kind") not in ("settings", "answer", "configuration"):
                raise ValueError(f"{self.path}:{number}: no row of such a log; use another `--output_dir`")
            rows.append(row)
        return rows
