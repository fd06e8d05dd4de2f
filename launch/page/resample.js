/**
 * Sample rate conversion that keeps its state between calls, so that the edges of chunks are not heard.
 *
 * A windowed sinc in exact rational steps (one kernel for each fraction of a sample that can occur): no drift however long it
 * runs. Both worklets use it; it needs nothing of the browser.
 */

/** Zero crossings of the sinc on either side, and the shape of the Kaiser window: about 80 dB down. */
const ZERO_CROSSINGS = 24;
const KAISER_BETA = 8;
/** Where the pass band ends, of the lower of the two Nyquist rates; the rest is the filter's slope. */
const PASS_BAND = 0.93;

export class Resampler {
  /** @param {number} from Hz @param {number} to Hz */
  constructor(from, to) {
    const divisor = greatestCommonDivisor(Math.round(from), Math.round(to));
    this.up = Math.round(to) / divisor;
    this.down = Math.round(from) / divisor;
    const cutoff = Math.min(1, to / from) * PASS_BAND;
    this.half = Math.ceil(ZERO_CROSSINGS / cutoff);
    this.taps = 2 * this.half;
    this.kernels = this.up === this.down ? null : polyphase(this.up, this.half, cutoff);
    this.reset();
  }

  /** Forget what was pushed. */
  reset() {
    this.phase = 0;
    // The first output stands at the first input: what came before it was silence.
    this.pending = new Float32Array(this.half - 1);
  }

  /** Take any number of samples and return those that can be computed by now. @param {Float32Array} input */
  push(input) {
    if (this.kernels === null) return input;
    const { taps, up, down, kernels } = this;
    const buffer = new Float32Array(this.pending.length + input.length);
    buffer.set(this.pending);
    buffer.set(input, this.pending.length);
    const output = new Float32Array(Math.ceil(((buffer.length + 1) * up) / down) + 1);
    let count = 0;
    let at = 0;
    let phase = this.phase;
    while (at + taps <= buffer.length) {
      const kernel = phase * taps;
      let sum = 0;
      for (let k = 0; k < taps; k++) sum += buffer[at + k] * kernels[kernel + k];
      output[count++] = sum;
      phase += down;
      at += Math.floor(phase / up);
      phase %= up;
    }
    this.phase = phase;
    this.pending = buffer.slice(at);
    return output.subarray(0, count);
  }

  /** The last samples, which waited for what follows them. */
  flush() {
    return this.kernels === null ? new Float32Array(0) : this.push(new Float32Array(this.half));
  }
}

/** Kernels of all phases, one after the other: phase p stands p/up of a sample after tap half-1. */
function polyphase(up, half, cutoff) {
  const taps = 2 * half;
  const kernels = new Float32Array(up * taps);
  for (let phase = 0; phase < up; phase++) {
    const kernel = kernels.subarray(phase * taps, (phase + 1) * taps);
    let sum = 0;
    for (let k = 0; k < taps; k++) {
      const time = k - half + 1 - phase / up;
      kernel[k] = sinc(cutoff * time) * kaiser(time / half);
      sum += kernel[k];
    }
    for (let k = 0; k < taps; k++) kernel[k] /= sum;
  }
  return kernels;
}

function sinc(x) {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}

function kaiser(x) {
  return Math.abs(x) > 1 ? 0 : bessel0(KAISER_BETA * Math.sqrt(1 - x * x)) / bessel0(KAISER_BETA);
}

/** Modified Bessel function of the first kind, order 0, by its power series. */
function bessel0(x) {
  let sum = 1;
  let term = 1;
  for (let k = 1; term > 1e-12 * sum; k++) {
    term *= (x / (2 * k)) ** 2;
    sum += term;
  }
  return sum;
}

function greatestCommonDivisor(a, b) {
  return b === 0 ? a : greatestCommonDivisor(b, a % b);
}
