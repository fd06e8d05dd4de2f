/**
 * The microphone on the audio thread: any rate and number of channels in, frames of 16 kHz mono PCM16 out.
 *
 * Posts {pcm: Int16Array, peak} a frame. The message "end" makes it post the samples that fill no frame, {pcm, last: true}, and stop.
 */

import { Resampler } from "./resample.js";

class Microphone extends AudioWorkletProcessor {
  constructor({ processorOptions: { rate, frameSamples } }) {
    super();
    this.resampler = new Resampler(sampleRate, rate);
    this.frame = new Int16Array(frameSamples);
    this.filled = 0;
    this.peak = 0;
    this.ended = false;
    this.port.onmessage = () => this.end();
  }

  process([channels]) {
    if (this.ended) return false;
    if (channels.length > 0) this.take(this.resampler.push(mono(channels)));
    return true;
  }

  take(samples) {
    for (const sample of samples) {
      const clipped = Math.max(-1, Math.min(1, sample));
      this.peak = Math.max(this.peak, Math.abs(clipped));
      this.frame[this.filled++] = Math.round(clipped * 32767);
      if (this.filled === this.frame.length) this.post(false);
    }
  }

  post(last) {
    const pcm = this.frame.slice(0, this.filled);
    this.port.postMessage({ pcm, peak: this.peak, last }, [pcm.buffer]);
    this.filled = 0;
    this.peak = 0;
  }

  end() {
    if (this.ended) return;
    this.ended = true;
    this.take(this.resampler.flush());
    this.post(true);
  }
}

/** Mean of the channels. */
function mono(channels) {
  if (channels.length === 1) return channels[0];
  const mixed = new Float32Array(channels[0].length);
  for (const channel of channels) {
    for (let i = 0; i < mixed.length; i++) mixed[i] += channel[i] / channels.length;
  }
  return mixed;
}

registerProcessor("microphone", Microphone);
