"""The page in a real browser: speech from a WAV goes in as the microphone, text and sound come out."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, chromium

pytest.importorskip("uvicorn")
pytest.importorskip("websockets")

from page_server import PAGE, ScriptedServer, serving  # noqa: E402

QUESTION = Path(__file__).parents[2] / "docs" / "question.wav"

IDLE = "document.body.dataset.state === 'idle'"
TALKING = "document.body.dataset.state === 'talking'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium"), QUESTION) as running:
        yield running


@pytest.fixture(scope="module")
def running_server() -> Iterator[ScriptedServer]:
    with serving(ScriptedServer()) as server:
        yield server


@pytest.fixture
def server(running_server: ScriptedServer) -> ScriptedServer:
    running_server.reset()
    return running_server


@pytest.fixture
def page(browser: Browser, server: ScriptedServer) -> Iterator[Browser]:
    """The page, ready; afterwards nothing may have gone wrong in it but what a test has taken out of ``problems``."""
    browser.look()
    browser.goto(server.url)
    browser.evaluate("sessionStorage.clear()")
    browser.wait("!document.getElementById('talk').disabled")
    yield browser
    assert browser.problems == []


def counters(page: Browser) -> dict[str, float]:
    found = page.evaluate("import('/main.js').then(({ conversation }) => ({ ...conversation.counters }))")
    return {str(name): float(value) for name, value in found.items()}


def counted(condition: str) -> str:
    """JavaScript that is true once the page's counters (c) meet ``condition``."""
    return f"await import('/main.js').then(({{ conversation: {{ counters: c }} }}) => {condition})"


def press_talk(page: Browser) -> None:
    page.evaluate("document.getElementById('talk').click()")


# ---------------------------------------------------------------------------------------------------------------- talks
def test_a_talk_and_another(page: Browser, server: ScriptedServer) -> None:
    heard = begin_a_calm_talk(page, server)
    assert page.text("#model") == "scripted"
    assert page.text(".user p").startswith("What is the capital")
    assert "\ufffd" not in page.text("#transcript")
    assert heard["underruns"] == 0
    assert heard["receivedS"] >= heard["playedS"] + 0.5
    assert 0 < heard["roundTripMs"] < 1000

    press_talk(page)
    page.wait(IDLE)
    (talk,) = server.talks
    assert talk.session["timings"] is True
    assert talk.types[0] == "session.update"
    assert talk.types[-1] == "input_audio_buffer.commit"
    assert {len(chunk) for chunk in talk.pcm[:-1]} == {1280}
    assert 0 < len(talk.pcm[-1]) <= 1280
    # All that came was played out before the page fell silent.
    ended = counters(page)
    assert ended["playedS"] == pytest.approx(ended["receivedS"], abs=0.01)
    assert ended["framesHeard"] == ended["framesSent"] == len(talk.pcm)
    # The browser subtracts its own sound and noise, and sets the gain: about 0.8. The question backwards gives 0.4.
    assert closeness(talk.samples, question()) > 0.6

    press_talk(page)
    page.wait(TALKING)
    page.wait(counted("c.framesHeard > 10"))
    assert len(server.talks) == 2
    assert page.evaluate("document.querySelectorAll('#transcript .session').length") == 2
    press_talk(page)
    page.wait(IDLE)


def begin_a_calm_talk(page: Browser, server: ScriptedServer) -> dict[str, float]:
    """The counters after a while, with a second in hand: a machine that is busy with other things must not be heard.

    Where it stood still for longer than that, the talk begins anew.
    """
    for attempt in range(5):
        if attempt:
            press_talk(page)
            page.wait(IDLE)
            server.reset()
            page.goto(server.url)
            page.wait("!document.getElementById('talk').disabled")
        page.evaluate("document.getElementById('cushion').value = 12")
        press_talk(page)
        page.wait(counted("c.playedS > 1.5 && c.framesHeard > 30"))
        page.wait("document.querySelector('.assistant p')?.textContent.includes('Paris')")
        heard = counters(page)
        if heard["underruns"] == 0 and heard["roundTripMs"] < 1000:
            break
    return heard


def question() -> np.ndarray:
    with wave.open(str(QUESTION), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float64)


