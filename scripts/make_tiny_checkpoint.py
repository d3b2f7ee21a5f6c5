"""Trains the small model that ships with the project and writes it in the published layout.

    python scripts/make_tiny_checkpoint.py [--output DIR] [--workdir DIR] [--seed N]

Everything follows from the seed: text, order and first weights. A run that was stopped goes
on from its last checkpoint in the work folder; one that is complete only writes the result again.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenizers import Tokenizer

from deepinfer_jax import checkpoint
from deepinfer_jax.engram_tables import read_token_classes
from scripts.tiny_model import tokenizer as tokens
from scripts.tiny_model.export import write_weights
from scripts.tiny_model.loss_curve import draw, read_log
from scripts.tiny_model.prompts import Codec
from scripts.tiny_model.small_config import VOCAB_SIZE, small_config
from scripts.tiny_model.train import STAGES, Training
from scripts.tiny_model.train_drafts import DraftTraining

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUTPUT = ROOT / "deepinfer_jax" / "checkpoints" / "small-v41"
DEFAULT_WORKDIR = Path.home() / ".cache" / "deepinfer-jax" / "small-v41"
CURVE = ROOT / "scripts" / "results" / "small-v41-loss.svg"
TOKENIZER_SEED, NUM_SAMPLES = 0, 6000
"""Conversations that the tokenizer is learned from, always the same."""


def main() -> None:
    """Makes the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--workdir", type=Path, default=DEFAULT_WORKDIR)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    size = make(options.output, options.workdir, options.seed)
    draw(read_log(options.workdir / "loss.jsonl"), CURVE)
    sys.stdout.write(f"{options.output}: {size} bytes of weights; loss curve in {CURVE}\n")


def make(output: Path, workdir: Path, seed: int) -> int:
    """Trains in `workdir` and writes to `output`; returns bytes of the weights."""
    write_description(workdir)
    config = checkpoint.read_config(workdir)
    tables = checkpoint.read_engram_tables(workdir, config)
    codec = Codec(workdir / checkpoint.TOKENIZER_FILE)
    training = Training(config, tables, codec, workdir, STAGES, seed)
    main_parameters = training.run()
    draft = DraftTraining(config, main_parameters, training.rows(len(STAGES) - 1), workdir, seed)
    parameters = dataclasses.replace(main_parameters, draft=draft.run())
    output.mkdir(parents=True, exist_ok=True)
    for name in (checkpoint.CONFIG_FILE, checkpoint.TOKENIZER_FILE, "tokenizer_config.json"):
        shutil.copyfile(workdir / name, output / name)
    return write_weights(config, parameters, output)


def write_description(directory: Path) -> None:
    """Tokenizer and `config.json`."""
    path = directory / checkpoint.TOKENIZER_FILE
    if not path.exists():
        texts = tokens.sample_texts(TOKENIZER_SEED, NUM_SAMPLES)
        tokens.write_tokenizer(tokens.train_tokenizer(texts, VOCAB_SIZE), directory)
    tokenizer = Tokenizer.from_file(str(path))
    vocabulary = tokenizer.get_vocab()
    ids = {"image": vocabulary[tokens.IMAGE], "noise": vocabulary[tokens.NOISE]}
    num_classes = int(read_token_classes(path, VOCAB_SIZE).max()) + 1
    text = json.dumps(small_config(ids, num_classes), indent=1) + "\n"
    (directory / checkpoint.CONFIG_FILE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
