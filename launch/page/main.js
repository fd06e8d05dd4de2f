/** The page: what its button, keys and fields do, and where a talk shows what happens. */

import { Conversation } from "./conversation.js";
import { accepts, health, READY, realtimeUrl } from "./server.js";
import { milliseconds, Strip } from "./strip.js";
import { Transcript } from "./transcript.js";

const HEALTH_MS = 1000;
const FRAME_S = 0.08;
/** Where the browser keeps the key until the tab is closed. */
const KEY = "vcpipe.key";

const $ = (id) => document.getElementById(id);
const strip = new Strip($("clock").querySelector("table"));
const transcript = new Transcript($("transcript"), $("announcer"));

// In a low window the talk has the room.
if (innerHeight < 700) $("clock").open = false;

const LABELS = { idle: "Talk", starting: "Cancel", talking: "End", finishing: "Stop" };
const STATUS = {
  idle: READY,
  starting: "Connecting…",
  talking: "Listening. Speak whenever you like.",
  finishing: "Finishing the answer…",
};

const view = {
  state(name) {
    document.body.dataset.state = name;
    $("talk").textContent = LABELS[name];
    $("status").textContent = STATUS[name];
    $("hint").hidden = name === "idle" || name === "starting";
    if (name === "starting") trouble("");
    if (name === "idle") transcript.end();
  },
  opened({ model }) {
    $("model").textContent = model;
    $("welcome").hidden = true;
    strip.reset();
    transcript.begin();
    divide();
  },
  transcript: (event) => transcript.show("user", event.transcript, event.frame_index),
  text: (event) => transcript.show("assistant", event.text, event.frame_index),
  call: (event) => transcript.show("call", event.text, event.frame_index),
  timings: (event) => strip.add(event),
  counted(counters) {
    transcript.tick(counters.framesHeard);
    strip.countUnderruns(counters.underruns);
    $("round-trip").textContent = `${milliseconds(counters.roundTripMs)} ms`;
    $("buffered").textContent = `${Math.round(counters.bufferedMs)} ms`;
    $("underruns").textContent = String(counters.underruns);
    $("played").textContent = `${counters.playedS.toFixed(1)} s`;
  },
  levels(peaks) {
    for (const [way, peak] of Object.entries(peaks)) {
      document.body.style.setProperty(`--level-${way}`, Math.sqrt(peak).toFixed(2));
    }
  },
  trouble: (error) => explain(error),
};

export const conversation = new Conversation(realtimeUrl(), view);

// -- the button and the keys

$("talk").addEventListener("click", () => {
  if (conversation.state === "idle") start();
  else if (conversation.state === "talking") conversation.end();
  else conversation.cancel();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") conversation.cancel();
});

addEventListener("pagehide", () => conversation.cancel());

function start() {
  if (!$("settings").checkValidity()) {
    // A field that is folded away cannot be pointed at.
    $("settings-fold").open = true;
    return void $("settings").reportValidity();
  }
  const instructions = $("instructions").value.trim();
  const settings = { seed: Number($("seed").value), cushionS: Number($("cushion").value) * FRAME_S };
  if (instructions !== "") settings.system_prompt = instructions;
  conversation.start(settings, key());
}

// -- the key

const key = () => sessionStorage.getItem(KEY) ?? "";

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key-form").hidden = true;
  trouble("");
  $("talk").disabled = false;
  $("talk").focus();
});

function askForKey(text) {
  $("key-form").hidden = false;
  $("talk").disabled = true;
  $("key").focus();
  trouble(text);
}

// -- what went wrong

/** A browser does not say why an upgrade was refused; the server's other addresses do. */
async function explain(error) {
  if (error.badKey) return askForKey(error.message);
  if (!error.refused) return trouble(error.message);
  if (!(await accepts(key()))) return askForKey(key() === "" ? "This server wants an API key." : "The server does not take this key.");
  const { ready, text } = await health();
  if (!ready) return void waitForModel();
  trouble(`${error.message} ${text === READY ? "The server is there; it may not admit this page’s address." : text}`);
}

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = text === "";
}

// -- the model loads while the page is already there

async function waitForModel() {
  const { ready, text } = await health();
  if (conversation.state === "idle") $("status").textContent = text;
  $("talk").disabled = !ready;
  if (!ready) setTimeout(waitForModel, HEALTH_MS);
}

/** Where a session begins in the transcript. */
function divide() {
  const line = document.createElement("li");
  line.className = "session";
  line.textContent = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  $("transcript").append(line);
}

waitForModel();
