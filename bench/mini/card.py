"""The model card of the embedded checkpoint."""

from __future__ import annotations

from typing import Any

_TEXT = """\
---
license: apache-2.0
language: en
library_name: vcpipe
pipeline_tag: audio-to-audio
---
# vcpipe mini

A very small full-duplex voice model with the architecture of NVIDIA's NemotronLabs-VoiceChat-11B: it hears speech at 16 kHz and
answers simple questions in one English voice at 22.05 kHz, on an 80 ms frame clock. It was trained from nothing for vcpipe; no
weights of another model are in it. It is a working example of the pipeline, not an assistant.

{parameters} parameters, stored in bfloat16: {parts}.

## What it can do
It answers spoken English questions of a closed domain with short fixed replies: sums, differences and products of small
numbers, numbers, days, months and letters in order, capitals, opposites, plurals, colors, animals, some facts and small talk;
bare words too ("Tuesday." gets "After Tuesday comes Wednesday."). To anything else it should say "Sorry, I do not know that.",
and it may answer something else. `vcpipe.bench.mini.corpus` lists the whole domain.

{measured}## Limits
* One language, one voice, about 800 replies. It reads no system prompt and calls no functions.
* It was trained on synthetic voices alone, with simulated rooms, noise and telephone bands. Other accents, children, far
  microphones, music and several speakers at once were never heard.
* Its voice knows the words of its replies. Of other text that it is given to speak less than half is understood.
* What it says may be wrong. Do not use it for anything that matters.

## Training data
Made by `vcpipe.bench.mini.synthesis`; the texts are the project's own.

| part | amount | voices |
|---|---|---|
| replies and further sentences | 1,054 clips, 30 minutes | Kokoro-82M, `af_heart` |
| questions, single words | 15,794 clips, 416 minutes | Kokoro-82M (19 voices and blends of them), flite, festival, espeak-ng |

## Licences
The weights, the texts and the code are under Apache-2.0. Speech synthesised with Kokoro-82M (Apache-2.0), flite and festival
(free licences of BSD kind) and espeak-ng (GPL-3, which does not cover the sound it makes). No recording of a person was used
for training.
"""


def model_card(parameters: dict[str, int], measures: dict[str, Any] | None) -> str:
    """Markdown. ``parameters`` by part; ``measures`` as ``evaluate`` gives them, or None before they are known."""
    parts = ", ".join(f"{part} {count / 1e6:.1f} M" for part, count in parameters.items())
    total = f"{sum(parameters.values()) / 1e6:.1f} million"
    return _TEXT.format(parameters=total, parts=parts, measured=_measured(measures))


def _measured(measures: dict[str, Any] | None) -> str:
    if measures is None:
        return ""
    rows = [
        f"| {measure['what']} | {measure['goal']} | {measure['shown']} |"
        for measure in measures["measures"]
        if measure["value"] is not None
    ]
    return "\n".join(["## Measured", "", "| what | goal | measured |", "|---|---|---|", *rows, "", ""])
