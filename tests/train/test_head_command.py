"""Flags and plans of every head, and the command with heads that are trained, derived, or sized by the data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoints.eagle import load_drafter
from specjax.heads import head_kinds
from specjax.models import ModelConfig
from train.flags import flags_text, parse_command_line
from train.plan import make_plan
from train.slimspec import main

SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, max_position_embeddings=8192, tie_word_embeddings=True)
SIZES = (
    "--num_prompts=4",
    "--held_out_prompts=2",
    "--answers_per_prompt=1",
    "--max_answer_tokens=8",
    "--answer_slots=4",
    "--batch_length=48",
    "--batch_size=2",
    "--feature_rows=2",
    "--train_steps=2",
    "--stage1_steps=0",
    "--unroll_steps=2",
    "--loss_window=4",
    "--loss_rows=8",
    "--noprogress",
    "--noevaluate",
)


@pytest.fixture(scope="module")
def command(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The command without its run directory; all runs share answers and features."""
    folder = tmp_path_factory.mktemp("heads")
    path = folder / "prompts.jsonl"
    rows = [[{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": "world"}] for i in range(8)]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return (f"--target={model_folder}", f"--dataset={path}", f"--data_dir={folder / 'shared'}", *SIZES)


@pytest.fixture(scope="module")
def base(command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the full head."""
    run_dir = tmp_path_factory.mktemp("base") / "full"
    assert main([*command, f"--run_dir={run_dir}", "--head=full"]) == 0
    return run_dir


def test_a_static_head_is_made_from_a_base_without_training(
    base: Path, command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = [*command, f"--run_dir={tmp_path / 'trim'}", "--head=vocab_trim", f"--base={base}", "--head_options=rows=20"]
    assert main(mine) == 0
    assert "nothing to train" in capsys.readouterr().out
    _, params = load_drafter(tmp_path / "trim" / "export")
    _, of_base = load_drafter(base / "export")
    ids = np.asarray(params["head"]["ids"])
    assert len(ids) == 20
    np.testing.assert_array_equal(params["head"]["kernel"], np.asarray(of_base["head"]["kernel"])[:, ids])
    np.testing.assert_array_equal(params["fc"], of_base["fc"])
    (row,) = [json.loads(line) for line in (tmp_path / "trim" / "metrics.jsonl").read_text().splitlines()]
    assert (row["kind"], row["step"]) == ("held_out", 0)
    assert all(a <= c for a, c in zip(row["acceptance_per_step"], row["ceiling_per_step"], strict=True))
    report = json.loads((tmp_path / "trim" / "data" / "vocabulary.json").read_text())
    assert report["ids"] == ids.tolist()
    assert 0 < report["held_out_coverage"] <= 1
    # Again: nothing is repeated, nothing changes.
    before = (tmp_path / "trim" / "metrics.jsonl").read_bytes()
    assert main(mine) == 0
    assert (tmp_path / "trim" / "metrics.jsonl").read_bytes() == before


def test_case_h6_a_reduced_head_of_a_tied_target_is_saved_resumed_and_exported(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """BCL takes its size from the data; a run that stops after each checkpoint ends with its own reduced head."""
    mine = [*command, f"--run_dir={tmp_path}", "--head=bcl", "--head_options=smallest=8", "--checkpoint_every=1"]
    assert main(mine) == 0
    config, params = load_drafter(tmp_path / "export")
    rows = config.head.option("rows")
    assert 8 <= rows < config.vocab_size
    assert params["head"]["kernel"].shape == (config.hidden_size, rows)
    # The export is made again from the checkpoint, which a fresh process restores.
    (tmp_path / "export").rename(tmp_path / "first")
    assert main(mine) == 0
    _, again = load_drafter(tmp_path / "export")
    for name in ("kernel", "ids"):
        np.testing.assert_array_equal(again["head"][name], params["head"][name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("fr_spec", "rows=20"),
        ("vocab_trim", "rows=20,trained=true"),
        ("spec_vocab", "candidates=8"),
        ("low_rank", "ranks=4:2"),
        ("coral", "groups=8,active=2"),
        ("low_rank_preview", "candidates=8"),
        ("dyna_spec", "groups=8,active=2,width=4"),
    ],
)
def test_every_other_head_runs_to_its_report(
    base: Path, command: tuple[str, ...], tmp_path: Path, head: str, options: str
) -> None:
    from_base = [f"--base={base}"] if head in ("low_rank_preview", "dyna_spec") else []
    measured = ["--evaluate", "--eval_prompts=1", "--eval_new_tokens=4", "--draft_lengths=2"]
    mine = [*command, f"--run_dir={tmp_path}", f"--head={head}", f"--head_options={options}", *from_base, *measured]
    assert main(mine) == 0
    (row,) = json.loads((tmp_path / "eval" / "head_cost.json").read_text())["heads"]
    assert row["kind"] == head
    assert row["alone"]["own"]["median"] > 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("head", [kind for kind in head_kinds() if "only" not in kind])
def test_the_plan_shows_every_head(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    second_stage = head in ("low_rank_preview", "dyna_spec")
    arguments = [f"--head={head}", *(["--base=somewhere"] if second_stage else [])]
    # The plan needs the base's shape alone.
    full = make_drafter_config()
    monkeypatch.setattr("train.plan.load_drafter", lambda folder: (full, {}))
    rows = make_plan(parse_command_line(arguments), SMOLLM2).sections
    assert rows["Drafter (EAGLE-3)"]["LM head"].startswith(f"{head} [") or head in ("coral", "dyna_spec")
    assert 0 < float(rows["Expected at decoding"]["nu (bytes of the head over full)"]) <= 1
    if second_stage:
        assert "somewhere" in rows["Drafter (EAGLE-3)"]["start"]


def make_drafter_config():
    from specjax.drafters.eagle3_layer import Eagle3Config

    return Eagle3Config.for_target(SMOLLM2, head_kind="full")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head=ful"], "`--head` must be one of bcl, coral, "),
        (["--head=fr_spec", "--rank=4"], "`--rank` has no effect with `--head=fr_spec`; got 4"),
        (["--head=vocab_trim", "--head_options=row=4"], "an option of the vocab_trim head must be one of"),
        (["--head=vocab_trim", "--head_options=rows"], "must be written as name=value"),
        (["--head=vocab_trim", "--head_options=rows=many"], "`rows` must be a whole number; got 'many'"),
        (["--head=low_rank_preview"], "`--base` must be given for `--head=low_rank_preview`"),
        (["--head=dyna_spec", "--base=x", "--notrain_head"], "`--train_head` must be true for `--head=dyna_spec`"),
        (["--head=dyna_spec", "--base=x", "--loss=lk"], "`--loss` has no effect with `--head=dyna_spec`; got 'lk'"),
        (["--lk_decay=2"], "`--lk_decay` has no effect with `--loss=kl`; got 2.0"),
        (["--loss=l2"], "`--loss` must be one of kl, lk_hybrid, lk, tv; got 'l2'"),
        (["--frequency_text=x"], "`--frequency_text` has no effect with `--head=low_rank`; got 'x'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_command_line(arguments)


def test_sizes_that_do_not_fit_the_target_are_named() -> None:
    config = parse_command_line(["--head=vocab_trim", "--head_options=rows=50000"])
    with pytest.raises(ValueError, match="`--head_options` must fit the target: `rows` of the vocab_trim head"):
        make_plan(config, SMOLLM2)


def test_the_resolved_flags_give_the_same_settings(tmp_path: Path) -> None:
    arguments = ["--head=low_rank", "--rank=96", "--head_options=ranks=96:72:48", "--loss=lk_hybrid", "--lk_decay=2"]
    config = parse_command_line(arguments)
    path = tmp_path / "flags.txt"
    path.write_text(flags_text(config))
    assert parse_command_line([f"--flagfile={path}"]) == config
    assert config.head_option_values == {"ranks": (96, 72, 48)}
