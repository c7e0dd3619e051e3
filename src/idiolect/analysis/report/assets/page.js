// The page: theme, switches, figures, and news from a run that goes on.

let CONTENT = JSON.parse(document.getElementById("content").textContent);
const OFF = new Set();
const FRAMES = new Map(); // chart id -> step of its slider
let printing = false;

// Theme: as the system says, unless told otherwise.

const THEMES = ["system", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function remembered() {
  try { return localStorage.getItem("idiolect-theme") || "system"; } catch { return "system"; }
}

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = "Theme: " + name;
  try { localStorage.setItem("idiolect-theme", name); } catch { /* a file may not remember */ }
}

function theme() {
  if (printing) return "light";
  const told = document.documentElement.dataset.theme;
  return told || (systemDark.matches ? "dark" : "light");
}

// Figures.

function look() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  if (printing) return { ink: "#000000", soft: "#333333", line: "#dddddd", paper: "#ffffff" };
  return { ink: colour("--ink"), soft: colour("--soft"), line: colour("--line"), paper: colour("--paper") };
}

function charts() {
  return CONTENT.runs.flatMap((run) => run.sections.flatMap((section) => section.charts));
}

function draw(chart) {
  const box = document.getElementById("plot-" + chart.id);
  if (!box || !window.Plotly) return;
  const room = printing ? 680 : Math.max(box.clientWidth, 240);
  const width = chart.square ? Math.min(room, chart.height + 130) : room;
  const options = { theme: theme(), off: OFF, width, frame: frameOf(chart), ...look() };
  box.style.minHeight = "";
  Plotly.react(box, traces(chart, options), layout(chart, options), { displayModeBar: false, responsive: false });
  legend(chart, box.closest("figure"), options);
  slider(chart, box.closest("figure"));
}

function frameOf(chart) {
  const known = FRAMES.get(chart.id);
  return known === undefined ? chart.frames.length - 1 : Math.min(known, chart.frames.length - 1);
}

function legend(chart, figure, options) {
  const seen = new Map();
  chart.marks.forEach((mark) => { if (mark.name && !seen.has(mark.name)) seen.set(mark.name, mark); });
  const box = figure.querySelector(".legend");
  box.replaceChildren(...[...seen].map(([name, mark]) => {
    const item = document.createElement("span");
    const line = document.createElement("i");
    line.style.borderTopColor = colourOf(mark, options.theme);
    line.style.borderTopStyle = { dash: "dashed", dot: "dotted" }[DASHES[(mark.tone || 0) % DASHES.length]] || "solid";
    item.append(line, name);
    return item;
  }));
}

function slider(chart, figure) {
  if (chart.frames.length < 2) return;
  let box = figure.querySelector(".slider");
  if (!box) {
    box = document.createElement("label");
    box.className = "slider";
    box.innerHTML = '<input type="range" min="0" step="1"><output></output>';
    figure.querySelector(".plot").before(box);
    const input = box.querySelector("input");
    input.setAttribute("aria-label", chart.title);
    input.addEventListener("input", () => {
      FRAMES.set(chart.id, Number(input.value));
      draw(charts().find((one) => one.id === chart.id));
    });
  }
  const input = box.querySelector("input");
  input.max = chart.frames.length - 1;
  input.value = frameOf(chart);
  box.querySelector("output").textContent = chart.frames[frameOf(chart)];
}

function drawAll() {
  CONTENT.methods.forEach((method) => LOOKS.set(method.label, method));
  document.querySelectorAll("[data-key]").forEach((key) => { key.innerHTML = keyPicture(key.dataset.key, theme()); });
  document.querySelectorAll("tr[data-method]").forEach((row) => row.classList.toggle("off", OFF.has(row.dataset.method)));
  charts().forEach(draw);
}

// Switches, downloads.

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-switch]");
  if (button) {
    const label = button.dataset.switch;
    const on = OFF.has(label);
    if (on) OFF.delete(label); else OFF.add(label);
    button.setAttribute("aria-pressed", String(on));
    drawAll();
  }
  const get = event.target.closest("[data-get]");
  if (get) download(get.dataset.get, get.closest("figure"));
});

const TYPES = { md: "text/markdown", tex: "application/x-tex", csv: "text/csv" };

async function download(kind, figure) {
  const id = figure.dataset.sheet || figure.dataset.chart;
  if (figure.dataset.sheet) {
    const sheets = Object.assign({}, ...CONTENT.runs.flatMap((run) => run.sections.map((section) => section.sheets)));
    return handOut(`${id}.${kind}`, TYPES[kind], sheets[id][kind]);
  }
  const chart = charts().find((one) => one.id === id);
  if (kind === "csv") return handOut(id + ".csv", TYPES.csv, chart.csv);
  return handOut(id + ".svg", "image/svg+xml", await asSvg(chart));
}

// For a paper: white, wide, with a legend, and without the methods that are switched off.
async function asSvg(chart) {
  const options = { theme: "light", off: OFF, width: chart.square ? chart.height + 130 : 760, frame: frameOf(chart), ink: "#000000", soft: "#333333", line: "#dddddd", paper: "#ffffff" };
  const spec = layout(chart, options);
  spec.showlegend = true;
  spec.margin = { ...spec.margin, t: spec.margin.t + 34 };
  spec.height += 34;
  const address = await Plotly.toImage({ data: traces(chart, options), layout: spec }, { format: "svg", width: spec.width, height: spec.height });
  return decodeURIComponent(address.slice(address.indexOf(",") + 1));
}

document.getElementById("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(remembered()) + 1) % THEMES.length]);
  drawAll();
});
systemDark.addEventListener("change", drawAll);

let width = innerWidth;
let waiting = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone's bar coming and going
  width = innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 120);
});

function print(now) {
  if (printing === now) return;
  printing = now;
  drawAll();
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
matchMedia("print").addEventListener("change", (event) => print(event.matches));

// A run that goes on.

function follow() {
  const status = document.getElementById("live");
  status.hidden = false;
  status.textContent = "Running. This page grows with it.";
  const news = new EventSource("events");
  news.addEventListener("content", (event) => update(JSON.parse(event.data)));
  news.addEventListener("over", (event) => {
    news.close();
    status.classList.add("over");
    status.textContent = JSON.parse(event.data);
  });
  news.onerror = () => { status.textContent = "The run cannot be reached just now; trying again."; };
  news.onopen = () => { status.textContent = "Running. This page grows with it."; };
}

// Exchange what changed. A section whose figures stay keeps their boxes, so nothing jumps.
function update(shown) {
  if (shown.trouble) { document.getElementById("live").textContent = "The page could not be drawn: " + shown.trouble; return; }
  CONTENT = shown.content;
  document.querySelector(".switches").innerHTML = shown.switches;
  document.querySelectorAll("[data-switch]").forEach((b) => b.setAttribute("aria-pressed", String(!OFF.has(b.dataset.switch))));
  document.querySelector(".top nav").innerHTML = shown.nav;
  const fresh = document.createElement("main");
  fresh.innerHTML = shown.main;
  fresh.querySelectorAll(".plot").forEach((box) => {
    const old = document.getElementById(box.id);
    if (old) box.replaceWith(old);
  });
  document.getElementById("main").replaceChildren(...fresh.children);
  sortableTables(document);
  drawAll();
}

async function start() {
  setTheme(remembered());
  if (!("DecompressionStream" in window)) {
    document.getElementById("old").hidden = false;
    return;
  }
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  drawAll();
  document.documentElement.dataset.ready = "yes";
  if (CONTENT.live) follow();
}
start();
