"""What lies between frames of speech and a device: cushion, ring, resampling, and the lines on the screen."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import soxr

from vcpipe.launch.talk.connection import describe_error
from vcpipe.launch.talk.playback import Playback
from vcpipe.launch.talk.resample import FrameCutter, Resampler
from vcpipe.launch.talk.screen import Dialogue, Line, Screen

FRAME = 1764


def playback(cushion: int = 3) -> Playback:
    """One at the model's own rate, so that samples can be counted."""
    return Playback(22050, 22050, FRAME, cushion)


def play(source: Playback, count: int, channels: int = 1) -> np.ndarray:
    block = np.full((count, channels), np.nan, np.float32)
    source.fill(block)
    return block[:, 0] if channels == 1 else block


def ramp(frames: int) -> np.ndarray:
    """Rises by a constant step and is nowhere silent."""
    return np.linspace(0.1, 0.9, frames * FRAME, dtype=np.float32)


# ------------------------------------------------------------------------------------------------------------ ring
@pytest.mark.parametrize("block", [256, 441, 1024, 1764, 5000])
def test_o04_a_device_may_ask_for_any_number_of_samples(block: int) -> None:
    ring = playback()
    said = ramp(200)
    heard = []
    for frame in said.reshape(200, FRAME):
        ring.write(frame)
        while ring.waiting >= 3 * FRAME + block:
            heard.append(play(ring, block))
    ring.finish()
    while ring.waiting:
        heard.append(play(ring, block))
    played = np.concatenate(heard)
    assert np.array_equal(played[: len(said)], said)
    assert not played[len(said) :].any()
    assert ring.underruns == 0


def test_o04_underruns_are_counted_and_the_cushion_is_filled_again() -> None:
    ring = playback(cushion=2)
    assert not play(ring, 100).any()
    ring.write(ramp(1))
    assert not play(ring, 100).any(), "one frame is less than the cushion"
    ring.write(ramp(1))
    heard = play(ring, 2 * FRAME + 50)
    assert heard[: 2 * FRAME].all() and not heard[2 * FRAME :].any()
    assert ring.underruns == 1
    assert not play(ring, 100).any() and ring.underruns == 1, "one gap is one underrun, however long"
    ring.write(ramp(1))
    assert not play(ring, 100).any()
    ring.write(ramp(1))
    assert play(ring, 100).all() and ring.underruns == 1


@pytest.mark.parametrize("seed", range(5))
def test_o05_a_cushion_of_three_frames_takes_150_ms_of_jitter(seed: int) -> None:
    jitter = np.random.default_rng(seed).uniform(0, 150, 400)
    jitter[0] = 0
    arrivals = np.maximum.accumulate(np.arange(400) * 80 + jitter)

    def gaps(cushion: int) -> int:
        ring = playback(cushion)
        # Both in order of time; frames come before a block that asks at the same moment.
        moments = heapq.merge(((t, 0) for t in arrivals), ((20.0 * n, 1) for n in range(int(arrivals[-1] / 20))))
        for _, is_block in moments:
            if is_block:
                play(ring, 441)
            else:
                ring.write(np.full(FRAME, 0.5, np.float32))
        return ring.underruns

    assert gaps(3) == 0
    # Each gap without a cushion makes all that follows later, so there are few.
    assert gaps(0) > 0


def test_all_channels_get_the_same() -> None:
    ring = playback(cushion=1)
    ring.write(ramp(1))
    heard = play(ring, FRAME, channels=4)
    assert np.array_equal(heard, np.repeat(ramp(1)[:, np.newaxis], 4, axis=1))


def test_p22_clear_makes_the_next_block_silent_and_leaves_nothing_behind() -> None:
    ring = Playback(22050, 48000, FRAME)
    for _ in range(25):
        ring.write(np.full(FRAME, 0.5, np.float32))
    assert play(ring, 960).max() > 0.4
    ring.clear()
    assert not play(ring, 960).any() and ring.waiting == 0 and ring.underruns == 0
    ring.write(np.zeros(FRAME, np.float32))
    ring.finish()
    assert not play(ring, ring.waiting).any(), "the resampler forgot, too"


def test_finish_plays_what_is_less_than_a_cushion_and_tells() -> None:
    told = []
    ring = Playback(22050, 22050, FRAME, 3, on_drained=lambda: told.append(True))
    ring.write(ramp(1))
    assert not play(ring, 10).any()
    ring.finish()
    assert np.array_equal(play(ring, FRAME - 1), ramp(1)[:-1]) and not told
    play(ring, 10)
    assert told and ring.underruns == 0


