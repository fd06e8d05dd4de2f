/** One talk from the press of the button to silence: a session and the sound, tied together, and every way out of them. */

import { Sound } from "./audio.js";
import { RealtimeSession, SessionError } from "./session.js";

/** Frames whose time of leaving is remembered, for the round trip. */
const REMEMBERED_FRAMES = 1024;
/** Milliseconds that playing out may take beyond what is queued. */
const DRAIN_MS = 2000;

/** What the page shows of a talk that is on; reset at each start. */
const newCounters = () => ({ framesSent: 0, framesHeard: 0, roundTripMs: 0, receivedS: 0, playedS: 0, skippedS: 0, underruns: 0 });

export class Conversation {
  /**
   * view: state(name), opened(session), transcript, text, call, timings as of RealtimeSession, counted(counters), levels({in|out}),
   * trouble(error). States: "idle", "starting", "talking", "finishing".
   */
  constructor(url, view) {
    this.url = url;
    this.view = view;
    this.counters = newCounters();
    this.sound = this.session = null;
    this.enter("idle");
  }

  enter(state) {
    this.state = state;
    this.view.state(state);
  }

  /** settings: {system_prompt, seed, cushionS}; key: the API key or "". */
  async start({ cushionS, ...fields }, key) {
    if (this.state !== "idle") return;
    this.counters = newCounters();
    this.cancelled = false;
    this.sentAt = new Float64Array(REMEMBERED_FRAMES);
    this.enter("starting");
    try {
      this.sound = await Sound.open();
      if (this.cancelled) throw new SessionError("Cancelled.");
      this.session = new RealtimeSession(this.url, key, this.handlers());
      const opened = await this.session.open({ ...fields, timings: true });
      this.record(opened, cushionS);
      this.view.opened(opened);
      this.enter("talking");
    } catch (error) {
      await this.leave(this.cancelled ? null : error);
    }
  }

  handlers() {
    const { view } = this;
    return {
      transcript: (event) => view.transcript(event),
      text: (event) => view.text(event),
      call: (event) => view.call(event),
      timings: (event) => view.timings(event),
      audio: (frameIndex, pcm) => this.answered(frameIndex, pcm),
      problem: (code, message) => this.refused(code, message),
      ended: (error) => this.ended(error),
    };
  }

  record(opened, cushionS) {
    const formats = {
      inputRate: opened.input_audio_format.sample_rate,
      outputRate: opened.output_audio_format.sample_rate,
      frameSamples: opened.frame_samples,
    };
    this.sound.start(formats, cushionS, {
      heard: (frame) => this.heard(frame),
      counted: (counters) => this.counted(counters),
      lost: () => this.end("The microphone went away."),
    });
  }

  heard({ pcm, peak, last }) {
    // Frames that were on their way from the audio thread when the talk ended.
    if (this.session === null || this.cancelled) return;
    if (pcm.length > 0) {
      this.sentAt[this.counters.framesSent % REMEMBERED_FRAMES] = performance.now();
      this.counters.framesSent += 1;
      this.session.append(pcm);
    }
    this.view.levels({ in: peak });
    if (last) this.session.commit();
  }

  answered(frameIndex, pcm) {
    this.counters.framesHeard += 1;
    this.counters.roundTripMs = performance.now() - this.sentAt[frameIndex % REMEMBERED_FRAMES];
    this.sound.play(pcm);
  }

  counted({ peak, ...played }) {
    Object.assign(this.counters, played);
    this.view.levels({ out: peak });
    this.view.counted(this.counters);
  }

  /** An error event. The model takes nothing more after an inference error, the session's limit among them. */
  refused(code, message) {
    if (code === "inference_error") this.end(message);
    else this.view.trouble(new SessionError(message));
  }

  /** Stop listening and let it finish; why: a reason that is not the user's. */
  end(why = null) {
    if (this.state !== "talking") return;
    if (why !== null) this.view.trouble(new SessionError(why));
    this.enter("finishing");
    this.sound.endRecording();
  }

  /** Be silent at once, whatever is going on. */
  cancel() {
    if (this.state === "idle") return;
    this.cancelled = true;
    if (this.state === "starting") return this.session?.abandon();
    this.sound.silence();
    this.session.cancel();
    this.enter("finishing");
  }

  async ended(error) {
    const { sound } = this;
    if (error === null && !this.cancelled) await atMost(sound.endPlaying(), sound.counters.bufferedMs + DRAIN_MS);
    await this.leave(error);
  }

  async leave(error) {
    const { sound, session } = this;
    this.sound = this.session = null;
    session?.close();
    await sound?.close();
    this.view.levels({ in: 0, out: 0 });
    this.enter("idle");
    if (error !== null) this.view.trouble(error);
  }
}

function atMost(promise, ms) {
  return Promise.race([promise, new Promise((resolve) => setTimeout(resolve, ms))]);
}
