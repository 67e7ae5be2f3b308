"""What commands load, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
from typing import Any

import pytest

from eval.loading import format_layers, load_command, load_system, parse_layers
from specjax.drafters.eagle3 import Eagle3Drafter
from specjax.drafters.ngram import NgramDrafter


def load(**given: Any) -> Any:
    arguments = {"run": None, "target": None, "drafters": [], "ngram": False}
    return load_command(**arguments | given)


def test_run_directory_gives_target_and_drafter(run_directory: pathlib.Path) -> None:
    target, systems = load(run=str(run_directory), ngram=True)
    assert target.config.vocab_size == target.tokenizer.vocab_size
    assert list(systems) == ["low_rank", "ngram"]
    trained = systems["low_rank"]
    assert isinstance(trained.drafter, Eagle3Drafter)
    assert trained.params["embed_tokens"] is target.params["embed_tokens"]
    assert trained.template_digest == target.chat_template.digest
    assert trained.notes == ()
    assert isinstance(systems["ngram"].drafter, NgramDrafter)


def test_drafters_have_names_of_their_own(run_directory: pathlib.Path) -> None:
    export = run_directory / "export"
    model = str(run_directory / "model")
    _, systems = load(target=model, drafters=[str(export), f"other={export}"])
    assert list(systems) == ["export", "other"]
    with pytest.raises(ValueError, match="must give each drafter its own name"):
        load(target=model, drafters=[str(export), str(export)])
    with pytest.raises(ValueError, match="must give each drafter its own name"):
        load(target=model, drafters=[f"plain={export}"])
    with pytest.raises(ValueError, match="must be FOLDER or NAME=FOLDER"):
        load(target=model, drafters=[f"={export}"])
    with pytest.raises(ValueError, match="must be FOLDER or NAME=FOLDER; got 'a='"):
        load(target=model, drafters=["a="])
    for empty in ("", " "):
        with pytest.raises(ValueError, match="`--drafter` must not be empty"):
            load(target=model, drafters=[empty])
    with pytest.raises(FileNotFoundError, match="no exported drafter at"):
        load(target=model, drafters=["a=/none"])


def test_something_must_be_named(run_directory: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="`--run` or `--target` must be given"):
        load()


def test_a_drafter_of_another_shape_is_refused(run_directory: pathlib.Path, chat_target: Any) -> None:
    export = run_directory / "export"
    wider = dataclasses.replace(chat_target, config=dataclasses.replace(chat_target.config, hidden_size=24))
    with pytest.raises(ValueError, match=r"`target_hidden_size` of the drafter in .* must be the target's 24; got 16"):
        load_system("slim", export, wider)
    larger = dataclasses.replace(chat_target, config=dataclasses.replace(chat_target.config, vocab_size=400))
    with pytest.raises(ValueError, match=r"`vocab_size` of the drafter in .* must be the target's 400"):
        load_system("slim", export, larger)


def test_case_e6_a_drafter_of_other_weights_or_another_template_is_told(
    run_directory: pathlib.Path, chat_target: Any, tmp_path: pathlib.Path
) -> None:
    (note,) = load_system("slim", run_directory / "export", chat_target).notes
    assert "slim was trained for other weights" in note
    folder = shutil.copytree(run_directory / "export", tmp_path / "export")
    fields = json.loads((folder / "config.json").read_text())
    fields["specjax"]["target"] = {"template_digest": "else"}
    (folder / "config.json").write_text(json.dumps(fields))
    system = load_system("slim", folder, chat_target)
    assert (system.template_digest, system.notes) == ("else", ())
    del fields["specjax"]["target"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert load_system("slim", folder, chat_target).template_digest is None


@pytest.mark.parametrize("field", ["digest", "template_digest"])
def test_a_digest_that_is_no_text_is_named(
    run_directory: pathlib.Path, chat_target: Any, tmp_path: pathlib.Path, field: str
) -> None:
    folder = shutil.copytree(run_directory / "export", tmp_path / "export")
    fields = json.loads((folder / "config.json").read_text())
    fields["specjax"]["target"] = {field: 5}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"config\.json: `specjax\.target\.{field}` must be a text; got 5"):
        load_system("slim", folder, chat_target)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0-3", (0, 1, 2, 3)), ("0-1,4,6-7", (0, 1, 4, 6, 7)), (" 2 , 5 - 6 ", (2, 5, 6)), ("0,1,2", (0, 1, 2))],
)
def test_layers_are_read_as_ranges_and_written_back(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers
    assert parse_layers(format_layers(layers)) == layers
    assert format_layers((0, 1, 2, 4, 6, 7)) == "0-2,4,6-7"


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "0;2", "0,,2", "0-1-2"])
def test_faulty_layers_are_named(text: str) -> None:
    message = f"`--self_draft_layers` must be layers and ranges of them, such as 0-15,18-29; got {text!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_layers(text)


def test_the_target_drafts_for_itself_with_some_of_its_layers(run_directory: pathlib.Path) -> None:
    target, systems = load(run=str(run_directory), self_draft_layers="0")
    system = systems["self_draft"]
    assert system.drafter.name == "target layers 0"
    assert system.drafter.config.num_layers == 1
    assert system.params["lm_head"] is target.params["lm_head"]
    with pytest.raises(ValueError, match=r"`layers` must be in \[0, 1\), the model's layers; got \[0, 1\]"):
        load(run=str(run_directory), self_draft_layers="0-1")
    with pytest.raises(ValueError, match="must give each drafter its own name"):
        load(target="t", drafters=["self_draft=x"], self_draft_layers="0")