def closeness(recorded: np.ndarray, spoken: np.ndarray) -> float:
    """Largest normalised correlation of 0.3 s of speech with any place of the recording."""
    count = 4800
    loudest = int(np.argmax(np.convolve(spoken**2, np.ones(count), "valid")))
    wanted = spoken[loudest : loudest + count]
    heard = recorded.astype(np.float64)
    size = 1 << (len(heard) + len(wanted)).bit_length()
    spectrum = np.fft.rfft(heard, size) * np.conj(np.fft.rfft(wanted, size))
    match = np.fft.irfft(spectrum, size)[: len(heard) - len(wanted)]
    energy = np.cumsum(np.concatenate([[0.0], heard**2]))
    local = energy[len(wanted) : len(heard)] - energy[: len(heard) - len(wanted)]
    return float(np.max(np.abs(match) / np.sqrt(np.maximum(local, 1.0) * np.sum(wanted**2))))


def test_escape_silences_and_cancels(page: Browser, server: ScriptedServer) -> None:
    press_talk(page)
    page.wait(counted("c.playedS > 0.2"))
    page.press("Escape")
    page.wait(IDLE)
    assert server.talks[0].types[-1] == "session.cancel"
    ended = counters(page)
    assert ended["playedS"] < ended["receivedS"]
    assert page.text("#trouble") == ""


def test_a_stall_is_an_underrun_and_shows(page: Browser, server: ScriptedServer) -> None:
    server.hold = range(8, 20)
    press_talk(page)
    page.wait(counted("c.framesHeard > 22 && c.underruns > 0"))
    page.wait("Number(document.getElementById('underruns').textContent) > 0")
    # The cushion is filled anew, and playing goes on.
    before = counters(page)["playedS"]
    page.wait(counted(f"c.playedS > {before + 0.5}"))
    press_talk(page)
    page.wait(IDLE)


def test_the_strip_says_the_numbers(page: Browser, server: ScriptedServer) -> None:
    press_talk(page)
    page.wait(counted("c.framesHeard > 12"))
    page.wait("document.querySelector('[data-lane=tts] .worst').textContent === '85'")
    assert page.text("[data-lane=perception] .typical") == "11"
    assert page.text("[data-lane=tts] .typical") == "42"
    assert page.text("[data-lane=codec] .worst") == "6.3"
    assert page.text("[data-lane=late] .worst") == "15"
    assert page.evaluate("document.querySelectorAll('.worst.over').length") == 1
    inked = """(() => { const c = document.querySelector('[data-lane=language] canvas');
      return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 === 3 && v > 0).length })()"""
    assert page.evaluate(inked) > 100
    press_talk(page)
    page.wait(IDLE)


# ------------------------------------------------------------------------------------------------------- what goes wrong
def test_a_lost_connection_is_said_and_the_next_talk_works(page: Browser, server: ScriptedServer) -> None:
    server.drop_at = 5
    press_talk(page)
    page.wait("document.getElementById('trouble').textContent !== ''")
    page.wait(IDLE)
    assert page.text("#trouble") == "The model failed on the server."
    server.drop_at = -1
    press_talk(page)
    page.wait(counted("c.framesHeard > 5"))
    assert page.text("#trouble") == ""
    press_talk(page)
    page.wait(IDLE)


def test_what_ends_a_talk_is_said(page: Browser, server: ScriptedServer) -> None:
    """The session's limit, then a microphone that is pulled out: the input is closed, the answer is played to its end."""
    server.limit_at = 8
    press_talk(page)
    page.wait("document.getElementById('trouble').textContent === 'the session is limited to 1 s'")
    page.wait(IDLE)
    assert server.talks[0].types[-1] == "input_audio_buffer.commit"
    assert counters(page)["playedS"] == pytest.approx(8 * 0.08, abs=0.01)
    server.limit_at = -1
    press_talk(page)
    page.wait(counted("c.framesHeard > 3"))
    page.evaluate(
        "import('/main.js').then(({ conversation }) => "
        "conversation.sound.stream.getAudioTracks()[0].dispatchEvent(new Event('ended')))"
    )
    page.wait(IDLE)
    assert page.text("#trouble") == "The microphone went away."
    assert server.talks[1].types[-1] == "input_audio_buffer.commit"


def test_busy_and_refused(page: Browser, server: ScriptedServer) -> None:
    server.busy = True
    press_talk(page)
    page.wait("document.getElementById('trouble').textContent.startsWith('Somebody else')")
    server.busy = False
    server.refuse = "the prompt is too long"
    press_talk(page)
    page.wait("document.getElementById('trouble').textContent === 'the prompt is too long'")
    page.wait(IDLE)
    assert not page.evaluate("document.getElementById('talk').disabled")


