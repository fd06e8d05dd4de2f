/**
 * The frame clock, drawn: a lane for each stage with its time of every frame of the last 10 s against the 80 ms line, and a lane
 * that shows how late frames came and where playback ran dry. The numbers beside the lanes say the same in text.
 */

/** Frames shown: 10 s. */
const FRAMES = 125;
const FRAME_MS = 80;
/** Milliseconds at the top of a lane; longer bars are cut there. */
const TOP_MS = 100;
/** A bar that is there is seen. */
const LEAST_MS = 4;
/** Where motion is unwelcome the lanes are redrawn so often (ms) and do not run. */
const CALM_MS = 1000;

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

export class Strip {
  /** table: has a row of data-lane for every stage and for "late", with a canvas and cells .typical and .worst. */
  constructor(table) {
    this.table = table;
    this.lanes = [...table.querySelectorAll("[data-lane]")].map((row) => ({
      name: row.dataset.lane,
      canvas: row.querySelector("canvas"),
      typical: row.querySelector(".typical"),
      worst: row.querySelector(".worst"),
    }));
    new ResizeObserver(() => this.redraw()).observe(table);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.reset();
  }

  reset() {
    this.frames = [];
    this.underruns = 0;
    this.redraw();
  }

  /** A `vcpipe.frame_timing` event: {stages: {name: ms}, lateness_ms}. */
  add({ stages, lateness_ms }) {
    this.frames.push({ ...stages, late: lateness_ms, dry: false });
    if (this.frames.length > FRAMES) this.frames.shift();
    this.redraw();
  }

  /** How often playback ran dry so far; marks the latest frame where that has grown. */
  countUnderruns(underruns) {
    if (underruns > this.underruns && this.frames.length > 0) this.frames.at(-1).dry = true;
    this.underruns = underruns;
    this.redraw();
  }

  /** At the next picture, or within a second where motion is unwelcome. */
  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    const draw = () => {
      this.waiting = false;
      this.draw();
    };
    if (reducedMotion.matches) setTimeout(draw, CALM_MS);
    else requestAnimationFrame(draw);
  }

  draw() {
    const style = getComputedStyle(this.table);
    const colours = Object.fromEntries(["bar", "rule", "accent"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
    for (const lane of this.lanes) {
      // Folded away.
      if (lane.canvas.clientWidth > 0) this.drawLane(lane, colours);
      this.tell(lane);
    }
  }

  drawLane({ name, canvas }, colours) {
    const scale = window.devicePixelRatio;
    const width = Math.round(canvas.clientWidth * scale);
    const height = Math.round(canvas.clientHeight * scale);
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    const step = width / FRAMES;
    const gap = step >= 3 * scale ? scale : 0;
    // Whole pixels, or narrow bars fade.
    const x = (i) => Math.round(width - (this.frames.length - i) * step);
    const y = (ms) => height - (Math.min(ms, TOP_MS) / TOP_MS) * height;
    const bar = (i, ms, colour) => {
      pen.fillStyle = colour;
      pen.fillRect(x(i), y(ms), Math.max(x(i + 1) - x(i) - gap, 1), height - y(ms));
    };
    this.frames.forEach((frame, i) => {
      const ms = frame[name];
      if (ms > 0) bar(i, Math.max(ms, LEAST_MS), ms > FRAME_MS ? colours.accent : colours.bar);
      if (name === "late" && frame.dry) mark(pen, x(i), height, scale, colours.accent);
    });
    pen.fillStyle = colours.rule;
    pen.fillRect(0, Math.round(y(FRAME_MS)), width, Math.max(1, Math.round(scale)));
  }

  tell({ name, typical, worst }) {
    const times = this.frames.map((frame) => frame[name]).filter((ms) => ms !== undefined);
    times.sort((a, b) => a - b);
    typical.textContent = times.length > 0 ? milliseconds(times[times.length >> 1]) : "–";
    worst.textContent = times.length > 0 ? milliseconds(times.at(-1)) : "–";
    worst.classList.toggle("over", times.length > 0 && times.at(-1) > FRAME_MS);
  }
}

/** A triangle that hangs from the top: here the loudspeaker had nothing to play. */
function mark(pen, x, height, scale, colour) {
  const size = 4 * scale;
  pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(x - size, 0);
  pen.lineTo(x + size, 0);
  pen.lineTo(x, size * 1.6);
  pen.fill();
  pen.fillRect(x - scale / 2, 0, scale, height);
}

export function milliseconds(ms) {
  return ms < 9.95 ? ms.toFixed(1) : String(Math.round(ms));
}
