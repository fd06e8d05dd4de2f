"""The speech synthesisers of the corpus behind one call. flite, festival and espeak-ng are programs; Kokoro is a network."""

from __future__ import annotations

import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile as sf

from vcpipe.bench.mini.sound import Word

_TIMEOUT_S = 60

#: The voice of the replies.
ASSISTANT = "af_heart"

#: Kokoro's voices that ask: those of the dev split speak nowhere else.
DEV_VOICES = ["af_river", "bm_fable"]
_TRAIN_VOICES = """
    af_alloy af_bella af_jessica af_kore af_nova af_sarah af_sky am_adam am_echo am_eric am_liam am_michael am_onyx am_santa
    bf_alice bf_emma bf_isabella bm_daniel bm_george
"""
TRAIN_VOICES = _TRAIN_VOICES.split()

#: Voices of the programs.
PROGRAM_VOICES = {
    "flite": ["slt", "awb", "kal16"],
    "festival": ["cmu_us_slt_arctic_hts", "kal_diphone", "ked_diphone"],
    "espeak": [
        f"{accent}+{variant}"
        for accent in ("en-us", "en-gb", "en-gb-x-rp")
        for variant in ("f2", "f3", "f4", "m1", "m2", "m3", "m4", "m7")
    ],
}


class Speech(NamedTuple):
    """``samples`` (n,) float32 at ``rate``; ``words`` with their times where the synthesiser tells them."""

    samples: np.ndarray
    rate: int
    words: list[Word] | None


Speaker = Callable[[str, str, float], Speech]  # text, voice, speed


def is_letter_a(words: list[str], i: int) -> bool:
    """Whether word ``i`` is the letter A, not the article that opens a sentence."""
    if words[i].strip(".,?!") != "A":
        return False
    return i > 0 or words[i] != "A" or (len(words) > 1 and words[1] in ("comes", "is", "starts"))


def flite(text: str, voice: str, speed: float) -> Speech:
    """One of flite's voices."""
    stretch = f"duration_stretch={1 / speed:.3f}"
    return _spoken_by(lambda wav: ["flite", "-voice", voice, "--setf", stretch, "-t", _respelled(text), "-o", wav])


def festival(text: str, voice: str, speed: float) -> Speech:
    """One of festival's voices; "cmu_us_slt_arctic_hts" knows no speed."""
    settings = f"(begin (voice_{voice}) (Parameter.set 'Duration_Stretch {1 / speed:.3f}))"
    return _spoken_by(lambda wav: ["text2wave", "-o", wav, "-eval", settings], _respelled(text))


def espeak(text: str, voice: str, speed: float) -> Speech:
    """One of espeak-ng's voices, in a pitch that voice and text decide."""
    pitch = 35 + zlib.crc32(f"{voice}{text}".encode()) % 31
    sound = ["-v", voice, "-s", str(round(155 * speed)), "-p", str(pitch)]
    return _spoken_by(lambda wav: ["espeak-ng", *sound, "-w", wav, _respelled(text)])


PROGRAMS: dict[str, Speaker] = {"flite": flite, "festival": festival, "espeak": espeak}


def _spoken_by(command: Callable[[str], list[str]], text: str = "") -> Speech:
    """Run ``command`` of a WAV to be written, with ``text`` on its standard input."""
    with tempfile.TemporaryDirectory() as folder:
        wav = str(Path(folder, "speech.wav"))
        subprocess.run(command(wav), input=text.encode(), check=True, capture_output=True, timeout=_TIMEOUT_S)
        samples, rate = sf.read(wav, dtype="float32")
    return Speech(samples, rate, None)


def _respelled(text: str) -> str:
    """The programs read a lone capital A as the article: it is spelled by its sound."""
    words = text.split()
    return " ".join(re.sub("A", "ay", word) if is_letter_a(words, i) else word for i, word in enumerate(words))
