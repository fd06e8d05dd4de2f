/** The two ends of the sound: the microphone's frames and the loudspeaker's queue, both on one AudioContext at the device's rate. */

const WORKLETS = ["microphone.worklet.js", "playback.worklet.js"];

const REFUSALS = {
  NotAllowedError: "The microphone is not allowed here. Allow it in the browser's address bar, then press Talk.",
  NotFoundError: "No microphone was found. Plug one in, then press Talk.",
  NotReadableError: "The microphone is in use by another program, or its driver failed.",
};

export class Sound {
  /** Ask for the microphone and prepare both worklets; call it on a click, or browsers keep the sound off. */
  static async open() {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new Error("Browsers give the microphone only to https pages and to localhost. Open this page on one of them.");
    }
    const context = new AudioContext({ latencyHint: "interactive" });
    try {
      const [stream] = await Promise.all([
        navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: true, autoGainControl: true } }),
        ...WORKLETS.map((name) => context.audioWorklet.addModule(new URL(name, import.meta.url))),
        context.resume(),
      ]);
      return new Sound(context, stream);
    } catch (error) {
      await context.close();
      throw new Error(REFUSALS[error.name] ?? `The sound could not be started: ${error.message}`);
    }
  }

  constructor(context, stream) {
    this.context = context;
    this.stream = stream;
    this.counters = { receivedS: 0, playedS: 0, skippedS: 0, underruns: 0, bufferedMs: 0, peak: 0 };
  }

  /**
   * Begin to record and to play.
   * formats: {inputRate, outputRate, frameSamples} of the session; cushionS: seconds in hand before playing.
   * heard({pcm, peak, last}) gets a frame every 80 ms, counted(counters) what was played, lost() a microphone that went away.
   */
  start(formats, cushionS, { heard, counted, lost }) {
    this.microphone = new AudioWorkletNode(this.context, "microphone", {
      numberOfOutputs: 0,
      processorOptions: { rate: formats.inputRate, frameSamples: formats.frameSamples },
    });
    this.playback = new AudioWorkletNode(this.context, "playback", {
      numberOfInputs: 0,
      outputChannelCount: [1],
      processorOptions: { rate: formats.outputRate, cushionS },
    });
    this.drained = new Promise((resolve) => {
      this.playback.port.onmessage = ({ data }) => {
        if (data.drained) resolve();
        if (!data.counters) return;
        this.counters = data.counters;
        counted(data.counters);
      };
    });
    this.microphone.port.onmessage = ({ data }) => heard(data);
    this.stream.getAudioTracks()[0].addEventListener("ended", lost);
    this.context.createMediaStreamSource(this.stream).connect(this.microphone);
    this.playback.connect(this.context.destination);
  }

  /** @param {Int16Array} pcm */
  play(pcm) {
    this.playback.port.postMessage({ pcm }, [pcm.buffer]);
  }

  /** Stop recording; what fills no frame comes as the last frame. */
  endRecording() {
    this.microphone.port.postMessage("end");
  }

  /** Be silent at once. */
  silence() {
    this.playback?.port.postMessage("empty");
  }

  /** Play out what is queued. */
  async endPlaying() {
    this.playback.port.postMessage("end");
    await this.drained;
  }

  /** Give the devices back. */
  async close() {
    for (const track of this.stream.getTracks()) track.stop();
    if (this.context.state !== "closed") await this.context.close();
  }
}
