/** One session of /v1/realtime: its messages, its order, its ends. Knows nothing of sound devices or of the page. */

import { fromBase64, toBase64 } from "./pcm.js";

/** Seconds that the server may take to open the session, its system prompt included. */
const OPEN_TIMEOUT_S = 120;
/** Seconds that it may take to confirm a cancel. */
const CANCEL_TIMEOUT_S = 3;

/** What a subprotocol may consist of. */
const TOKEN = /^[\w!#$%&'*+.^`|~-]*$/;

const REASONS = {
  server_busy: "Somebody else is talking to the model. Try again when they have finished.",
  1001: "The server was stopped.",
  1006: "The connection was lost.",
  1009: "The server refused a message as too long.",
  1011: "The model failed on the server.",
  1012: "The server restarts.",
};

/** Why a session did not open or did not end well. `refused`: the server did not take the upgrade; `badKey`: it cannot be sent. */
export class SessionError extends Error {
  constructor(message, { refused = false, badKey = false } = {}) {
    super(message);
    this.refused = refused;
    this.badKey = badKey;
  }
}

export class RealtimeSession {
  /**
   * handlers: transcript({frame_index, transcript}), text({frame_index, text}), call({frame_index, text}),
   * audio(frame_index, Int16Array), timings(event), problem(code, message), ended(error or null).
   * `ended` comes once, after an open that succeeded.
   */
  constructor(url, key, handlers) {
    this.handlers = handlers;
    this.opened = false;
    this.over = false;
    this.lastError = null;
    this.socket = new WebSocket(url, subprotocols(key));
  }

  /** Send `session.update` with these fields; resolves with the server's session once it is ready. */
  open(fields) {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => this.fail(`No session within ${OPEN_TIMEOUT_S} s.`), OPEN_TIMEOUT_S * 1000);
      this.settle = (error, session) => {
        clearTimeout(timer);
        this.settle = null;
        if (error) return reject(error);
        this.opened = true;
        resolve(session);
      };
      this.socket.onmessage = ({ data }) => this.receive(JSON.parse(data), fields);
      this.socket.onclose = (close) => this.closed(close);
    });
  }

  receive(event, fields) {
    const { handlers } = this;
    switch (event.type) {
      case "session.created":
        this.created = true;
        return this.send({ type: "session.update", session: fields });
      case "session.updated":
        return this.settle?.(null, event.session);
      case "conversation.item.input_audio_transcription.delta":
        return handlers.transcript(event);
      case "response.text.delta":
        return handlers.text(event);
      case "response.function.delta":
        return handlers.call(event);
      case "response.audio.delta":
        return handlers.audio(event.frame_index, fromBase64(event.delta));
      case "vcpipe.frame_timing":
        return handlers.timings(event);
      case "response.done":
      case "response.cancelled":
        return this.finish(null);
      case "error":
        return this.failed(event.error);
    }
  }

  failed({ code, message }) {
    this.lastError = REASONS[code] ?? message;
    if (this.opened) this.handlers.problem(code, message);
    else this.fail(this.lastError);
  }

  closed({ code, reason }) {
    const message = this.lastError ?? REASONS[code] ?? (reason || `The server closed the connection (${code}).`);
    const refused = !this.created && this.lastError === null;
    this.finish(new SessionError(message, { refused }));
  }

  fail(message) {
    this.finish(new SessionError(message));
  }

  /** The one way out: tells whoever waits, and closes the socket. */
  finish(error) {
    if (this.over) return;
    this.over = true;
    this.socket.close();
    if (this.settle) this.settle(error ?? new SessionError("The session ended before it began."));
    else this.handlers.ended(error);
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  /** @param {Int16Array} pcm at the session's input rate, mono */
  append(pcm) {
    this.send({ type: "input_audio_buffer.append", audio: toBase64(pcm) });
  }

  /** No more speech; what is left of the answer follows, then `ended`. */
  commit() {
    this.send({ type: "input_audio_buffer.commit" });
  }

  /** Drop everything; `ended` follows. */
  cancel() {
    this.send({ type: "session.cancel" });
    setTimeout(() => this.finish(null), CANCEL_TIMEOUT_S * 1000);
  }

  /** Forget it, whatever it does; nobody is told. */
  close() {
    this.over = true;
    this.socket.close();
  }

  /** Give up while it opens: `open` rejects. */
  abandon() {
    this.fail("The session was abandoned.");
  }
}

/** A browser cannot set headers on an upgrade, so the key travels as a subprotocol. */
function subprotocols(key) {
  if (!TOKEN.test(key)) {
    const accepted = "letters, digits and !#$%&'*+-.^_`|~";
    throw new SessionError(`This key has characters that a browser cannot send. It may hold ${accepted}`, { badKey: true });
  }
  return key ? ["realtime", `openai-insecure-api-key.${key}`] : [];
}
