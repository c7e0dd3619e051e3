// From a chart (panels, axes, marks: see chart.py) to Plotly's traces and layout.

const LOOKS = new Map();
const NARROW = 640;
const GAP = { across: 46, down: 58 };
const RAMP = {
  light: ["#5b3fa3", "#1f9bb8", "#b8860b", "#a8325a", "#3a3a3a"],
  dark: ["#b7a4f2", "#5cc9e6", "#e6b422", "#f27ca2", "#dddddd"],
};
const HEAT = {
  light: [[0, "#eef4fa"], [0.35, "#9cc4e4"], [0.7, "#3b85bd"], [1, "#083a66"]],
  dark: [[0, "#1d2733"], [0.35, "#27567e"], [0.7, "#4a96cf"], [1, "#d5ecff"]],
};
const TONES = ["circle", "square", "diamond", "triangle-up", "cross"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];

function colourOf(mark, theme) {
  if (mark.tone !== undefined) return RAMP[theme][mark.tone % RAMP[theme].length];
  const look = LOOKS.get(mark.method);
  return look ? look[theme] : theme === "dark" ? "#7d838d" : "#9aa0a8";
}

function faded(hex, alpha) {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
}

function traces(chart, options) {
  const named = new Set();
  const frame = options.frame;
  return chart.marks
    .filter((mark) => !chart.frames.length || (mark.panel || 0) === frame)
    .map((mark) => trace(chart, mark, options, named));
}

function trace(chart, mark, { theme, off, paper }, named) {
  const place = chart.frames.length ? 0 : mark.panel || 0;
  const colour = colourOf(mark, theme);
  const look = LOOKS.get(mark.method) || {};
  const tone = mark.tone;
  const name = mark.method || mark.name || "";
  const made = {
    xaxis: "x" + (place ? place + 1 : ""),
    yaxis: "y" + (place ? place + 1 : ""),
    name,
    legendgroup: name,
    showlegend: Boolean(name) && mark.kind !== "band" && !mark.faint && !named.has(name),
    visible: !off.has(mark.method),
    cliponaxis: false,
  };
  if (made.showlegend) named.add(name);
  if (mark.text) Object.assign(made, { text: mark.text, hovertemplate: "%{text}<extra></extra>" });
  else made.hoverinfo = "skip";
  const dash = tone !== undefined ? DASHES[tone % DASHES.length] : look.dash || "solid";
  const symbol = tone !== undefined ? TONES[tone % TONES.length] : look.symbol || "circle";
  switch (mark.kind) {
    case "line":
      return { ...made, type: "scatter", mode: mark.x.length > 14 ? "lines" : "lines+markers", x: mark.x, y: mark.y, line: { color: colour, width: 2, dash }, marker: { color: colour, size: 6, symbol } };
    case "dots":
      return { ...made, type: "scatter", mode: "markers", x: mark.x, y: mark.y, marker: { color: colour, symbol, size: mark.big ? 13 : 9, opacity: mark.faint ? 0.5 : 1, line: { color: symbol.endsWith("open") ? colour : paper, width: symbol.endsWith("open") ? 2 : 1 } } };
    case "band":
      return { ...made, type: "scatter", mode: "lines", x: [...mark.x, ...[...mark.x].reverse()], y: [...mark.high, ...[...mark.low].reverse()], fill: "toself", fillcolor: faded(colour, 0.16), line: { width: 0, color: colour }, hoverinfo: "skip" };
    case "span":
      return { ...made, type: "scatter", mode: "lines", x: mark.y.flatMap((_, n) => [mark.low[n], mark.high[n], null]), y: mark.y.flatMap((at) => [at, at, null]), line: { color: faded(colour, mark.faint ? 0.4 : 1), width: mark.faint ? 2 : 4 } };
    case "bars":
      return { ...made, type: "bar", orientation: "h", textposition: "none", x: mark.x, y: mark.y, width: 0.55, marker: { color: colour } };
    case "heat": {
      const wide = mark.x.length;
      const panel = chart.panels[place];
      const told = (x, y, z) => mark.says.replace("{x}", panel.x.categories[x]).replace("{y}", panel.y.categories[y]).replace("{z}", Number(z.toPrecision(3)));
      const text = mark.z.map((row, y) => row.map((z, x) => (z === null ? "" : told(x, y, z))));
      Object.assign(made, { hovertemplate: "%{text}<extra></extra>", hoverinfo: undefined });
      const gap = mark.z.length <= 40 && wide <= 40 ? 1.5 : 0;
      return { ...made, type: "heatmap", x: mark.x, y: mark.y, z: mark.z, text, zmin: mark.bottom || 0, zmax: mark.top, xgap: gap, ygap: gap, colorscale: HEAT[theme], hoverongaps: false, showscale: place === 0, colorbar: { thickness: 8, outlinewidth: 0, len: 0.9, tickfont: { size: 10 } } };
    }
  }
  throw new Error("unknown mark " + mark.kind);
}

