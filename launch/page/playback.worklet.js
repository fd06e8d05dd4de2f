/**
 * Playback on the audio thread: chunks of PCM16 at the model's rate in, whatever size and rate the browser asks for out.
 *
 * Starts once the cushion is full, and fills it anew after an underrun. Messages: {pcm: Int16Array}; "empty" drops what is queued;
 * "end" plays the rest out. Posts its counters about ten times a second, and {drained: true} after the end.
 */

import { Resampler } from "./resample.js";

/** Below this peak a chunk counts as silence. */
const SILENCE = 0.004;
/** Chunks of silence are left out where more than this waits beyond the cushion: a stall must not delay the rest of the talk. */
const SPARE_S = 0.4;
const REPORT_S = 0.1;

class Playback extends AudioWorkletProcessor {
  constructor({ processorOptions: { rate, cushionS } }) {
    super();
    this.rate = rate;
    this.cushion = Math.round(cushionS * sampleRate);
    this.resampler = new Resampler(rate, sampleRate);
    this.counters = { receivedS: 0, playedS: 0, skippedS: 0, underruns: 0, bufferedMs: 0, peak: 0 };
    this.playing = false;
    this.ending = false;
    this.drained = false;
    this.sinceReport = 0;
    this.empty();
    this.port.onmessage = ({ data }) => this.obey(data);
  }

  obey(message) {
    if (message === "empty") this.empty();
    else if (message === "end") this.end();
    else this.take(message.pcm);
  }

  empty() {
    this.chunks = [];
    this.offset = 0;
    this.queued = 0;
    this.playing = false;
    this.resampler.reset();
  }

  end() {
    this.append(this.resampler.flush());
    this.ending = true;
  }

  take(pcm) {
    const samples = Float32Array.from(pcm, (value) => value / 32768);
    this.counters.receivedS += samples.length / this.rate;
    const silent = samples.every((value) => Math.abs(value) < SILENCE);
    if (silent && this.queued > this.cushion + SPARE_S * sampleRate) {
      this.counters.skippedS += samples.length / this.rate;
      return;
    }
    this.append(this.resampler.push(samples));
  }

  append(samples) {
    if (samples.length === 0) return;
    this.chunks.push(samples);
    this.queued += samples.length;
  }

  process(inputs, [channels]) {
    const out = channels[0];
    if (!this.playing) this.playing = this.queued > 0 && (this.ending || this.queued >= this.cushion);
    if (this.playing) {
      const taken = this.read(out);
      this.counters.playedS += taken / sampleRate;
      if (taken < out.length) this.ranDry();
    }
    for (const channel of channels) if (channel !== out) channel.set(out);
    if (this.ending && this.queued === 0) this.drain();
    this.report(out.length);
    return !this.drained;
  }

  /** Copy from the queue; returns how many samples there were. */
  read(out) {
    let filled = 0;
    while (filled < out.length && this.chunks.length > 0) {
      const chunk = this.chunks[0];
      const count = Math.min(chunk.length - this.offset, out.length - filled);
      out.set(chunk.subarray(this.offset, this.offset + count), filled);
      filled += count;
      this.offset += count;
      if (this.offset === chunk.length) {
        this.chunks.shift();
        this.offset = 0;
      }
    }
    this.queued -= filled;
    for (const value of out) this.counters.peak = Math.max(this.counters.peak, Math.abs(value));
    return filled;
  }

  ranDry() {
    this.playing = false;
    if (!this.ending) this.counters.underruns += 1;
  }

  drain() {
    if (this.drained) return;
    this.drained = true;
    this.post();
    this.port.postMessage({ drained: true });
  }

  report(samples) {
    this.sinceReport += samples;
    if (this.sinceReport >= REPORT_S * sampleRate) this.post();
  }

  post() {
    this.counters.bufferedMs = (this.queued / sampleRate) * 1000;
    this.port.postMessage({ counters: { ...this.counters } });
    this.counters.peak = 0;
    this.sinceReport = 0;
  }
}

registerProcessor("playback", Playback);