def test_after_a_stall_silent_frames_are_left_out_until_the_answer_is_on_time_again() -> None:
    ring = playback()
    for _ in range(20):
        ring.write(np.full(FRAME, 0.5, np.float32))
    assert ring.waiting == 20 * FRAME, "speech is never left out"
    ring.write(np.zeros(FRAME, np.float32))
    assert ring.waiting == 20 * FRAME and ring.left_out == 1
    play(ring, 12 * FRAME)
    ring.write(np.zeros(FRAME, np.float32))
    assert ring.waiting == 9 * FRAME and ring.left_out == 1, "with five frames beyond the cushion it is"


def test_a_flood_is_bounded() -> None:
    ring = playback()
    for _ in range(1000):
        ring.write(np.full(FRAME, 0.5, np.float32))
    assert ring.waiting <= 60 * 22050
    assert ring.waiting // FRAME + ring.left_out == 1000


def test_w16_speaking_lasts_from_the_first_audible_sample_until_the_echo_has_faded() -> None:
    ring = playback(cushion=1)
    assert not ring.speaking
    ring.write(np.zeros(FRAME, np.float32))
    play(ring, FRAME)
    assert not ring.speaking, "silence is no speech"
    said = np.zeros(FRAME, np.float32)
    said[100] = 0.1
    ring.write(said)
    play(ring, FRAME)
    assert ring.speaking
    play(ring, 6615 - (FRAME - 100) - 1)
    assert ring.speaking
    play(ring, 2)
    assert not ring.speaking, "300 ms after the last sample"


# ---------------------------------------------------------------------------------------------------------- resampling
@pytest.mark.parametrize("rate", [48000, 44100, 8000, 22050])
@pytest.mark.parametrize("chunk", [1, 160, 480, 4410])
def test_w08_pieces_sound_like_the_whole(rate: int, chunk: int) -> None:
    tone = np.sin(2 * np.pi * 1000 / rate * np.arange(rate // 4)).astype(np.float32)
    stream = Resampler(rate, 16000)
    pieces = [stream.push(tone[start : start + chunk]) for start in range(0, len(tone), chunk)]
    got = np.concatenate([*pieces, stream.finish()])
    whole = soxr.resample(tone, rate, 16000)
    assert abs(len(got) - len(whole)) <= 1
    count = min(len(got), len(whole))
    assert np.abs(got[:count] - whole[:count]).max() < 1e-3


def test_the_cutter_loses_nothing() -> None:
    samples = np.arange(10_000, dtype=np.float32)
    cutter = FrameCutter(1280)
    pieces = [frame for piece in np.array_split(samples, 37) for frame in cutter.push(piece)]
    assert {len(frame) for frame in pieces} == {1280}
    assert np.array_equal(np.concatenate([*pieces, cutter.finish()]), samples)
    assert len(cutter.finish()) == 0


# -------------------------------------------------------------------------------------------------------------- lines
def test_lines_end_with_a_pause_and_speakers_may_overlap() -> None:
    dialogue = Dialogue()
    dialogue.add("you", "What is", 3)
    dialogue.add("answer", "Well", 5)
    dialogue.add("you", "What is it", 6)
    assert dialogue.open_lines == [Line("you", "What is it", 6), Line("answer", "Well", 5)]
    assert dialogue.finished(29) == [], "no line ends before one that began earlier"
    assert dialogue.finished(31) == [Line("you", "What is it", 6), Line("answer", "Well", 5)]
    assert dialogue.finished(99) == []
    dialogue.add("you", "What is it Ah", 100)
    assert dialogue.rest() == [Line("you", "Ah", 100)]


def test_a_pause_begins_a_new_line_even_if_the_old_one_still_waits() -> None:
    dialogue = Dialogue()
    dialogue.add("you", "One", 0)
    dialogue.add("answer", "Yes", 2)
    dialogue.add("you", "One two", 20)
    dialogue.add("answer", "Yes no", 40)
    assert dialogue.rest() == [Line("you", "One two", 20), Line("answer", "Yes", 2), Line("answer", "no", 40)]


def test_incomplete_characters_wait() -> None:
    dialogue = Dialogue()
    dialogue.add("answer", "a\ufffd", 0)
    assert dialogue.open_lines == [Line("answer", "a", 0)]
    dialogue.add("answer", "a😀", 3)
    assert dialogue.open_lines == [Line("answer", "a😀", 3)]
    dialogue.add("answer", "a😀\ufffd", 4)
    assert dialogue.rest() == [Line("answer", "a😀\ufffd", 4)]


def test_a_server_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(as_json=False)
    with screen.shown():
        screen.take({"type": "response.text.delta", "frame_index": 0, "text": "a\x1b[2Jb\r\nc [bold]d"})
    assert capsys.readouterr().out == "answer: a [2Jb  c [bold]d\n"
    error = {"error": {"code": "inference_error", "message": "x\x1b[2J"}}
    assert describe_error(error) == "the server says inference_error: x [2J"