function columnsFor(count, width) {
  if (count === 1) return 1;
  if (count === 2) return width < NARROW ? 1 : 2;
  return Math.max(Math.min(count, 5, Math.floor(width / (width < NARROW ? 160 : 200))), 1);
}

function layout(chart, { theme, width, ink, soft, line, paper }) {
  const panels = chart.frames.length ? chart.panels.slice(0, 1) : chart.panels;
  const across = columnsFor(panels.length, width);
  const down = Math.ceil(panels.length / across);
  const many = panels.length > 2;
  const top = panels.some((panel) => panel.title) ? 26 : 8;
  const margin = { l: 8, r: 10, t: top, b: 8 };
  const gap = { across: many ? 16 : GAP.across, down: many ? 40 : GAP.down + 18 };
  const height = chart.height * down + (down - 1) * gap.down + margin.t;
  const inner = { w: Math.max(width - margin.l - margin.r - 40, 100), h: height - margin.t - margin.b - 40 };
  const made = {
    width, height, margin,
    paper_bgcolor: paper, plot_bgcolor: paper,
    font: { family: 'system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif', size: 12, color: soft },
    hoverlabel: { bgcolor: theme === "dark" ? "#2a2e35" : "#ffffff", bordercolor: line, font: { color: ink, size: 12.5 }, align: "left" },
    hovermode: "closest", dragmode: width < NARROW ? false : "zoom",
    showlegend: false, annotations: [], bargap: 0.3,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
  };
  // Panels of different quantities say where each of their axes begins and ends.
  const apart = many && panels.every((one) => one.x && one.x.low !== undefined) && !panels.every((one) => sameAxis(one.x, panels[0].x));
  panels.forEach((panel, n) => {
    const column = n % across, row = Math.floor(n / across);
    const wide = (inner.w - gap.across * (across - 1)) / across / inner.w;
    const tall = (inner.h - gap.down * (down - 1)) / down / inner.h;
    const left = column * (wide + gap.across / inner.w);
    const high = 1 - row * (tall + gap.down / inner.h);
    const last = n + across >= panels.length;
    const suffix = n ? n + 1 : "";
    const common = { line, soft, width, many };
    made["xaxis" + suffix] = { ...axis(panel.x || {}, common, "x"), domain: [left, left + wide], anchor: "y" + suffix };
    made["yaxis" + suffix] = { ...axis(panel.y || {}, common, "y"), domain: [Math.max(high - tall, 0), high], anchor: "x" + suffix };
    const x = made["xaxis" + suffix], y = made["yaxis" + suffix];
    if (n && many) { if (!apart) x.matches = "x"; y.matches = "y"; }
    if (n && panels.length === 2 && sameAxis(panels[0].y, panel.y)) y.matches = "y";
    if (many || (panels.length === 2 && column && sameAxis(panels[0].y, panel.y))) {
      if (column) { y.showticklabels = false; y.title = undefined; }
      if (many && !last && !apart) x.showticklabels = false;
      if (many && !(last && column === 0)) x.title = undefined;
      if (many && n) y.title = undefined;
    }
    if (panel.title) {
      made.annotations.push({ text: plain(shortened(panel.title, 30)), xref: "x" + suffix + " domain", yref: "y" + suffix + " domain", x: 0, y: 1, xanchor: "left", yanchor: "bottom", yshift: 4, showarrow: false, font: { size: many ? 11.5 : 13, color: ink } });
    }
  });
  return made;
}

