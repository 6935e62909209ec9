"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [height, width] = data.size;
  const byId = id => document.getElementById(id);
  const number = (value, digits = 3) => String(+value.toPrecision(digits)).replace("-", "\u2212");
  const sigma = value => `${value > 0 ? "+" : ""}${number(value)} σ`;
  const make = (tag, attributes = {}, ...children) => {
    const svg = ["svg", "path", "line", "text", "circle", "g"].includes(tag);
    const part = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) part.setAttribute(name, value);
    part.append(...children);
    return part;
  };

  // ---- sliders: each position is a column (and row) of the sheet, copied pixel by pixel ----

  function stage(card) {
    const { rows, noises, names, strengths, readings } = data.stages[card.dataset.stage];
    const sheet = card.querySelector("img"), look = card.querySelector(".look"), here = card.querySelector(".here");
    const film = card.querySelector(".film"), sliders = [...card.querySelectorAll("input")];
    const outputs = card.querySelectorAll("output");
    const canvas = look.getContext("2d");

    function show() {
      const column = +sliders[0].value, row = sliders[1] ? rows - 1 - sliders[1].value : 0;
      canvas.clearRect(0, 0, look.width, look.height);
      for (let noise = 0; noise < noises; noise++)
        canvas.drawImage(sheet, column * width, (noise * rows + row) * height, width, height,
          noise * (width + data.gap), 0, width, height);
      here.style.left = `${100 * column / film.dataset.columns}%`;
      here.style.top = `${100 * row / rows}%`;
      const told = sliders.map((slider, place) => {
        const words = sigma(strengths[place][slider.value]);
        outputs[place].textContent = words;
        slider.setAttribute("aria-valuetext", words.replace("σ", "standard deviations"));
        return `${names[place]} at ${words}`;
      });
      look.setAttribute("aria-label", told.join(", "));
      changed(column);
    }

    /* What was measured here, against 0, of the two lines that have a color. */
    function changed(column) {
      const line = card.querySelector(".changed"), start = +sliders[0].dataset.start;
      if (!line) return;
      line.replaceChildren(...[...card.querySelectorAll(".key span")].map(part => {
        const change = readings[part.textContent][column] - readings[part.textContent][start];
        const words = `${change < 0 ? "\u2212" : "+"}${Math.abs(change).toFixed(2)}`;
        return make("span", { class: part.className }, `${part.textContent} ${words}`);
      }));
    }

    function point(event) {
      const box = film.getBoundingClientRect();
      const place = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
      sliders[0].value = place((event.clientX - box.left) / box.width, strengths[0].length);
      if (sliders[1]) sliders[1].value = rows - 1 - place((event.clientY - box.top) / box.height, rows);
      show();
    }

    film.dataset.columns = strengths[0].length;
    sliders.forEach(slider => slider.addEventListener("input", show));
    film.addEventListener("pointerdown", point);
    film.addEventListener("pointermove", event => { if (event.buttons & 1) point(event); });
    show();
    const set = values => { sliders.forEach((slider, place) => { slider.value = values[place]; }); show(); };
    return { name: names[0], sheet, sliders, strengths, set, starts: sliders.map(slider => +slider.dataset.start) };
  }

  // ---- all sliders at once: what each changes in its own pictures, added up ----

  function together(stages) {
    const canvas = document.querySelector(".whole"), context = canvas.getContext("2d"), past = [];
    const room = make("canvas", { width, height }).getContext("2d", { willReadFrequently: true });
    const pixels = (sheet, column) => {
      room.drawImage(sheet, column * width, 0, width, height, 0, 0, width, height);
      return room.getImageData(0, 0, width, height).data;
    };
    const film = stages.map(({ sheet, strengths }) => strengths[0].map((_, column) => pixels(sheet, column)));
    const state = () => stages.map(({ sliders }) => +sliders[0].value);
    let last = state();

    function draw() {
      const image = context.createImageData(width, height), now = state();
      const first = film[0][stages[0].starts[0]];
      const moved = stages.map((each, i) => [film[i][now[i]], film[i][each.starts[0]]]).filter(([to, from]) => to !== from);
      for (let i = 0; i < first.length; i++)
        image.data[i] = i % 4 === 3 ? 255 : moved.reduce((sum, [to, from]) => sum + to[i] - from[i], first[i]);
      context.putImageData(image, 0, 0);
      const steps = stages.map(({ name, strengths }, i) => [name, strengths[0][now[i]]]).filter(([, strength]) => strength);
      const { record, start, vectors } = data.together;
      const scores = start.map((value, k) => steps.reduce((sum, [name, strength]) => sum + strength * vectors[name][k], value));
      const file = { ...record, points: { ...record.points, scores: [scores], origin: { page: Object.fromEntries(steps) } } };
      byId("save").href = `data:application/json,${encodeURIComponent(JSON.stringify(file))}`;
      byId("position").textContent = steps.map(([name, strength]) => `${name} ${sigma(strength)}`).join(", ") || "All at 0.";
      byId("undo").disabled = !past.length;
    }

    const remember = () => { past.push(last); last = state(); draw(); };
    const move = values => { stages.forEach((each, i) => each.set([values[i]])); };
    stages.forEach(({ sliders, sheet }) => {
      sliders[0].addEventListener("input", draw);
      sliders[0].addEventListener("change", remember);
      sheet.parentElement.addEventListener("pointerup", remember);
    });
    byId("random").addEventListener("click", () => {
      move(stages.map(({ strengths }) => Math.floor(Math.random() * strengths[0].length)));
      remember();
    });
    byId("undo").addEventListener("click", () => { last = past.pop(); move(last); draw(); });
    byId("reset").addEventListener("click", remember);
    draw();
  }

  // ---- colors and shapes of labels ----

  const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];  // viridis
  const SHAPES = ["M-1,0a1,1 0 1 0 2,0a1,1 0 1 0 -2,0", "M-.9-.9h1.8v1.8h-1.8z", "M0-1.2L1.1.8H-1.1z",
    "M0-1.25L1.25 0L0 1.25L-1.25 0z", "M0 1.2L1.1-.8H-1.1z", "M-.4-1.2h.8v.8h.8v.8h-.8v.8h-.8v-.8h-.8v-.8h.8z"];
  const MOST = 6;

  function ramp(share) {
    const place = Math.min(RAMP.length - 1.001, Math.max(0, share * (RAMP.length - 1))), low = Math.floor(place);
    return `rgb(${RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * (place - low)))})`;
  }
  const say = value => value === null ? "not known"
    : typeof value === "boolean" ? (value ? "yes" : "no") : typeof value === "number" ? number(value) : value;

  /* How a label is shown: per adapter a color and a shape, and the legend. Few values are kinds, many numbers a ramp. */
  function coloring(name) {
    const values = data.map.labels[name];
    if (!values) return { of: () => ["var(--series-1)", 0], legend: [] };
    const known = values.filter(value => value !== null), kinds = [...new Set(known)];
    const ordered = kinds.every(kind => typeof kind === "number");
    if (ordered && kinds.length > 4) {
      const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
      const of = i => values[i] === null ? [null, 0] : [ramp((values[i] - low) / (high - low)), 0];
      return { of, ramp: [low, high], unknown: known.length < values.length, legend: [] };
    }
    const count = kind => known.filter(value => value === kind).length;
    kinds.sort((a, b) => ordered ? a - b : count(b) - count(a) || String(a).localeCompare(b));
    const place = new Map(kinds.map((kind, i) => [kind, Math.min(i, MOST - 1)]));
    const legend = kinds.slice(0, MOST).map((kind, i) => [`var(--series-${i + 1})`, i, `${say(kind)} (${count(kind)})`]);
    if (kinds.length > MOST) {
      const rest = kinds.slice(MOST - 1);
      legend[MOST - 1][2] = `${rest.length} others (${rest.reduce((sum, kind) => sum + count(kind), 0)})`;
    }
    const of = i => values[i] === null ? [null, 0] : [`var(--series-${place.get(values[i]) + 1})`, place.get(values[i])];
    return { of, legend, unknown: known.length < values.length };
  }

  // ---- the map ----

  function adapterMap() {
    const source = data.map, plot = byId("plot"), svg = plot.querySelector("svg"), under = plot.querySelector("canvas");
    const sheet = byId("thumbnails"), card = byId("card"), controls = ["color", "across", "up"].map(byId);
    const pictures = byId("pictures"), drawn = byId("drawn"), find = byId("find");
    const trained = source.names.map((name, i) => ({
      name, at: source.coordinates[i], number: i, image: sheet,
      x: (i % source.across) * width, y: Math.floor(i / source.across) * height,
      near: source.neighbors && [source.neighbors.numbers[i], source.neighbors.similarities[i]],
    }));
    const sampled = ((data.samples && data.samples.coordinates) || []).map((at, i) => ({
      name: `Sample ${i + 1}`, at, number: null, image: document.querySelectorAll(".sample > img")[i], x: 0, y: 0,
      near: data.samples.neighbors && [data.samples.neighbors.numbers[i], data.samples.neighbors.similarities[i]],
    }));
    let shown = [], chosen = null, colors = coloring("");

    const portrait = (item, kind) => {
      const canvas = make("canvas", { class: kind, width, height, role: "img", "aria-label": `Picture of ${item.name}` });
      canvas.getContext("2d").drawImage(item.image, item.x, item.y, width, height, 0, 0, width, height);
      return canvas;
    };

    function neighborButton(item, similarity) {
      const button = make("button", { type: "button" }, portrait(item, ""),
        make("span", { class: "name" }, item.name), make("span", { class: "unit" }, similarity.toFixed(2).replace("-", "\u2212")));
      button.addEventListener("click", () => choose(item, true));
      return button;
    }

    function describe(item) {
      card.replaceChildren();
      if (!item) return;
      const facts = make("dl");
      if (item.number !== null)
        for (const [name, values] of Object.entries(source.labels))
          facts.append(make("dt", {}, name), make("dd", {}, say(values[item.number])));
      card.append(portrait(item, "portrait"), make("div", { class: "about" }, make("h3", {}, item.name), facts));
      if (!item.near) return;
      const list = make("ol", { class: "near" });
      item.near[0].forEach((i, place) => list.append(make("li", {}, neighborButton(trained[i], item.near[1][place]))));
      const measure = (item.number === null ? data.samples : source).neighbors.measure;
      card.append(make("p", { class: "small" }, `Nearest (${measure})`), list);
    }

    function choose(item, jump) {
      chosen = item;
      describe(item);
      ring();
      const labels = item && item.number !== null ? Object.entries(source.labels).map(([name, values]) =>
        `${name} ${say(values[item.number])}`) : [];
      byId("said").textContent = item ? [item.name, ...labels].join(", ") : "";
      if (jump) {
        plot.focus({ preventScroll: true });
        plot.scrollIntoView({ block: "nearest" });
      }
    }

    function ring(item = chosen) {
      svg.querySelectorAll(".ring, .link").forEach(part => part.remove());
      if (!item || !shown.includes(item)) return;
      const radius = pictures.checked ? side() * .8 : 10;
      if (pictures.checked) paint(item);
      if (item.near) item.near[0].forEach(i => svg.append(make("line", {
        class: "link", x1: item.px, y1: item.py, x2: trained[i].px, y2: trained[i].py })));
      svg.append(make("circle", { class: "ring", cx: item.px, cy: item.py, r: radius }));
    }

    const side = () => Math.max(14, Math.min(40, plot.clientWidth / Math.sqrt(shown.length) * .8));

    function draw() {
      const [across, up] = controls.slice(1).map(control => +control.value);
      const wide = plot.clientWidth, high = plot.clientHeight, edge = 26;
      shown = drawn && drawn.checked ? [...trained, ...sampled] : trained;
      colors = coloring(controls[0].value);
      const scale = (axis, from, to) => {
        const values = shown.map(item => item.at[axis]);
        const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
        return { low, high, of: value => high > low ? from + (to - from) * (value - low) / (high - low) : (from + to) / 2 };
      };
      const free = pictures.checked ? side() / 2 + 4 : 14;
      const x = scale(across, edge + free, wide - free), y = scale(up, high - edge - free, free);
      shown.forEach(item => { item.px = x.of(item.at[across]); item.py = y.of(item.at[up]); });
      svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
      svg.replaceChildren(...zero(x, y, wide, high), ...names(x, y, wide, high, edge, across, up));
      const size = Math.max(2.4, Math.min(5.5, wide / 6 / Math.sqrt(shown.length)));
      for (const item of shown) {
        if (item.number === null)
          svg.append(make("path", { class: "drawn", d: "M-4-4L4 4M-4 4L4-4", transform: `translate(${item.px} ${item.py})` }));
        else svg.append(mark(colors.of(item.number), `translate(${item.px} ${item.py}) scale(${size})`, size));
      }
      plot.classList.toggle("painted", pictures.checked);
      paint();
      legend();
      ring();
    }

    const mark = ([color, shape], transform, size) => make("path", {
      class: color ? "mark" : "mark unknown", d: SHAPES[shape], transform, "stroke-width": .8 / size,
      style: `${color ? `fill: ${color}; ` : ""}stroke-width: ${.8 / size}`,
    });

    function zero(x, y, wide, high) {
      const lines = [];
      if (x.low < 0 && x.high > 0) lines.push(make("line", { class: "axis", x1: x.of(0), x2: x.of(0), y1: 0, y2: high }));
      if (y.low < 0 && y.high > 0) lines.push(make("line", { class: "axis", y1: y.of(0), y2: y.of(0), x1: 0, x2: wide }));
      return lines;
    }

    function names(x, y, wide, high, edge, across, up) {
      const text = (words, more) => make("text", more, words);
      const turned = `translate(15 ${high / 2 - 8}) rotate(-90)`;
      return [
        text(number(x.low, 2), { x: edge + 8, y: high - 8 }), text(number(x.high, 2), { x: wide - 8, y: high - 8, "text-anchor": "end" }),
        text(`${source.axes[across]} →`, { x: wide / 2, y: high - 8, "text-anchor": "middle" }),
        text(number(y.low, 2), { transform: `translate(15 ${high - edge - 8}) rotate(-90)` }),
        text(number(y.high, 2), { transform: "translate(15 8) rotate(-90)", "text-anchor": "end" }),
        text(`${source.axes[up]} →`, { transform: turned, "text-anchor": "middle" }),
      ];
    }

    function paint(top) {
      const dense = devicePixelRatio || 1, canvas = under.getContext("2d"), own = side();
      const wide = plot.clientWidth, high = plot.clientHeight;
      under.width = wide * dense;
      under.height = high * dense;
      if (!pictures.checked) return;
      canvas.scale(dense, dense);
      canvas.imageSmoothingEnabled = document.body.classList.contains("smooth");
      const style = getComputedStyle(document.documentElement);
      for (const item of top ? [...shown, top] : shown) {
        const color = item.number === null ? "var(--ink)" : colors.of(item.number)[0] || "var(--soft)";
        const named = /^var\((.+)\)$/.exec(color);
        canvas.fillStyle = named ? style.getPropertyValue(named[1]).trim() : color;
        canvas.fillRect(item.px - own / 2 - 2, item.py - own / 2 - 2, own + 4, own + 4);
        canvas.drawImage(item.image, item.x, item.y, width, height, item.px - own / 2, item.py - own / 2, own, own);
      }
    }

    function legend() {
      const entry = (look, words) => make("span", {}, make("svg", { viewBox: "-1.4 -1.4 2.8 2.8" }, mark(look, "", 6)), words);
      const parts = colors.legend.map(([color, shape, words]) => entry([color, shape], words));
      if (colors.ramp) {
        const bar = make("span", { class: "ramp" });
        bar.style.background = `linear-gradient(to right, ${RAMP.map(stop => `rgb(${stop})`)})`;
        parts.push(make("span", {}, number(colors.ramp[0]), bar, number(colors.ramp[1])));
      }
      if (colors.unknown) parts.push(entry([null, 0], "not known"));
      if (controls[0].value) parts.unshift(make("strong", {}, controls[0].value));
      if (shown.length > trained.length) parts.push(make("span", {}, "✕ sampled"));
      byId("legend").replaceChildren(...parts);
    }

    function nearest(event) {
      const box = svg.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
      let best = null, least = event.pointerType === "touch" ? 40 : 24;
      for (const item of shown) {
        const far = Math.hypot(item.px - px, item.py - py);
        if (far < least) [best, least] = [item, far];
      }
      return best;
    }

    /* The next mark in a direction: near, and rather straight ahead than aside. */
    function beyond(dx, dy) {
      const from = chosen || { px: plot.clientWidth / 2, py: plot.clientHeight / 2 };
      let best = null, least = Infinity;
      for (const item of shown) {
        const ahead = (item.px - from.px) * dx + (item.py - from.py) * dy;
        const aside = Math.abs((item.px - from.px) * dy) + Math.abs((item.py - from.py) * dx);
        if (item !== chosen && ahead > 0 && aside <= 2 * ahead && ahead + 2 * aside < least)
          [best, least] = [item, ahead + 2 * aside];
      }
      return best;
    }

    const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    plot.addEventListener("keydown", event => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const step = STEPS[event.key], end = { Home: shown[0], End: shown[shown.length - 1] }[event.key];
      const item = step ? beyond(...step) : end;
      if (event.key === "Escape") choose(null);
      else if (item) choose(item);
      if (step || end || event.key === "Escape") event.preventDefault();
    });
    plot.addEventListener("pointermove", event => {
      if (event.pointerType === "touch") return;
      const item = nearest(event) || chosen;
      if (item !== plot.item) { describe(item); ring(item); }
      plot.item = item;
    });
    plot.addEventListener("pointerleave", () => { plot.item = undefined; describe(chosen); ring(); });
    plot.addEventListener("click", event => choose(nearest(event)));
    find.addEventListener("input", () => {
      const item = trained.find(each => each.name === find.value);
      if (item) choose(item);
    });
    [...controls, pictures, drawn].forEach(control => control && control.addEventListener("change", draw));
    if (data.samples && data.samples.neighbors)
      document.querySelectorAll(".sample").forEach((tile, i) => tile.querySelectorAll("li").forEach((line, place) => {
        const { numbers, similarities } = data.samples.neighbors;
        line.replaceChildren(neighborButton(trained[numbers[i][place]], similarities[i][place]));
      }));
    new ResizeObserver(draw).observe(plot);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    draw();
    choose(trained[0]);
  }

  document.documentElement.classList.add("scripted");
  Promise.all([...document.images].map(image => image.decode())).then(() => {
    const stages = [...document.querySelectorAll(".stage")].map(stage);
    byId("reset").addEventListener("click", () => stages.forEach(each => each.set(each.starts)));
    if (data.together) together(stages.filter(each => each.sliders.length === 1));
    if (data.map) adapterMap();
    document.documentElement.dataset.ready = "yes";
  });
})();
