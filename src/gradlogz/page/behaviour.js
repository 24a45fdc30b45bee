// Behaviour of a page: figures, animations, sorting, folding, themes, downloads.
"use strict";
(async () => {
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("old").hidden = false;
    return;
  }
  // Decompresses a block that rendering.py packed.
  function unpacked(id) {
    const letters = atob(document.getElementById(id).textContent), bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  }
  // Loads plotly once, on demand: it is most of the file, and the text is read before the figures.
  let loading = null;
  function plotly() {
    if (loading === null) {
      loading = unpacked("plotly").then((source) => {
        const script = document.createElement("script");
        script.textContent = source;
        document.head.append(script);
        script.remove();
        return window.Plotly;
      });
    }
    return loading;
  }
  const { name, data, palettes, tones, symbols, figures, tables, choices, texts } = JSON.parse(await unpacked("data"));
  // Hover texts and repeated strings are stored once; figures and tables hold indices.
  const expanded = (index) => (Array.isArray(index) ? index.map(expanded) : texts[index]);
  for (const { traces = [] } of Object.values(figures)) for (const trace of traces) if ("text" in trace) trace.text = expanded(trace.text);
  for (const { rows, coded } of Object.values(tables)) for (const [i, names] of Object.entries(coded)) for (const row of rows) row[i] = names[row[i]];
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const theme = () => root.dataset.theme || (dark.matches ? "dark" : "light");

  // Colours and texts ---------------------------------------------------------------------------------------------

  // "@blue/0.2" under a key named "...color" becomes the colour of the theme; texts are escaped, because plotly reads markup.
  const TEXTS = new Set(["name", "text", "ticktext"]);
  const safe = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("\n", "<br>");
  function colour(text, palette) {
    const match = /^@([a-z]+)(?:\/([\d.]+))?$/.exec(text);
    if (!match || !(match[1] in palette)) return text;
    const hex = palette[match[1]];
    const parts = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return match[2] ? `rgba(${parts.join(",")},${match[2]})` : hex;
  }
  function resolved(value, palette, key = "") {
    if (typeof value === "string") return /color/i.test(key) ? colour(value, palette) : TEXTS.has(key) ? safe(value) : value;
    if (Array.isArray(value)) return /^[xyz]$/.test(key) ? value : value.map((item) => resolved(item, palette, key));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolved(v, palette, k)]));
    }
    return value;
  }

  function frame(layout, palette, width) {
    const axis = {
      gridcolor: palette.rule, linecolor: palette.soft, tickcolor: palette.soft, zeroline: false, showline: true, ticks: "outside",
      ticklen: 4, automargin: true, title: { standoff: 8 }, minor: { ticks: "" },
    };
    const merged = { ...layout };
    for (const which of ["xaxis", "yaxis"]) {
      merged[which] = { ...axis, ...layout[which], title: { ...axis.title, ...(layout[which] || {}).title } };
    }
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 12, r: 12, t: 8, b: 12 },
      font: { family: getComputedStyle(document.body).fontFamily, size: width < 480 ? 11 : 12, color: palette.ink },
      legend: { orientation: "h", traceorder: "normal", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" }, hovermode: "closest",
      hoverlabel: { bgcolor: palette.raised, bordercolor: palette.rule, font: { color: palette.ink } },
      dragmode: coarse ? false : "zoom", showlegend: true, ...merged,
    };
  }

  // Clouds ----------------------------------------------------------------------------------------------------------

  const states = {};
  function state(id) {
    if (!(id in states)) {
      const { frames } = figures[id];
      const all = frames.flat(2).map(Math.abs);
      const reach = all.reduce((a, b) => Math.max(a, b), 0) || 1;
      states[id] = { at: frames.length - 1, turn: 35, tilt: 20, reach, timer: null };
    }
    return states[id];
  }
  function projected([a, b, c], { turn, tilt }) {
    const s = (turn * Math.PI) / 180, t = (tilt * Math.PI) / 180;
    const right = a * Math.cos(s) - b * Math.sin(s), deep = a * Math.sin(s) + b * Math.cos(s);
    return [right, c * Math.cos(t) + deep * Math.sin(t)];
  }
  function places(id) {
    const { frames, labels } = figures[id], s = state(id);
    const tokens = frames[s.at].map((token) => (labels.length === 3 ? projected(token, s) : token));
    return [tokens.map((p) => p[0]), tokens.map((p) => p[1])];
  }
  function cross(id) {
    const s = state(id), r = 1.05 * s.reach;
    return [[r, 0, 0], [0, r, 0], [0, 0, r]].map((end) => projected(end, s));
  }
  function cloud(id) {
    const { groups, labels, names, equal } = figures[id], s = state(id);
    const [x, y] = places(id);
    const marker = {
      size: x.length > 300 ? 5 : 7, opacity: 0.75, line: { width: 0 },
      color: groups.map((g) => `@${tones[g % tones.length]}`),
      symbol: groups.map((g) => symbols[Math.floor(g / tones.length) % symbols.length]),
    };
    const tokens = { type: "scatter", mode: "markers", x, y, marker, hoverinfo: "text", text: groups.map((g, i) => `token ${i}, cluster ${g + 1}`), name: "tokens" };
    const ends = [-1.12 * s.reach, 1.12 * s.reach];
    if (labels.length < 3) {
      const layout = { xaxis: { title: { text: labels[0] } }, yaxis: { title: { text: labels[1] } }, showlegend: false };
      if (equal) {
        layout.xaxis = { ...layout.xaxis, range: ends, constrain: "domain" };
        layout.yaxis = { ...layout.yaxis, range: ends, scaleanchor: "x", constrain: "domain" };
      }
      return { traces: [tokens], layout };
    }
    const arms = cross(id).map((end, i) => ({
      type: "scatter", mode: "lines+text", x: [0, end[0]], y: [0, end[1]], text: ["", names[i]], textposition: "top center",
      line: { color: "@soft", width: 1 }, hoverinfo: "skip", name: names[i], textfont: { color: "@soft" },
    }));
    const bare = { showgrid: false, showline: false, showticklabels: false, ticks: "", range: ends };
    const layout = {
      showlegend: false, dragmode: false, xaxis: { ...bare, title: { text: labels.join(",  ") } },
      yaxis: { ...bare, scaleanchor: "x", title: { text: "" } },
    };
    return { traces: [tokens, ...arms], layout };
  }
  function show(id) {
    const box = document.querySelector(`[data-figure="${CSS.escape(id)}"]`), s = state(id);
    const [x, y] = places(id);
    const xs = [x], ys = [y];
    if (figures[id].labels.length === 3) cross(id).forEach((end) => { xs.push([0, end[0]]); ys.push([0, end[1]]); });
    if (box.dataset.drawn) Plotly.restyle(box, { x: xs, y: ys }, xs.map((_, i) => i));
    const bar = document.querySelector(`[data-transport="${CSS.escape(id)}"]`);
    bar.querySelector(".time").value = s.at;
    bar.querySelector(".time").setAttribute("aria-valuetext", `step ${figures[id].times[s.at]}`);
    bar.querySelector("output").textContent = figures[id].times[s.at];
    const turn = bar.querySelector(".turn");
    if (turn) turn.value = ((s.turn % 360) + 360) % 360;
  }
  function stop(id) {
    const s = state(id), button = document.querySelector(`[data-transport="${CSS.escape(id)}"] .play`);
    clearInterval(s.timer);
    s.timer = null;
    button.textContent = "▶";
    button.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-label", "Play");
  }
  function play(id) {
    const s = state(id), last = figures[id].frames.length - 1;
    const button = document.querySelector(`[data-transport="${CSS.escape(id)}"] .play`);
    if (s.timer !== null) return stop(id);
    if (s.at >= last) s.at = 0;
    button.textContent = "❚❚";
    button.setAttribute("aria-pressed", "true");
    button.setAttribute("aria-label", "Pause");
    s.timer = setInterval(() => {
      s.at += 1;
      show(id);
      if (s.at >= last) stop(id);
    }, 70);
  }
  function turnable(box, id) {
    let from = null;
    box.addEventListener("pointerdown", (e) => { from = [e.clientX, e.clientY]; });
    addEventListener("pointerup", () => { from = null; });
    box.addEventListener("pointermove", (e) => {
      if (!from) return;
      const s = state(id);
      s.turn -= (e.clientX - from[0]) / 2;
      s.tilt = Math.max(-90, Math.min(90, s.tilt + (e.clientY - from[1]) / 2));
      from = [e.clientX, e.clientY];
      show(id);
    });
  }

  // The choice ------------------------------------------------------------------------------------------------------

  // The selected key, "" for none. A key matches the selection, its group and its members.
  let choice = "";
  const within = (key) => (key in choices ? choices[key].within : "");
  const matches = (key) => !choice || !key || key === choice || within(key) === choice || within(choice) === key;
  const selected = (key) => Boolean(key) && matches(key);
  // Draws points and lines that are not selected fainter, and frames the selected cells of heat maps.
  function marked({ traces, layout }) {
    const keys = (trace) => (trace.customdata || []).flat();
    if (!choice || !traces.some((trace) => keys(trace).some(selected))) return { traces, layout };
    const shapes = [...(layout.shapes || [])];
    const highlighted = traces.map((trace) => {
      if (!trace.customdata) return trace;
      if (trace.type === "heatmap") {
        const half = (values) => (values.length > 1 ? Math.abs(values[1] - values[0]) / 2 : 0.5);
        trace.customdata.forEach((row, i) => row.forEach((key, j) => {
          if (!selected(key)) return;
          const [x, y, a, b] = [trace.x[j], trace.y[i], half(trace.x), half(trace.y)];
          for (const [color, width] of [["@paper", 4], ["@vermilion", 2]]) {
            shapes.push({ type: "rect", x0: x - a, x1: x + a, y0: y - b, y1: y + b, line: { color, width } });
          }
        }));
        return trace;
      }
      if (trace.mode === "lines") {
        const on = selected(trace.customdata[0]);
        return { ...trace, opacity: on ? 1 : 0.15, line: { ...trace.line, width: on ? 3 : 1 } };
      }
      const at = trace.customdata.flatMap((key, i) => (selected(key) ? [i] : []));
      const thin = trace.error_y && { ...trace.error_y, color: trace.error_y.color.replace(/\/.*/, "/0.2") };
      return { ...trace, selectedpoints: at, selected: { marker: { size: 11 } }, unselected: { marker: { opacity: 0.15 } }, ...(thin && { error_y: thin }) };
    });
    return { traces: highlighted, layout: { ...layout, shapes } };
  }
  function choose(key) {
    choice = key in choices ? key : "";
    const form = document.querySelector(".choice");
    form.querySelector("select").value = choice;
    form.querySelector("button").hidden = !choice;
    for (const table of document.querySelectorAll("[data-table]")) if (tables[table.dataset.table].keys.length) fill(table);
    redraw();
  }

  // Figures ---------------------------------------------------------------------------------------------------------

  const drawing = (id) => ("frames" in figures[id] ? cloud(id) : marked(figures[id]));
  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  async function draw(box) {
    const Plotly = await plotly();
    const id = box.dataset.figure, palette = palettes[theme()];
    const { traces, layout } = drawing(id);
    await Plotly.react(box, resolved(traces, palette), frame(resolved(layout, palette), palette, box.clientWidth), CONFIG);
    if (!box.dataset.drawn) box.on("plotly_click", ({ points }) => { if (points[0].customdata) choose(points[0].customdata); });
    box.dataset.drawn = theme();
    box.dataset.choice = choice;
  }
  // Figures are drawn when they come near the window: a page of a hundred opens as fast as one of three.
  async function drawThese(boxes) {
    for (const box of boxes) {
      if (box.clientWidth > 0 && (box.dataset.drawn !== theme() || box.dataset.choice !== choice)) await draw(box);
    }
    if (!root.dataset.ready) setTimeout(plotly, 300); // after the text is shown, before the first figure needs it
    root.dataset.ready = "yes";
  }
  const boxes = [...document.querySelectorAll("[data-figure]")];
  const near = new IntersectionObserver(
    (entries) => drawThese(entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target)),
    { rootMargin: "300px" },
  );
  const redraw = () => drawThese(boxes.filter((box) => box.dataset.drawn));

  // Files -----------------------------------------------------------------------------------------------------------

  function give(text, kind, file) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  // A text that a spreadsheet would compute, such as =1+1, has an apostrophe before it.
  const harmless = (text) => (/^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text);
  const escaped = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const quoted = (cell) => escaped(harmless(String(cell ?? "")));
  const csv = (columns, rows) => [columns, ...rows].map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
  function figureRows(figure) {
    if ("frames" in figure) {
      const rows = figure.frames.flatMap((tokens, t) => tokens.map((token, i) => [figure.times[t], i, figure.groups[i] + 1, ...token]));
      return [["step", "token", "cluster", ...figure.names], rows];
    }
    // Error bars become their ends, keys the labels of their choices.
    const end = (i, y, arms, sign) => (arms && arms[i] !== null ? Number((y[i] + sign * arms[i]).toPrecision(6)) : null);
    const label = (key) => (key in choices ? choices[key].label : key || null);
    const rows = figure.traces.flatMap(({ name, type, x, y, z, error_y: arms = {}, customdata: keys = [] }) => (type === "heatmap"
      ? z.flatMap((row, i) => row.map((value, j) => [name, x[j], y[i], value, null, null, label((keys[i] || [])[j])]))
      : x.map((at, i) => [name, at, y[i], null, end(i, y, arms.arrayminus, -1), end(i, y, arms.array, 1), label(keys[i])])));
    return [["name", "x", "y", "value", "low", "high", "place"], rows];
  }
  async function take(button) {
    const { take: kind, of: id, as } = button.dataset;
    const file = `${name}${id ? `-${id}` : ""}.${as}`;
    if (kind === "page") {
      const withTables = (_, value) => (value && value["@table"] in tables ? { columns: tables[value["@table"]].columns, rows: tables[value["@table"]].rows } : value);
      return give(JSON.stringify(data, withTables, 1), "application/json", file);
    }
    if (kind === "table") {
      const { columns, rows } = tables[id];
      const objects = () => rows.map((row) => Object.fromEntries(columns.map((c, i) => [c, row[i]])));
      return as === "csv" ? give(csv(columns, rows), "text/csv", file) : give(JSON.stringify(objects(), null, 1), "application/json", file);
    }
    if (as === "json") return give(JSON.stringify(figures[id]), "application/json", file);
    if (as === "csv") return give(csv(...figureRows(figures[id])), "text/csv", file);
    const { traces, layout } = drawing(id), palette = palettes.light;  // for paper, whatever the theme
    const box = document.querySelector(`[data-figure="${CSS.escape(id)}"]`);
    const size = { width: 720, height: "frames" in figures[id] ? 720 : 440 };
    const printed = frame(resolved(layout, palette), palette, 720);
    printed.title = { text: safe(figures[id].title), x: 0.01, xanchor: "left", font: { size: 15 } };
    printed.margin = { l: 12, r: 16, t: 72, b: 12 };
    printed.paper_bgcolor = palette.paper;
    printed.font.family = "Helvetica, Arial, sans-serif";
    const Plotly = await plotly();
    const url = await Plotly.toImage({ data: resolved(traces, palette), layout: printed }, { format: "svg", ...size });
    give(decodeURIComponent(url.slice(url.indexOf(",") + 1)), "image/svg+xml", file);
    box.dataset.taken = as;
  }

  // Tables ----------------------------------------------------------------------------------------------------------

  const opened = new Set(), sorted = {};
  function shown(value) { // equal to number() of rendering.py
    if (value === null) return "–";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number" || Number.isInteger(value)) return String(value);
    const size = Math.abs(value), plain = size >= 1e-4 && size < 1e4;
    return plain ? String(Number(value.toPrecision(4))) : value.toExponential(3).replace(/\.?0+e/, "e");
  }
  const glued = (text) => text.replaceAll(" %", "\u00a0%").replace(/(?<=\d)–(?=\d)/g, "\u2060–\u2060"); // as in rendering.py
  const extent = (text) => (text.length <= 24 ? "short" : text.length > 60 ? "long" : "");
  function cell(value, head, { tones: colours, links }) {
    const box = document.createElement("td");
    let inner = box;
    box.dataset.head = head;
    box.className = value === null ? "none" : typeof value === "number" ? "number" : value in links || value in colours ? "" : extent(String(value));
    if (value in links) {
      inner = box.appendChild(document.createElement("a"));
      inner.href = `#section-${links[value]}`;
    } else if (value in colours) {
      inner = box.appendChild(document.createElement("span"));
      inner.className = "chip";
      inner.style.setProperty("--tone", `var(--${colours[value]})`);
    }
    inner.textContent = glued(shown(value));
    return box;
  }
  // Fills a table with the rows that match the selection, sorted; only the first few until it is expanded.
  function fill(table) {
    const id = table.dataset.table, { rows, columns, keys, shown: most } = tables[id];
    const order = rows.map((_, i) => i).filter((i) => !keys.length || matches(keys[i]));
    if (id in sorted) {
      const { column, up } = sorted[id];
      const by = (a, b) => (a === null) - (b === null) // missing values last, in both directions
        || (up ? 1 : -1) * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
      order.sort((a, b) => by(rows[a][column], rows[b][column]));
    }
    const count = opened.has(id) ? order.length : Math.min(order.length, most);
    const names = [...table.tHead.rows[0].cells].map((head) => head.querySelector("button").firstChild.textContent.trim());
    const lines = order.slice(0, count).map((i) => {
      const line = document.createElement("tr");
      line.dataset.row = i;
      line.append(...rows[i].map((value, c) => cell(value, names[c], tables[id])));
      return line;
    });
    if (!lines.length) {
      const line = document.createElement("tr"), words = document.createElement("td");
      line.className = "none";
      words.colSpan = columns.length;
      words.textContent = choice ? `No rows for ${choices[choice].label}.` : "No rows.";
      line.append(words);
      lines.push(line);
    }
    table.tBodies[0].replaceChildren(...lines);
    table.parentNode.classList.toggle("all", opened.has(id));
    const more = table.closest(".table").querySelector(".more");
    more.hidden = count === rows.length;
    more.querySelector("span").textContent = `${count} of ${rows.length} rows${choice && keys.length ? `: ${choices[choice].label}` : ""}.`;
    more.querySelector("button").hidden = count === order.length;
  }
  function sort(head) {
    const table = head.closest("table"), heads = [...head.parentNode.children];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    sorted[table.dataset.table] = { column: heads.indexOf(head), up };
    fill(table);
  }

  // Event listeners -------------------------------------------------------------------------------------------------

  for (const head of document.querySelectorAll("th")) head.querySelector("button").addEventListener("click", () => sort(head));
  for (const table of document.querySelectorAll("[data-table]")) {
    table.closest(".table").querySelector(".more button").addEventListener("click", () => { opened.add(table.dataset.table); fill(table); });
  }
  for (const views of document.querySelectorAll(".views")) {
    const list = views.querySelector(":scope > label select"), each = views.querySelectorAll(":scope > .view");
    if (list) list.addEventListener("change", () => each.forEach((view, i) => { view.hidden = i !== list.selectedIndex; }));
  }
  const form = document.querySelector(".choice");
  if (form) {
    form.querySelector("select").addEventListener("change", ({ target }) => choose(target.value));
    form.addEventListener("reset", () => setTimeout(() => choose("")));
    form.addEventListener("submit", (e) => e.preventDefault());
  }
  // A link to a section opens it.
  function unfold(hash) {
    const section = hash && document.getElementById(decodeURIComponent(hash.slice(1)));
    if (section && section.matches("details")) section.open = true;
  }
  document.addEventListener("click", ({ target }) => { const link = target.closest("a[href^='#']"); if (link) unfold(link.hash); });
  unfold(location.hash);
  for (const button of document.querySelectorAll("[data-take]")) button.addEventListener("click", () => take(button));
  for (const bar of document.querySelectorAll("[data-transport]")) {
    const id = bar.dataset.transport;
    bar.querySelector(".play").addEventListener("click", () => play(id));
    bar.querySelector(".time").addEventListener("input", (e) => { if (state(id).timer !== null) stop(id); state(id).at = Number(e.target.value); show(id); });
    const turn = bar.querySelector(".turn");
    if (turn) {
      turn.addEventListener("input", () => { state(id).turn = Number(turn.value); show(id); });
      turnable(document.querySelector(`[data-figure="${CSS.escape(id)}"]`), id);
    }
  }
  document.getElementById("fold").addEventListener("click", ({ target }) => {
    const fold = target.getAttribute("aria-pressed") === "false";
    target.setAttribute("aria-pressed", String(fold));
    target.textContent = fold ? "Open all" : "Fold all";
    for (const details of document.querySelectorAll("details.section")) details.open = !fold;
  });
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    redraw();
  });
  dark.addEventListener("change", redraw);
  addEventListener("beforeprint", () => drawThese(boxes));
  boxes.forEach((box) => near.observe(box));
  if (boxes.length === 0) root.dataset.ready = "yes";
})();
