/**
 * What was said, in paragraphs by speaker, and read out to screen readers sentence by sentence.
 *
 * The model listens and speaks at once and has no turns: a paragraph of a speaker goes on until the other has spoken and this one
 * has paused. The texts of the events are cumulative, so a paragraph is the rest of the text from where it began.
 */

/** Frames without a word after which a speaker's next words start anew, if the other has spoken. */
const PAUSE_FRAMES = 10;
/** Pixels from the end within which the view follows what is added. */
const FOLLOW_PX = 80;
/** A character of which only some bytes have come. */
const UNFINISHED = /\uFFFD+$/;
const SENTENCE_END = /[.!?…。！？]["'”’)]?\s*$/;

const SPEAKERS = { user: "You", assistant: "Model", call: "Call" };

export class Transcript {
  /** list: element of the paragraphs; announcer: an aria-live element that nobody sees. */
  constructor(list, announcer) {
    this.list = list;
    this.announcer = announcer;
    this.view = list.parentElement;
    this.atEnd = true;
    this.view.addEventListener("scroll", () => (this.atEnd = this.distance() < FOLLOW_PX), { passive: true });
    new ResizeObserver(() => this.follow()).observe(this.view);
    this.begin();
  }

  /** A new session: its texts start empty. */
  begin() {
    for (const open of this.list.querySelectorAll(".open")) open.classList.remove("open");
    this.tracks = {};
    for (const speaker of Object.keys(SPEAKERS)) {
      this.tracks[speaker] = { text: "", from: 0, announced: 0, frame: -Infinity, paragraph: null };
    }
    this.latest = null;
  }

  /** The speaker's whole text of this session as of this frame. */
  show(speaker, text, frame) {
    const track = this.tracks[speaker];
    text = text.replace(UNFINISHED, "");
    if (text === track.text) return;
    const othersSpoke = this.latest !== speaker;
    if (track.paragraph === null || (othersSpoke && frame - track.frame > PAUSE_FRAMES)) this.startParagraph(speaker);
    track.text = text;
    track.frame = frame;
    track.paragraph.textContent = text.slice(track.from).trimStart();
    this.latest = speaker;
    if (SENTENCE_END.test(text)) this.announce(speaker);
    this.follow();
  }

  startParagraph(speaker) {
    const track = this.tracks[speaker];
    this.announce(speaker);
    track.paragraph?.parentElement.classList.remove("open");
    const item = document.createElement("li");
    item.className = `${speaker} open`;
    const name = document.createElement("span");
    name.className = "speaker";
    name.textContent = SPEAKERS[speaker];
    track.paragraph = document.createElement("p");
    track.from = track.text.length;
    item.append(name, track.paragraph);
    this.list.append(item);
  }

  /** Time passes: who has paused is read out. */
  tick(frame) {
    for (const [speaker, track] of Object.entries(this.tracks)) {
      if (frame - track.frame > PAUSE_FRAMES) this.announce(speaker);
    }
  }

  /** The session is over. */
  end() {
    for (const speaker of Object.keys(SPEAKERS)) this.announce(speaker);
    for (const open of this.list.querySelectorAll(".open")) open.classList.remove("open");
  }

  announce(speaker) {
    const track = this.tracks[speaker];
    const news = track.text.slice(track.announced).trim();
    track.announced = track.text.length;
    if (news === "") return;
    const line = document.createElement("p");
    line.textContent = `${SPEAKERS[speaker]}: ${news}`;
    this.announcer.append(line);
    while (this.announcer.childElementCount > 5) this.announcer.firstElementChild.remove();
  }

  /** Pixels below what is seen. */
  distance() {
    return this.view.scrollHeight - this.view.scrollTop - this.view.clientHeight;
  }

  /** Stay at the end, unless the reader has scrolled back. */
  follow() {
    if (this.atEnd) this.view.scrollTop = this.view.scrollHeight;
  }
}