def test_a_key_is_asked_for_and_kept(page: Browser, server: ScriptedServer) -> None:
    server.key = "sesame-1.2"
    press_talk(page)
    page.wait("document.activeElement.id === 'key'")
    assert page.text("#trouble") == "This server wants an API key."
    refused = {"no/token": "This key has characters", "wrong": "The server does not take this key."}
    for key, said in {**refused, server.key: ""}.items():
        page.evaluate("document.getElementById('key').value = ''")
        page.call("Input.insertText", text=key)
        page.press("Enter", "\r")
        page.wait("document.activeElement.id === 'talk'")
        press_talk(page)
        if said:
            page.wait(f"document.getElementById('trouble').textContent.startsWith('{said}')")
            page.wait("document.activeElement.id === 'key'")
    page.wait(counted("c.framesHeard > 3"))
    press_talk(page)
    page.wait(IDLE)
    # A browser logs every refused upgrade and answer by itself.
    assert all("401" in line or "403" in line for line in page.problems)
    page.problems.clear()


def test_a_model_that_loads(browser: Browser, server: ScriptedServer) -> None:
    stages = {"perception": {"state": "loading", "step": "weights", "fraction": 1.0}, "language": {"state": "loading"}}
    server.health = {"status": "loading", "stages": stages}
    browser.goto(server.url)
    browser.wait("document.getElementById('status').textContent === 'The model is loading: 50 %.'")
    assert browser.evaluate("document.getElementById('talk').disabled")
    server.health = {"status": "failed", "error": "tts ended with exit code 1", "dead_stages": ["tts"]}
    browser.wait("!document.getElementById('talk').disabled")
    assert browser.text("#status") == "tts ended with exit code 1. The next talk starts the model anew."
    assert all("503" in line for line in browser.problems)


# ------------------------------------------------------------------------------------------------------------ the model
@pytest.mark.process
def test_a_talk_with_the_model_itself(browser: Browser, tmp_path: Path) -> None:
    """``vcpipe serve`` on the checkpoint of the package: the page waits for it, talks, ends, talks again."""
    errors = tmp_path / "err"
    command = [sys.executable, "-m", "vcpipe", "serve", "--port", "0"]
    with errors.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        browser.look()
        browser.goto(listening(errors, process))
        browser.wait("!document.getElementById('talk').disabled", within_s=120)
        browser.problems.clear()  # the browser notes every 503 of the time before
        for _ in range(2):
            press_talk(browser)
            browser.wait(counted("c.playedS > 1 && c.framesHeard > 20"), within_s=60)
            browser.wait("document.querySelector('[data-lane=codec] .worst').textContent !== '–'")
            # It is asked over and over without a pause for an answer.
            browser.wait("document.querySelector('#transcript .user p')?.textContent.includes('capital')", within_s=60)
            press_talk(browser)
            browser.wait(IDLE)
            ended = counters(browser)
            assert ended["framesHeard"] == ended["framesSent"]
            assert ended["playedS"] + ended["skippedS"] == pytest.approx(ended["receivedS"], abs=0.01)
        assert browser.text("#model") == "vcpipe-embedded"
        assert browser.text("#trouble") == ""
        assert browser.problems == []
    finally:
        process.terminate()
        process.wait(timeout=30)


