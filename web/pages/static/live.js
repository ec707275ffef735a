// Keeps a page up to date: parts marked data-live are fetched again when something happened, and how far jobs at work
// are is written where data-job and data-told name them. Without this script the page can be read and used as well.
"use strict";

const PAUSE = Number(document.body.dataset.pause); // ms between two fetches of the page, however much happens
const SECOND = 1000; // ms between two looks at how long ago things were, and how long others still take
const sent = new Map(); // id of a part -> its markup as the server sent it last, but for times, which are told here
let waiting = null;
let fetched = 0;
let fetching = false;
let again = false; // whether something happened meanwhile

const parts = () => document.querySelectorAll("[data-live]");
const timeless = (markup) => markup.replace(/(<time datetime=[^>]*>)[^<]*/g, "$1");
parts().forEach((part) => sent.set(part.id, timeless(part.innerHTML)));

// One at a time, or an older answer would replace a newer one, and a slow service would be asked ever more.
async function refresh() {
  waiting = null;
  if (document.hidden) return;
  fetched = Date.now();
  fetching = true;
  try {
    await fetchPage();
  } catch {
    tellLive("offline"); // the stream says when the service is there again
  } finally {
    fetching = false;
    if (again) soon();
    again = false;
  }
}

function tellLive(state) {
  const live = document.getElementById("live");
  if (live.textContent !== state) live.textContent = state;
}

async function fetchPage() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (answer.redirected && new URL(answer.url).pathname === "/sign-in") return location.assign(answer.url);
  if (!answer.ok) return tellLive(answer.status === 404 ? "deleted" : "offline");
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (events?.readyState === EventSource.CLOSED) listen(); // it was refused, as when there were too many readers
  else if (events?.readyState === EventSource.OPEN) tellLive("live");
  const there = new Set([...page.querySelectorAll("[data-live]")].map((part) => part.id));
  const here = new Set([...parts()].map((part) => part.id));
  for (const id of there) if (!here.has(id)) place(page, id);
  for (const id of here) if (!there.has(id)) document.getElementById(id).remove();
  for (const id of there) if (here.has(id)) replace(document.getElementById(id), page.getElementById(id).innerHTML);
  tellHere();
}

function place(page, id) {
  const part = page.getElementById(id);
  let before = part.previousElementSibling;
  while (before && !document.getElementById(before.id)) before = before.previousElementSibling;
  if (before) document.getElementById(before.id).after(document.importNode(part, true));
  sent.set(id, timeless(part.innerHTML));
}

function replace(part, markup) {
  if (sent.get(part.id) === timeless(markup)) return;
  const typing = part.contains(document.activeElement) && document.activeElement.matches("input:not([type=checkbox]), textarea, select");
  if (typing) return; // it comes with the next one
  sent.set(part.id, timeless(markup));
  const focus = part.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  const open = new Map([...part.querySelectorAll("details[id]")].map((one) => [one.id, one.open]));
  const marked = [...part.querySelectorAll("input:checked")].map((one) => one.id).filter(Boolean);
  const scrolled = [...part.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
  part.innerHTML = markup;
  part.querySelectorAll("details[id]").forEach((one) => open.has(one.id) && (one.open = open.get(one.id)));
  marked.forEach((id) => part.querySelector(`#${CSS.escape(id)}`)?.setAttribute("checked", ""));
  part.querySelectorAll(".scroll").forEach((one, i) => scrolled[i] && one.scrollTo(...scrolled[i]));
  if (focus === null) return;
  part.tabIndex = -1; // what had the focus may be gone: the next of its place would be of another job or worker
  (part.querySelector(focus) ?? part).focus({ preventScroll: true });
}

// What finds the same control in new markup: by its id, its address, its form or what it is about.
function nameOf(element) {
  const with_ = (name, of) => `[${name}="${CSS.escape(of.getAttribute(name))}"]`;
  if (element.id) return `#${CSS.escape(element.id)}`;
  if (element.matches("details[id] > summary")) return `#${CSS.escape(element.parentElement.id)} > summary`;
  if (element.matches("a[href]")) return `a${with_("href", element)}`;
  if (element.form) return `form${with_("action", element.form)} ${element.localName}`;
  return element.matches("[aria-label]") ? with_("aria-label", element) : ":not(*)";
}

function soon() {
  if (fetching) again = true;
  else waiting ??= setTimeout(refresh, Math.max(100, fetched + PAUSE - Date.now()));
}

// Figures as the server writes them: decimal units.
function bytes(size) {
  if (size < 1000) return `${Math.round(size)} ${Math.round(size) === 1 ? "byte" : "bytes"}`;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    size /= 1000;
    if (Math.round(size * 10) < 10000) return `${size.toFixed(1)} ${unit}`;
  }
  return `${(size / 1000).toFixed(1)} PB`;
}

