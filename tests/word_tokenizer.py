"""A tokenizer with a token for many short words, and bytes for all others."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from vcpipe.actors.checkpoint import load_tokenizer
from vcpipe.bench.tiny_shape import write_tokenizer


@functools.cache
def word_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return load_tokenizer(Path(folder))
