"""Stretches of sound to learn recognition from, and a toy that learns from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vcpipe.bench.mini.augment import Segments  # noqa: E402
from vcpipe.bench.mini.scoring import word_errors  # noqa: E402
from vcpipe.bench.mini.shape import mini_config  # noqa: E402
from vcpipe.bench.mini.sound import Bank, Clip  # noqa: E402
from vcpipe.bench.mini.tokens import Pieces  # noqa: E402
from vcpipe.bench.mini.train.perception import Learner, Objective, initialise  # noqa: E402
from vcpipe.bench.mini.train.perception_check import Check, _Set  # noqa: E402
from vcpipe.bench.mini.train.stretches import FRAME, Batch, Layout, Line, Stretches  # noqa: E402

CPU = torch.device("cpu")
WORDS = ["one", "two", "three", "four"]
RATE = 16000


def tones(lines: list[list[str]], rate: int = RATE, split: str = "train") -> Bank:
    """Clips in which every word is a tone of 0.3 s, with 0.1 s around it."""
    sounds, clips, offset = [], [], 0
    time = np.arange(int(0.3 * rate)) / rate
    for i, words in enumerate(lines):
        parts, places = [np.zeros(int(0.1 * rate))], []
        for j, word in enumerate(words):
            places.append((word, 0.1 + 0.4 * j, 0.4 + 0.4 * j))
            parts += [3000 * np.sin(2 * np.pi * 300 * 2 ** WORDS.index(word) * time), np.zeros(int(0.1 * rate))]
        sound = np.concatenate(parts).astype(np.int16)
        text = " ".join(words)
        seconds = len(sound) / rate
        clips.append(
            Clip(f"c{i}", text, text, tuple(places), "v", "kokoro", split, "say", "", seconds, offset, len(sound))
        )
        sounds.append(sound)
        offset += len(sound)
    return Bank(np.concatenate(sounds), rate, clips)


@pytest.fixture(scope="module")
def users() -> Bank:
    rng = np.random.default_rng(0)
    return tones([[WORDS[i] for i in rng.integers(4, size=rng.integers(1, 4))] for _ in range(20)])


@pytest.fixture(scope="module")
def answers() -> Bank:
    return tones([["one", "two", "three", "four"]], rate=22050)


@pytest.fixture(scope="module")
def pieces(users: Bank) -> Pieces:
    return Pieces.train([clip.transcript for clip in users.clips], 40)


def test_a_layout_holds_what_was_said_where(users: Bank, answers: Bank, pieces: Pieces) -> None:
    layout = Layout(2, 50, pieces)
    clip = users.clips[3]
    end = layout.say(1, 8000, Line.of_clip(clip))
    assert end == 8000 + clip.samples
    spoken = Line("two", None, np.full(4000, 0.25, np.float32))
    assert layout.say(1, 40000, spoken, pace=0.8) == 45000
    assert layout.answer(0, 60000, answers.clips[0], answers.rate) == 64000  # cut by the end of the stretch
    batch = layout.finished()
    speech, echo = batch.sound(users.on(CPU), answers.on(CPU))
    assert speech.shape == echo.shape == (2, 50 * FRAME)
    wanted = users.cut(clip)
    np.testing.assert_allclose(speech[1, 8160 : end - 160], wanted[160:-160], atol=1e-6)
    np.testing.assert_allclose(speech[1, 40160:44840], 0.25, rtol=1e-3)
    assert not speech[0].any() and not echo[1].any() and not echo[0, :60000].any() and echo[0, 62000:].any()
    ids = pieces.ids(clip.transcript) + pieces.ids("two")
    assert batch.symbols.tolist() == [0, len(ids)] and batch.targets[1].tolist() == ids
    assert batch.history.shape == (2, 0)


def spans(segments: Segments) -> list[tuple[int, int]]:
    return sorted((int(a), int(a + n)) for a, n in zip(segments.place, segments.samples, strict=True))


def test_training_batches_are_sound(users: Bank, answers: Bank, pieces: Pieces) -> None:
    batches = iter(Stretches(users, answers, pieces, frames=400, seed=3))
    seen = [next(batches) for _ in range(60)]
    empty = with_history = spliced = 0
    for batch in seen:
        rows, samples = len(batch.symbols), batch.frames * FRAME
        assert rows >= 1 and (rows == 1 or rows * batch.frames <= 400)
        said = spans(Segments(*(torch.cat(pair) for pair in list(zip(batch.clips, batch.spliced, strict=True))[:5]), 0))
        for lines in (said, spans(batch.echo)):
            assert all(a[1] <= b[0] for a, b in zip(lines, lines[1:], strict=False)), "segments overlap"
            assert all(a // samples == (b - 1) // samples for a, b in lines if b > a), "a segment leaves its stretch"
        assert all((samples - end % samples) / RATE >= 0.39 for _, end in said), "no time to hear the last word"
        rows_said = {start // samples for start, _ in said}
        assert all((int(n) > 0) == (row in rows_said) for row, n in enumerate(batch.symbols))
        empty += rows - len(rows_said)
        with_history += batch.history.shape[1] > 0
        spliced += len(batch.spliced.samples)
    assert empty > 5 and 15 < with_history < 45 and spliced > 20
    again = next(iter(Stretches(users, answers, pieces, frames=400, seed=3)))
    assert torch.equal(again.clips.place, seen[0].clips.place) and torch.equal(again.targets, seen[0].targets)


def toy_config(pieces: Pieces) -> dict[str, object]:
    audio = mini_config(300, pieces.names)["audio_config"]
    audio["encoder"] |= {"d_model": 32, "n_layers": 1, "n_heads": 2, "subsampling_conv_channels": 8}
    audio["joint"] |= {"joint_hidden": 32, "encoder_hidden": 32, "pred_hidden": 32}
    audio["decoder"] |= {"pred_hidden": 32}
    return audio


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order: on several threads a short training ends elsewhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_toy_learns_to_transcribe(pieces: Pieces, answers: Bank) -> None:
    torch.manual_seed(0)
    users = tones([["one"], ["two", "four"], ["four", "one"], ["three"]])
    layout = Layout(4, 24, pieces)
    for row, clip in enumerate(users.clips):
        layout.say(row, 4000, Line.of_clip(clip))
    batch: Batch = layout.finished()
    speech, _ = batch.sound(users.on(CPU), answers.on(CPU))
    sound = speech + 0.001 * torch.randn_like(speech)
    network = Learner(toy_config(pieces), dropout=0.0)
    initialise(network, sound)
    objective = Objective(network, torch.Generator().manual_seed(0), delay_penalty=0.01)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses = []
    for step in range(120):
        loss, numbers = objective(sound, batch, step / 120)
        assert ("ctc" in numbers) == (step < 42)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        losses.append(float(numbers["rnnt"]))
    assert np.mean(losses[-10:]) < 0.3 < 1 < losses[0]
    network.eval()
    heard = network.greedy(network.encoder.features(sound), torch.full((4,), 24))
    texts = [pieces.text(piece for piece, _ in row) for row in heard]
    assert texts == [clip.transcript for clip in users.clips]


class Oracle(Check):
    """Hears every word in the second frame after its end; of the first line of each set nothing."""

    def _recognise(self, network: object, found: _Set) -> list[list[tuple[int, int]]]:
        rows = []
        for places in found.lines:
            row = []
            for line, start in places:
                ends = line.word_ends or [0.0] * len(line.transcript.split())
                for word, end in zip(line.transcript.split(), ends, strict=True):
                    frame = int(np.ceil((start + end) * RATE / FRAME)) + 1
                    row += [(piece, frame) for piece in self._pieces.ids(word)]
            rows.append(row if rows else [])
        return rows or [[]] * sum(len(batch.symbols) for batch in found.batches)


def test_what_is_measured(users: Bank, answers: Bank, pieces: Pieces) -> None:
    clips = [clip for clip in users.clips if len(clip.words) == 2]
    numbers = Oracle(users, answers, pieces, CPU, clips=clips)(None)
    assert numbers["dev_wer"] == numbers["kokoro_wer"] == pytest.approx(100 / len(clips))
    assert numbers["talk_wer"] == 100  # all lines are one stretch
    assert 0 < numbers["words_wer"] < 50
    assert 0.08 < numbers["last_word_delay"] < numbers["last_word_delay_95"] <= 0.24
    assert numbers["silence_words_a_minute"] == 0


def test_word_errors() -> None:
    assert word_errors(WORDS, WORDS) == 0
    assert word_errors(["one", "two", "three"], ["two", "three", "four", "five"]) == 3
    assert word_errors([], ["a", "b"]) == 2 and word_errors(["a"], []) == 1