const news = new Map(); // job -> what is to be shown in the next frame
const logged = new Map(); // job -> how many lines its log has
function progress(now) {
  if (!news.size) requestAnimationFrame(show);
  news.set(now.id, now);
  if (document.getElementById("log") && now.logged !== logged.get(now.id)) soon();
  logged.set(now.id, now.logged);
}

// "12.0 MB of 40.0 MB, 3.1 MB/s"
const far = (done, size, rate) => `${bytes(done)} of ${bytes(size)}${rate ? `, ${bytes(rate)}/s` : ""}`;

function show() {
  document.querySelectorAll("progress[data-job]").forEach((bar) => {
    const job = news.get(bar.dataset.job);
    if (job) [bar.max, bar.value] = [job.bytes || 1, job.bytes_done];
  });
  document.querySelectorAll("[data-told]").forEach((told) => {
    const job = news.get(told.dataset.told);
    if (job) told.textContent = far(Math.min(job.bytes_done, job.bytes), job.bytes, job.rate);
  });
  const units = new Map([...news.values()].flatMap((job) => job.claims).map((claim) => [claim.unit, { ...claim }]));
  document.querySelectorAll("progress[data-unit]").forEach((bar) => showFile(bar, units.get(bar.dataset.unit)));
  news.clear();
}

// Of a page of one job: what a unit has copied since its last seal counts for its files in their order.
function showFile(bar, claim) {
  if (!claim) return;
  const done = Math.min(bar.max, claim.bytes);
  claim.bytes -= done;
  if (done && !bar.value) soon(); // another file is at hand
  bar.value = done;
  bar.nextElementSibling.textContent = far(done, bar.max, done && done < bar.max ? claim.rate : null);
}

function tellTimes() {
  document.querySelectorAll("time[datetime]:not(.here)").forEach((time) => {
    const passed = Math.round((Date.now() - Date.parse(time.dateTime)) / 1000);
    const distance = Math.abs(passed);
    const units = [["d", 86400], ["h", 3600], ["min", 60]];
    const [unit, length] = units.find(([, length]) => distance >= 2 * length) ?? ["s", 1];
    const span = `${Math.floor(distance / length)} ${unit}`;
    const text = passed < 0 ? `in ${span}` : `${span} ago`;
    const shown = "left" in time.dataset ? `about ${passed < 0 ? span : "0 s"} left` : text;
    if (time.textContent !== shown) time.textContent = shown;
  });
}

// Times that have both clocks: the reader's, in the form that the server writes.
function tellHere() {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  document.querySelectorAll(".zone").forEach((head) => (head.textContent = `${zone} (yours)`));
  document.querySelectorAll("time.here").forEach((time) => {
    const at = new Date(time.dateTime);
    const day = at.toLocaleDateString("en", { weekday: "short" });
    time.textContent = `${day} ${at.toLocaleString("sv", { dateStyle: "short", timeStyle: "short" })}`;
  });
}

// Also over plain HTTP, where a page has no clipboard of its own.
document.addEventListener("click", ({ target }) => {
  if (!target.matches("button.copy")) return;
  getSelection().selectAllChildren(target.previousElementSibling);
  target.textContent = document.execCommand("copy") ? "Copied" : "Selected";
});

const address = document.body.dataset.events;
let events = null;

// One connection for each page that is seen: browsers have six for a service, and hidden pages need none.
function listen() {
  events?.close();
  events = new EventSource(address);
  events.addEventListener("open", () => {
    soon(); // what happened since the page was made, or while nothing came
    tellLive("live");
  });
  events.addEventListener("error", () => tellLive("offline"));
  events.addEventListener("event", soon);
  events.addEventListener("progress", (message) => progress(JSON.parse(message.data).progress));
}

if (address) {
  listen();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return events.close();
    listen();
    soon();
  });
  setInterval(soon, 10 * PAUSE); // what no event tells, as a worker that went away
}
setInterval(tellTimes, SECOND);
tellHere();

// A link from elsewhere comes without the cookie, which is of this site alone; asked from here it is there.
const signIn = document.querySelector(".sign-in form");
if (signIn && new URLSearchParams(location.search).has("next")) {
  const next = new URL(signIn.action).searchParams.get("next"); // which the service has checked
  fetch("/api/v1/service").then((answer) => answer.ok && location.replace(next), () => {});
}
