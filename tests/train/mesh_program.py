"""Trains the tiny drafter on several meshes of four CPU devices and prints the losses; run by test_mesh.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
from conftest import make_target

from train.config import TrainConfig
from train.data import Example, Rows, make_rows
from train.plan import drafter_config
from train.trainer import Trainer


def random_rows(count: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    examples = []
    for index in range(count):
        tokens = rng.integers(3, 200, int(rng.integers(8, 17))).astype(np.int32)
        examples.append(Example(f"e{index}", tokens, np.arange(len(tokens)) >= 5))
    return make_rows(examples, 16, packing=False)


def losses_on(mesh: str, features: str, folder: Path) -> dict:
    config = TrainConfig.create(
        mesh=mesh,
        features=features,
        run_dir=str(folder),
        train_steps=6,
        warmup_steps=1,
        stage1_steps=0,
        unroll_steps=2,
        batch_size=4,
        batch_length=16,
        loss_window=4,
        loss_rows=8,
        rank=4,
        optimizer="adamw",
        learning_rate=1e-2,
        held_out_every=3,
        checkpoint_every=100,
        feature_dtype="float32" if features == "cached" else "bfloat16",
        progress=False,
    )
    target = make_target()
    rows, held_out = random_rows(11, 1), random_rows(5, 2)
    trainer = Trainer(config, target, drafter_config(config, target.config), rows, held_out, folder)
    state = trainer.train(folder)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    up = state.params["head"]["up"]
    return {
        "losses": [row["loss"] for row in metrics],
        "sum": float(sum(np.abs(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(state.params))),
        "devices": len(up.sharding.device_set),
        "shard": list(up.addressable_shards[0].data.shape),
        "shape": list(up.shape),
    }


if __name__ == "__main__":
    root = Path(sys.argv[1])
    found = {}
    for name in sys.argv[2:]:
        mesh, _, features = name.partition("/")
        folder = root / name.replace(":", "").replace(",", "").replace("/", "-")
        folder.mkdir()
        found[name] = losses_on(mesh, features, folder)
    print("RESULT", json.dumps(found))
