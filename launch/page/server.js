/** What the server says of itself outside of a session: is the model ready, and does it want a key. */

/** Addresses are relative to the page, so that it works behind a proxy that puts it into a folder. */
const address = (path) => new URL(path, document.baseURI);

/** @returns {URL} of the realtime endpoint */
export function realtimeUrl() {
  const url = address("v1/realtime");
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url;
}

export const READY = "Ready.";

/** {ready, text}: whether the model can be talked to, and what to tell the user. */
export async function health() {
  let answer;
  try {
    answer = await fetch(address("health"), { cache: "no-store" });
  } catch {
    return { ready: false, text: "The server does not answer." };
  }
  const said = await answer.json().catch(() => ({}));
  if (said.status === "loading") return { ready: false, text: `The model is loading: ${loadedPercent(said.stages)} %.` };
  // A server whose model has failed starts it for the next session.
  if (said.status === "failed") return { ready: true, text: `${said.error}. The next talk starts the model anew.` };
  return answer.ok ? { ready: true, text: READY } : { ready: false, text: `The server answers ${answer.status}.` };
}

/** Mean over the stages; one that has said nothing yet is at its beginning. */
function loadedPercent(stages) {
  const fractions = Object.values(stages).map(({ fraction }) => fraction ?? 0);
  return Math.round((100 * fractions.reduce((sum, fraction) => sum + fraction, 0)) / fractions.length);
}

/** Whether the server takes this key ("" for none). */
export async function accepts(key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  try {
    return (await fetch(address("v1/models"), { headers, cache: "no-store" })).status !== 401;
  } catch {
    return true;
  }
}