function sameAxis(one, other) {
  return JSON.stringify(one || {}) === JSON.stringify(other || {});
}

function axis(spec, { line, soft, width, many }, direction) {
  const made = {
    title: spec.title ? { text: spec.title, font: { size: 12, color: soft }, standoff: 8 } : undefined,
    automargin: true, zeroline: false, gridcolor: line, linecolor: line, tickcolor: line,
    tickfont: { size: 11, color: soft }, fixedrange: width < NARROW,
    showgrid: true, ticklen: 3, nticks: many ? (direction === "y" ? 6 : 4) : width < NARROW ? 5 : 8,
    exponentformat: "none", separatethousands: true,
  };
  if (spec.unit === "%") { made.tickformat = ",.3~%"; }
  if (spec.log) made.type = "log";
  if (spec.step) Object.assign(made, { tick0: 0, dtick: spec.step * (width < NARROW ? 2 : 1) });
  if (spec.low !== undefined || spec.high !== undefined) {
    if (spec.low !== undefined && spec.high !== undefined) {
      const room = (spec.high - spec.low) * 0.04;
      made.range = [spec.low - room, spec.high + room];
    } else made.rangemode = "tozero";
  }
  if (spec.categories) {
    const count = spec.categories.length;
    const longest = width < NARROW ? 13 : 28;
    made.tickvals = ticked(count, direction === "y" ? 60 : Math.floor(width / 26));
    const names = direction === "y" ? spec.categories : bare(spec.categories);
    made.ticktext = made.tickvals.map((n) => plain(shortened(names[n], direction === "y" ? longest : 8)));
    made.range = direction === "y" ? [count - 0.4, -0.6] : [-0.5, count - 0.5];
    made.showgrid = direction === "y" && count <= 60;
    made.ticks = "";
    if (direction === "y") made.range = [count - 0.5, -0.5];
  }
  return made;
}

// Plotly takes what looks like a tag in a name for one.
function plain(name) {
  return name.replaceAll("<", "&lt;");
}

// "client 3" is "3" where all are clients: below an axis there is room for little.
function bare(names) {
  const first = names[0].slice(0, names[0].lastIndexOf(" ") + 1);
  const shared = first && names.length > 1 && names.every((name) => name.startsWith(first) && name.length > first.length);
  return shared ? names.map((name) => name.slice(first.length)) : names;
}

function ticked(count, most) {
  const step = Math.max(Math.ceil(count / Math.max(most, 1)), 1);
  return [...Array(count).keys()].filter((n) => n % step === 0);
}

function shortened(text, most) {
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

// The small picture of a method's symbol that stands in switches and tables.
const SHAPES = {
  circle: '<circle cx="6" cy="6" r="5"/>', "circle-open": '<circle cx="6" cy="6" r="4.2" fill="none" stroke-width="2"/>',
  square: '<rect x="1.2" y="1.2" width="9.6" height="9.6"/>', diamond: '<path d="M6 0 12 6 6 12 0 6Z"/>',
  "triangle-up": '<path d="M6 .8 11.6 11H.4Z"/>', "triangle-down": '<path d="M6 11.2 11.6 1H.4Z"/>',
  cross: '<path d="M4 0h4v4h4v4H8v4H4V8H0V4h4Z"/>', x: '<path d="m3 .4 3 3 3-3L11.6 3l-3 3 3 3L9 11.6l-3-3-3 3L.4 9l3-3-3-3Z"/>',
  star: '<path d="m6 0 1.6 4.2 4.4.2-3.4 2.8 1.1 4.4L6 9.200 2.300 11.6l1.100-4.400L0 4.400l4.400-.2Z"/>',
};

function keyPicture(label, theme) {
  const look = LOOKS.get(label);
  if (!look) return "";
  return `<svg viewBox="0 0 12 12" fill="${look[theme]}" stroke="${look[theme]}" stroke-width="0" aria-hidden="true">${SHAPES[look.symbol] || SHAPES.circle}</svg>`;
}
