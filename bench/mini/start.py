"""Writes what every run starts from: config.json, the tokenizer and the transcript's pieces.

python -m vcpipe.bench.mini.start --corpus FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vcpipe.bench.mini.shape import mini_config
from vcpipe.bench.mini.tokens import Pieces, write_tokenizer
from vcpipe.bench.pacing import as_config, fit, read_corpus

_PIECES = 256


def write_start(corpus: Path, out: Path) -> None:
    """From the texts of ``answers.jsonl`` and the transcripts of ``users.jsonl`` in ``corpus``."""
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(out, _column(corpus / "answers.jsonl", "text"))
    pieces = Pieces.train(_column(corpus / "users.jsonl", "transcript"), _PIECES)
    pieces.save(out / "pieces.json")
    config = mini_config(vocabulary, pieces.names)
    pacing, _ = fit(read_corpus(corpus / "answers.jsonl"), config["frame_duration"])
    config["vcpipe"] = {"pacing": as_config(pacing)}
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")


def _column(path: Path, name: str) -> list[str]:
    return [str(json.loads(line)[name]) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what every run starts from.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with answers.jsonl and users.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_start(options.corpus, options.out)


if __name__ == "__main__":
    main()
