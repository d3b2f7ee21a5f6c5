"use strict";

const byId = (id) => document.getElementById(id);
const messages = [];
let model = "";
let aborter = null;

byId("key").value = sessionStorage.getItem("key") || "";
byId("key").addEventListener("change", (event) => {
  sessionStorage.setItem("key", event.target.value);
  begin();
});

function headers() {
  const key = byId("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

async function begin() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) {
    byId("state").textContent = await errorOf(response);
    return;
  }
  model = (await response.json()).data[0].id;
  byId("model").textContent = model;
  document.title = model;
}

// Chat

function addTurn(kind, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${kind}`;
  const content = document.createElement("span");
  content.textContent = text;
  turn.append(content);
  byId("turns").append(turn);
  return { turn, content };
}

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((part) => part.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function showThinking(turn, text) {
  let details = turn.querySelector("details");
  if (!details) {
    details = document.createElement("details");
    details.append(document.createElement("summary"), document.createElement("span"));
    details.firstChild.textContent = "Thinking";
    turn.prepend(details);
  }
  details.lastChild.textContent += text;
}

async function answer() {
  const { turn, content } = addTurn("assistant", "");
  aborter = new AbortController();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({
      model,
      messages,
      stream: true,
      max_tokens: Number(byId("limit").value),
      thinking: { type: byId("thinking").checked ? "enabled" : "disabled" },
    }),
    signal: aborter.signal,
  });
  if (!response.ok) throw new Error(await errorOf(response));
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices[0]?.delta || {};
    if (delta.reasoning_content) showThinking(turn, delta.reasoning_content);
    if (delta.content) content.textContent += delta.content;
  }
  messages.push({ role: "assistant", content: content.textContent });
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = byId("text").value;
  const file = byId("image").files[0];
  const { turn } = addTurn("user", text);
  setBusy(true);
  const numBefore = messages.length;
  try {
    let content = text;
    if (file) {
      const url = await dataUrlOf(file);
      const image = document.createElement("img");
      image.src = url;
      turn.append(image);
      content = [{ type: "text", text }, { type: "image_url", image_url: { url } }];
    }
    messages.push({ role: "user", content });
    // Not the whole form: what else was chosen holds for this answer and the next.
    byId("text").value = "";
    byId("image").value = "";
    await answer();
  } catch (error) {
    messages.length = numBefore;
    addTurn("error", error.name === "AbortError" ? "Stopped" : error.message);
  }
  setBusy(false);
});

byId("stop").addEventListener("click", () => aborter?.abort());
byId("clear").addEventListener("click", () => {
  messages.length = 0;
  byId("turns").replaceChildren();
});

// Server

const NUM_POINTS = 120;
const PERIOD_MS = 1000;
const series = new Map();
let previous = null;

function parse(page) {
  const found = new Map();
  for (const line of page.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const end = line.lastIndexOf(" ");
    found.set(line.slice(0, end), Number(line.slice(end + 1)));
  }
  return found;
}

function plot(name, value, unit, digits = 0) {
  if (!series.has(name)) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.append(document.createElement("span"), document.createElement("output"));
    caption.firstChild.textContent = name;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 100 100");
    svg.setAttribute("preserveAspectRatio", "none");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    svg.append(line);
    figure.append(caption, svg);
    byId("plots").append(figure);
    series.set(name, { values: [], output: caption.lastChild, line });
  }
  const { values, output, line } = series.get(name);
  values.push(value);
  if (values.length > NUM_POINTS) values.shift();
  output.textContent = `${value.toFixed(digits)} ${unit}`;
  const top = Math.max(...values, 1e-9);
  const points = values.map((y, x) => `${(x * 100) / (NUM_POINTS - 1)},${98 - (y / top) * 96}`);
  line.setAttribute("points", points.join(" "));
}

function ratio(now, above, below) {
  const change = (name) => now.get(name) - previous.values.get(name);
  return change(below) > 0 ? change(above) / change(below) : 0;
}

function show(now, timeMs) {
  const value = (name) => now.get(`deepinfer_${name}`) || 0;
  plot("Running", value("num_requests_running"), "requests");
  plot("Waiting", value("num_requests_waiting") + value("num_requests_queued"), "requests");
  plot("KV memory held", 100 * value("kv_cache_usage_ratio"), "%", 1);
  if (previous) {
    const seconds = (timeMs - previous.timeMs) / 1000;
    const name = "deepinfer_generation_tokens_total";
    plot("Tokens", (now.get(name) - previous.values.get(name)) / seconds, "per second", 1);
    const cached = ratio(now, "deepinfer_cached_tokens_total", "deepinfer_prompt_tokens_total");
    plot("Prompt reused", 100 * cached, "%", 1);
    const first = "deepinfer_time_to_first_token_seconds";
    plot("First token after", 1000 * ratio(now, `${first}_sum`, `${first}_count`), "ms", 1);
    const gap = "deepinfer_inter_token_latency_seconds";
    plot("Between tokens", 1000 * ratio(now, `${gap}_sum`, `${gap}_count`), "ms", 1);
  }
  previous = { values: now, timeMs };
}

function fill(id, heads, rows) {
  const line = (kind, cells) => {
    const row = document.createElement("tr");
    for (const text of cells) {
      const cell = document.createElement(kind);
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  };
  byId(id).replaceChildren(line("th", heads), ...rows.map((cells) => line("td", cells)));
}

const absent = new Set();

// What a path tells, null if nothing; one that this server does not have is not asked for again.
async function told(path) {
  if (absent.has(path)) return null;
  const response = await fetch(path, { headers: headers() });
  if (response.status === 404) absent.add(path);
  return response.ok ? response.json() : null;
}

function workerRow({ node, state, status }) {
  const of = status?.engine;
  const running = of ? of.num_prefilling + of.num_decoding : "";
  return [node, state, running, of ? of.num_waiting : ""];
}

function showNodes({ nodes, engine, tiers }, cluster, store) {
  fill("nodes", ["node", "state", "running", "waiting"], [
    ...nodes.map((node) => [node.name, node.state, node.running, node.waiting]),
    ...(cluster?.nodes || []).map(workerRow),
  ]);
  const held = engine.num_blocks - engine.num_free_blocks;
  const rows = [
    ["device: held by requests", `${held} of ${engine.num_blocks} blocks`],
    ["device: kept for later prompts", `${engine.num_cached_blocks} blocks`],
    ["device: places to go on from", `${engine.num_snapshots}`],
  ];
  if (tiers) {
    const asked = tiers.num_hits + tiers.num_misses + tiers.num_faults + tiers.num_late;
    const share = asked ? ` (${((100 * tiers.num_hits) / asked).toFixed(1)} %)` : "";
    rows.push(
      ["host and disk: hits", `${tiers.num_hits} of ${asked} requests${share}`],
      ["host and disk: fetched", `${tiers.num_fetched_blocks} blocks`],
      ["host and disk: stored", `${tiers.num_stored_blocks} blocks`],
    );
  }
  for (const [name, value] of Object.entries(store || {})) {
    if (typeof value === "number") rows.push([`store: ${name.replaceAll("_", " ")}`, value]);
  }
  fill("tiers", ["where", "how much"], rows);
}

function showTenants(now) {
  const rows = new Map();
  const pattern = /^deepinfer_tenant_(\w+)_total\{tenant="(.*)"\}$/;
  for (const [name, value] of now) {
    const found = pattern.exec(name);
    if (!found) continue;
    if (!rows.has(found[2])) rows.set(found[2], new Map());
    rows.get(found[2]).set(found[1], value);
  }
  fill(
    "tenants",
    ["tenant", "calls", "refused", "prompt", "reused", "generated"],
    [...rows].map(([tenant, of]) => [
      tenant,
      ...["calls", "refused", "prompt_tokens", "cached_tokens", "generated_tokens"].map(
        (name) => of.get(name) || 0,
      ),
    ]),
  );
}

async function look() {
  try {
    const response = await fetch("/metrics", { headers: headers() });
    if (response.ok) {
      const now = parse(await response.text());
      show(now, performance.now());
      showTenants(now);
      const status = await told("/status");
      if (status) showNodes(status, await told("/cluster"), await told("/admin/cache"));
      const ready = await fetch("/ready");
      byId("state").textContent = ready.ok ? "Ready" : await errorOf(ready);
    } else {
      byId("state").textContent = `How the server is doing: ${await errorOf(response)}`;
    }
  } catch {
    byId("state").textContent = "The server does not answer";
  }
  setTimeout(look, PERIOD_MS);
}

begin();
look();