def listening(errors: Path, process: subprocess.Popen[bytes]) -> str:
    """The address that the server says it has."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if said := re.search(r"listening on (http://\S+?),?\s", errors.read_text(errors="replace")):
            return f"{said[1]}/"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
    raise AssertionError(errors.read_text(errors="replace"))


# ---------------------------------------------------------------------------------------------------------- who uses it
def test_by_keyboard(page: Browser, server: ScriptedServer) -> None:
    for _ in range(6):
        page.press("Tab")
        if page.evaluate("document.activeElement.id") == "talk":
            break
    assert page.evaluate("document.activeElement.id") == "talk"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press(" ", " ")
    page.wait(counted("c.framesHeard > 2"))
    assert page.text("#talk") == "End"
    page.press("Enter", "\r")
    page.wait(IDLE)
    assert page.evaluate("document.activeElement.id") == "talk"


def test_a_screen_reader_hears_names_and_news(page: Browser, server: ScriptedServer) -> None:
    controls = {"button", "textbox", "spinbutton", "DisclosureTriangle"}
    page.evaluate("document.getElementById('settings-fold').open = true")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") in controls]
    assert {"Talk", "Instructions", "Seed", "Frames in hand"} <= set(named)
    assert "" not in named
    press_talk(page)
    page.wait("document.getElementById('announcer').textContent.includes('You: What is the capital of France?')")
    assert page.evaluate("document.getElementById('announcer').getAttribute('aria-live')") == "polite"
    assert page.evaluate("document.getElementById('status').getAttribute('role')") == "status"
    press_talk(page)
    page.wait(IDLE)


def test_motion_that_is_unwelcome(page: Browser, server: ScriptedServer) -> None:
    page.look(motion="reduce")
    assert page.evaluate("getComputedStyle(document.getElementById('talk')).transitionDuration") == "0s"
    page.evaluate(
        "window.pictures = 0; window.begun = performance.now(); const clear = CanvasRenderingContext2D.prototype.clearRect;"
        "CanvasRenderingContext2D.prototype.clearRect = function (...box) { window.pictures += 1; clear.apply(this, box); }; 0"
    )
    press_talk(page)
    page.wait(counted("c.framesHeard > 15"))
    page.wait("document.querySelector('[data-lane=tts] .worst').textContent === '85'")
    # Five lanes, about once a second; with motion it would be at every frame.
    seconds = page.evaluate("(performance.now() - window.begun) / 1000")
    assert page.evaluate("window.pictures") <= 5 * (seconds + 2)
    press_talk(page)
    page.wait(IDLE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(page: Browser, scheme: str) -> None:
    """Contrast of at least 4.5 to 1 against the paper, as WCAG AA asks."""
    page.look(scheme)
    colours = page.evaluate(
        "Object.fromEntries(['paper', 'raised', 'ink', 'soft', 'accent', 'on-accent'].map((name) => "
        "[name, getComputedStyle(document.documentElement).getPropertyValue('--' + name)]))"
    )
    for text, ground in (*itertools.product(("ink", "soft", "accent"), ("paper", "raised")), ("on-accent", "accent")):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    digits = colour.strip().removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(digit * 2 for digit in digits)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize(("width", "height"), [(320, 640), (390, 844), (1400, 500)])
def test_every_window_shows_the_button(page: Browser, width: int, height: int) -> None:
    page.look(width=width, height=height)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.evaluate("document.getElementById('talk').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0 and box["top"] >= 0 and box["right"] <= width and box["bottom"] <= height


# -------------------------------------------------------------------------------------------------------------- the files
def test_nothing_comes_from_elsewhere(page: Browser, server: ScriptedServer) -> None:
    """Runs under ``default-src 'self'``, and asks nobody but the server."""
    assert page.requests
    assert all(url.startswith((server.url, "about:")) for url in page.requests)


def test_the_files_name_no_other_host_and_hold_no_inline_code() -> None:
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(https?|wss?)://(?!www\.w3\.org/2000/svg)", text), path.name
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)


@pytest.mark.parametrize(
    ("source", "target"), [(48000, 16000), (44100, 16000), (22050, 48000), (22050, 44100), (8000, 16000)]
)
def test_resampling_keeps_its_state(page: Browser, source: int, target: int) -> None:
    """A tone in pieces of any size: one piece's numbers, the right length, and nothing but the tone."""
    script = f"""
    import('/resample.js').then(({{ Resampler }}) => {{
      const tone = Float32Array.from({{ length: {source} }}, (_, i) => 0.5 * Math.sin(2 * Math.PI * 1000 * i / {source}));
      const run = (sizes) => {{
        const resampler = new Resampler({source}, {target});
        const output = [];
        for (let at = 0, i = 0; at < tone.length; at += sizes[i++ % sizes.length]) {{
          output.push(...resampler.push(tone.subarray(at, at + sizes[i % sizes.length])));
        }}
        return [...output, ...resampler.flush()];
      }};
      return JSON.stringify([run([tone.length]), run([128, 1, 441, 1764])]);
    }})"""
    whole, pieces = (np.array(part) for part in json.loads(page.evaluate(script)))
    assert np.array_equal(whole, pieces)
    assert abs(len(whole) - target) <= 1
    ideal = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(len(whole)) / target)
    inner = slice(200, -200)
    assert np.max(np.abs(whole - ideal)[inner]) < 5e-4
