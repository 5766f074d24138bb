// The dashboard at `/`: a chat, and what /live reports. Nothing is loaded from elsewhere, and nothing is kept but
// the key, in this tab.
"use strict";

const at = id => document.getElementById(id);
const key = () => sessionStorage.getItem("penstock-key") || "";
const headers = () => key() ? { authorization: `Bearer ${key()}` } : {};
const TIERS = { hbm: "Device", dram: "Host", disk: "Storage, as remembered" };
const PHASES = ["queued", "fetching", "receiving", "loading", "prefill", "sending", "decode.device", "decode.to_host",
  "decode.host", "decode.to_device", "paused", "dropped"];
const ASIDE = new Set(["fetching", "receiving", "sending", "decode.to_host", "paused", "dropped"]);

const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

// `name{a="b",c="d"}` -> [name, {a: b, c: d}]
function parse(metric) {
  const [, name, rest] = /^([^{]*)(?:\{(.*)\})?$/.exec(metric);
  const labels = {};
  for (const [, label, value] of (rest || "").matchAll(/(\w+)="?([^",]*)"?/g)) labels[label] = value;
  return [name, labels];
}

// [[labels, value], ...] of all metrics of that name
function all(values, name) {
  return Object.entries(values).map(([k, v]) => [parse(k), v]).filter(([[n]]) => n === name)
    .map(([[, labels], v]) => [labels, v]);
}

const sum = (values, name) => all(values, name).reduce((total, [, v]) => total + v, 0);
const count = x => x.toLocaleString("en", { maximumFractionDigits: x < 10 ? 1 : 0 });
const percent = (part, whole) => whole > 0 ? `${(100 * part / whole).toFixed(1)} %` : "–";

// Pages of a tier: in use, cached, in limbo, free; null without that tier.
function shares(values, tier) {
  const pages = values[`${tier}_pages`];
  if (!pages) return null;
  const free = values[`${tier}_pages_free`] || 0, limbo = values[`${tier}_pages_fenced`] || 0;
  const used = tier === "hbm" ? Math.min(values.hbm_pages_in_use || 0, pages - free - limbo) : 0;
  return { pages, used, limbo, free, cached: Math.max(0, pages - used - limbo - free) };
}

function drawTiers(values, pageTokens) {
  at("tiers").replaceChildren(...Object.entries(TIERS).flatMap(([tier, name]) => {
    const s = shares(values, tier);
    if (!s) return [];
    const text = `${name}: ${count((s.pages - s.free) * pageTokens)} of ${count(s.pages * pageTokens)} tokens`;
    const bar = make("div", undefined, "bar");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${text}; ${percent(s.used, s.pages)} in use, ` +
      `${percent(s.cached, s.pages)} cached, ${percent(s.free, s.pages)} free`);
    for (const kind of ["used", "cached", "limbo", "free"]) {
      const part = make("span", undefined, kind);
      part.style.flexGrow = s[kind] / s.pages;
      bar.append(part);
    }
    return [make("div", text), bar];
  }));
}

// Requests that are drawn one by one, by engine and number: their dot, what is known, the phases so far.
const requests = new Map();
const turnsSeen = new Map();            // of each engine, the number of its last turn
let chosen = "";
const calm = matchMedia("(prefers-reduced-motion: reduce)");

function boxOf(phase) {
  let box = at("phases").querySelector(`[data-phase="${phase}"]`);
  if (!box) {
    box = make("li", undefined, ASIDE.has(phase) ? "aside" : "");
    box.dataset.phase = phase;
    box.append(make("b", 0), phase, make("span", undefined, "dots"));
    const later = [...at("phases").children].find(l => PHASES.indexOf(l.dataset.phase) > PHASES.indexOf(phase));
    at("phases").insertBefore(box, later || null);
  }
  return box;
}

// The dot goes from where it was to its place in another phase.
function move(dot, box) {
  const from = dot.isConnected ? dot.getBoundingClientRect() : null;
  const held = document.activeElement === dot;
  box.querySelector(".dots").append(dot);
  if (held) dot.focus();
  if (!from || calm.matches) return;
  const to = dot.getBoundingClientRect();
  dot.animate([{ transform: `translate(${from.left - to.left}px, ${from.top - to.top}px)` },
    { transform: "none" }], { duration: 400, easing: "ease-in-out" });
}

function follow(name) {
  chosen = name;
  for (const [other, { dot }] of requests) dot.setAttribute("aria-pressed", other === name);
  drawChosen();
}

function drawChosen() {
  const r = requests.get(chosen);
  if (r) at("request").textContent = `request ${r.rid}: ${r.says}; ${r.trail.join(" → ")}`;
}

function known(engine, rid) {
  const name = `${engine}:${rid}`;
  if (!requests.has(name)) {
    const dot = make("button");
    dot.type = "button";
    dot.addEventListener("click", () => follow(name));
    requests.set(name, { rid, dot, trail: [], says: "" });
  }
  return requests.get(name);
}

function drawPhases(values, rows) {
  for (const [{ phase }, number] of all(values, "requests_in_phase")) {
    const box = boxOf(phase);
    box.firstChild.textContent = number;
    box.classList.toggle("some", number > 0);
  }
  const alive = new Set();
  for (const [engine, rid, phase, prompt, computed, output] of rows) {
    const r = known(engine, rid), box = boxOf(phase);
    alive.add(`${engine}:${rid}`);
    if (r.trail.at(-1) !== phase) r.trail.push(phase);
    r.says = `prompt of ${counted(prompt, "token")}, ${count(Math.min(computed, prompt))} of them computed, ` +
      `answer of ${count(output)}`;
    r.dot.title = `request ${rid}: ${phase}, ${r.says}`;
    r.dot.setAttribute("aria-label", r.dot.title);
    if (!box.contains(r.dot)) move(r.dot, box);
  }
  for (const [name, r] of requests)
    if (!alive.has(name)) {
      r.dot.remove();
      if (name !== chosen) requests.delete(name);
      else if (r.trail.at(-1) !== "done") r.trail.push("done");
    }
  // One dot is reached by Tab, the others by arrow keys: there may be 256.
  const dots = [...at("phases").querySelectorAll("button")];
  const reached = dots.find(d => d === document.activeElement) || requests.get(chosen)?.dot;
  dots.forEach((dot, n) => { dot.tabIndex = dots.includes(reached) ? -(dot !== reached) : -(n > 0); });
  drawChosen();
}

function drawTurns(turns) {
  const lines = [];
  for (const [engine, number, step, rows, tokens, moves, edges] of turns) {
    if (number > (turnsSeen.get(engine) ?? -1)) {
      turnsSeen.set(engine, number);
      for (const [rid, from, to] of edges) {
        const { trail } = known(engine, rid);
        if (!trail.length) trail.push(from);
        if (trail.at(-1) !== to) trail.push(to);
      }
    }
    const what = step ? `step ${step}: ${counted(rows, "request")}, ${counted(tokens, "token")}` + (moves ? `, ${counted(moves, "transfer")}` : "") : "no step";
    lines.unshift(`${what}${edges.map(([rid, from, to]) => `; ${rid} ${from} → ${to}`).join("")}`);
  }
  at("turns").replaceChildren(...lines.slice(0, 12).map(line => make("li", line)));
}

function drawRates(values, before, seconds) {
  const rate = name => before && seconds > 0 ? (sum(values, name) - sum(before, name)) / seconds : 0;
  const asked = values.prefix_queries || 0;
  const hits = sum(values, "hot_hits_total"), misses = sum(values, "hot_misses_total");
  const rows = [
    ["output tokens per second", count(rate("generation_tokens_total"))],
    ["steps per second", count(rate("steps"))],
    ["requests: running, waiting", `${values.requests_running || 0}, ${values.requests_waiting || 0}`],
    ...Object.entries({ hbm: "device", dram: "host", disk: "storage" }).filter(([tier]) => values[`${tier}_pages`]).map(([tier, name]) =>
      [`prompt tokens cached: ${name}`, percent(values[`prefix_${tier}_hits`] || 0, asked)]),
    ...(hits + misses ? [["blocks found in hot buffers", percent(hits, hits + misses)]] : []),
    "pauses" in values ? ["preempted: swap, recompute", `${values.pauses}, ${values.drops || 0}`]
      : ["preempted: recompute", `${values.drops || 0}`],
  ];
  at("rates").replaceChildren(...rows.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

function drawWays(values, before, seconds) {
  const named = { hbm: "device", dram: "host", disk: "storage" };
  const ways = {};
  const add = (field, metrics, name) => all(metrics || {}, name).forEach(([{ src, dst }, v]) => {
    const way = ways[`${src} ${dst}`] ??= { src, dst, bytes: 0, was: 0, took: 0, tookWas: 0 };
    way[field] += v;
  });
  add("bytes", values, "moved_bytes_total");
  add("was", before, "moved_bytes_total");
  add("took", values, "move_seconds_total");
  add("tookWas", before, "move_seconds_total");
  at("copies").hidden = !values.dram_pages && !values.disk_pages && !Object.keys(ways).length;
  at("ways").tBodies[0].replaceChildren(...Object.values(ways).map(w => {
    const row = make("tr");
    const link = w.took > w.tookWas ? (w.bytes - w.was) / (w.took - w.tookWas) / 1e9 : 0;
    const cells = [named[w.src] || w.src, named[w.dst] || w.dst,
      count(before && seconds > 0 ? (w.bytes - w.was) / seconds / 1e6 : 0), link ? link.toFixed(2) : "–",
      count(w.bytes / 1e6)];
    row.append(...cells.map(text => make("td", text)));
    return row;
  }));
}

function drawLayers(values) {
  const misses = Object.fromEntries(all(values, "hot_misses_total").map(([l, v]) => [l.layer, v]));
  const layers = all(values, "hot_hits_total").map(([{ layer }, hits]) => [Number(layer), hits, misses[layer] || 0])
    .filter(([, hits, missed]) => hits + missed > 0).sort((a, b) => a[0] - b[0]);
  at("hot").hidden = !layers.length;
  at("layers").replaceChildren(...layers.map(([layer, hits, missed]) => {
    const bar = make("span");
    bar.style.height = `${100 * hits / (hits + missed)}%`;
    bar.title = `layer ${layer}: ${percent(hits, hits + missed)}`;
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", bar.title);
    return bar;
  }));
}

// `data:` lines of a stream of events, parsed.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function wrong(response) {
  try { return (await response.json()).error.message; } catch { return `status ${response.status}`; }
}

let model = "";

async function watch() {
  let before = null, then = 0;
  const response = await fetch("live", { headers: headers() });
  if (!response.ok) {
    at("key").hidden = ![401, 403].includes(response.status);
    throw new Error(await wrong(response));
  }
  at("key").hidden = true;
  for await (const news of events(response)) {
    model = news.model;
    at("model").textContent = `${model}, ${count(news.max_model_len)} tokens of context, ${news.device}`;
    const values = news.values, seconds = news.at - then;
    at("state").textContent = news.age > 3 ? `numbers are ${news.age.toFixed(0)} s old: a step takes long` : "live";
    drawTiers(values, news.page_size);
    drawTurns(news.turns);
    drawPhases(values, news.requests);
    drawRates(values, before, seconds);
    drawWays(values, before, seconds);
    drawLayers(values);
    [before, then] = [values, news.at];
  }
  throw new Error("the server has closed the stream");
}

async function stay() {
  for (;;) {
    try { await watch(); } catch (error) { at("state").textContent = error.message; }
    await new Promise(wake => setTimeout(wake, 2000));
  }
}

const history = [];
let answering = null;

function say(text, name) {
  const line = make("div", text, name);
  at("said").append(line);
  at("said").scrollTop = at("said").scrollHeight;
  return line;
}

// The answer so far as Markdown, at most once a frame. The log scrolls along unless its reader has scrolled up.
function drawAnswer(answer) {
  if (answer.drawn) return;
  answer.drawn = true;
  requestAnimationFrame(() => {
    const log = at("said"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    answer.drawn = false;
    answer.line.replaceChildren(...markdown(answer.text));
    if (follows) log.scrollTop = log.scrollHeight;
  });
}

async function chat(text) {
  say(text, "you");
  history.push({ role: "user", content: text });
  const answer = { line: say("", "answer"), text: "", drawn: false }, system = at("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history];
  answering = new AbortController();
  at("send").disabled = !(at("stop").disabled = false);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", signal: answering.signal, headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({ model, messages, stream: true, temperature: at("temperature").valueAsNumber || 0 }) });
    if (!response.ok) throw new Error(await wrong(response));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      answer.text += chunk.choices[0]?.delta?.content || "";
      drawAnswer(answer);
    }
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, "wrong");
  }
  if (answer.text) history.push({ role: "assistant", content: answer.text });
  else { history.pop(); answer.line.remove(); }
  answering = null;
  at("send").disabled = !(at("stop").disabled = true);
}

at("phases").addEventListener("keydown", event => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const dots = [...at("phases").querySelectorAll("button")], here = dots.indexOf(document.activeElement);
  if (!step || here < 0) return;
  event.preventDefault();
  dots[(here + step + dots.length) % dots.length].focus();
});
at("chat").addEventListener("submit", event => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || answering) return;
  at("text").value = "";
  chat(text);
});
at("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("chat").requestSubmit();
  }
});
document.addEventListener("keydown", event => event.key === "Escape" && answering?.abort());
at("stop").addEventListener("click", () => answering?.abort());
at("clear").addEventListener("click", () => { history.length = 0; at("said").replaceChildren(); });
at("key").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("penstock-key", at("bearer").value);
  at("bearer").value = "";
});
stay();
