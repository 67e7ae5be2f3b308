"""heads.json after damage: one line that says which field is missing, and the file as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from specjax.checkpoints.published import PUBLISHED_CONFIGS
from train import heads


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "must hold a JSON object; got list"),
        ("{}", "`config` must be an object; got nothing: the file is damaged"),
        ('{"config": {}, "started": "2026-01-01", "heads": [1]}', "each of `heads` must be an object"),
    ],
)
def test_a_heads_file_of_another_form_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    (tmp_path / "heads.json").write_text(text)
    target = next(iter(PUBLISHED_CONFIGS))
    flags = [f"--run_dir={tmp_path}", f"--target={target}", "--heads=full", "--nomeasure", "--noprogress"]
    assert heads.main(flags) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'heads.json'}: {words}")
    assert (tmp_path / "heads.json").read_text() == text
    assert not (tmp_path / "error.txt").exists()
