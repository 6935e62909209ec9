"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [height, width] = data.size;
  const byId = id => document.getElementById(id);
  const number = (value, digits = 3) => String(+value.toPrecision(digits)).replace("-", "\u2212");
  const sigma = value => `${value > 0 ? "+" : ""}${number(value)} σ`;
  const signed = value => `${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(2)}`;
  const make = (tag, attributes = {}, ...children) => {
    const svg = ["svg", "path", "line", "text", "circle", "g"].includes(tag);
    const part = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) part.setAttribute(name, value);
    part.append(...children);
    return part;
  };

  // ---- sliders: where pictures were painted ahead, each position is a column of the sheet, copied pixel by pixel ----

  function stage(card) {
    const { noises, name, strengths } = data.stages[card.dataset.stage];
    const sheet = card.querySelector("img"), slider = card.querySelector("input"), output = card.querySelector("output");
    const film = card.querySelector(".film"), look = card.querySelector(".look"), columns = strengths.length;
    const strength = () => film ? strengths[slider.value] : +slider.value;
    const place = value => strengths.reduce((best, each, i) => Math.abs(each - value) < Math.abs(strengths[best] - value) ? i : best, 0);
    const start = place(0);

    function show() {
      const words = sigma(strength());
      output.textContent = words;
      slider.setAttribute("aria-valuetext", words.replace("σ", "standard deviations"));
      if (!film) return;
      const column = +slider.value, canvas = look.getContext("2d");
      canvas.clearRect(0, 0, look.width, look.height);
      for (let noise = 0; noise < noises; noise++)
        canvas.drawImage(sheet, column * width, noise * height, width, height, noise * (width + data.gap), 0, width, height);
      card.querySelector(".here").style.left = `${100 * column / columns}%`;
      look.setAttribute("aria-label", `${name} at ${words}`);
    }

    function point(event) {
      const box = film.getBoundingClientRect();
      slider.value = Math.min(columns - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * columns)));
      slider.dispatchEvent(new Event("input"));
    }

    slider.addEventListener("input", show);
    if (film) {
      film.addEventListener("pointerdown", point);
      film.addEventListener("pointermove", event => { if (event.buttons & 1) point(event); });
      film.addEventListener("pointerup", () => slider.dispatchEvent(new Event("change")));
    }
    show();
    const set = value => { slider.value = film ? place(value) : value; show(); };
    return { card, name, sheet, slider, strengths, strength, set, start, column: () => +slider.value };
  }

  // ---- all sliders at once ----

  /* Pictures of the first noise: what each slider changes in its own, added up. */
  function mixture(stages) {
    const context = document.querySelector(".whole").getContext("2d");
    const room = make("canvas", { width, height }).getContext("2d", { willReadFrequently: true });
    const film = stages.map(({ sheet, strengths }) => strengths.map((_, column) => {
      room.drawImage(sheet, column * width, 0, width, height, 0, 0, width, height);
      return room.getImageData(0, 0, width, height).data;
    }));
    return () => {
      const image = context.createImageData(width, height), first = film[0][stages[0].start];
      const moved = stages.map((each, i) => [film[i][each.column()], film[i][each.start]]).filter(([to, from]) => to !== from);
      for (let i = 0; i < first.length; i++)
        image.data[i] = i % 4 === 3 ? 255 : moved.reduce((sum, [to, from]) => sum + to[i] - from[i], first[i]);
      context.putImageData(image, 0, 0);
    };
  }

  /* Pictures that the model paints here, in a worker, the first noise first; of moves in the meantime only the last. */
  function painter(stages) {
    const worker = new Worker(URL.createObjectURL(new Blob([byId("engine").textContent], { type: "text/javascript" })));
    const waiting = [], faces = [...document.querySelectorAll(".whole")], reads = data.live.reads;
    const call = (...message) => new Promise(done => { waiting.push(done); worker.postMessage(message); });
    worker.onmessage = ({ data: answer }) => waiting.shift()(answer);
    call("open", { ...data.live, bytes });
    let busy = false, next = null, before = null;

    function measured(values, atStart) {
      if (atStart) before = values;
      for (const { card, name } of stages) {
        const meter = card.querySelector(".meter"), i = reads.indexOf(name);
        if (!meter || i < 0) continue;
        const at = value => `${50 + 50 * Math.max(-1, Math.min(1, value / 1.5))}%`;
        meter.querySelector(".now").style.left = at(values[i]);
        meter.querySelector(".was").style.left = at((before || values)[i]);
        card.querySelector(".measured").textContent = `measured ${signed(values[i])}`;
      }
    }

    return async (scores, atStart) => {
      next = { scores, atStart };
      if (busy) return;
      busy = true;
      while (next) {
        const now = next, begun = performance.now(), found = [];
        next = null;
        await call("become", now.scores);
        for (const [noise, face] of faces.entries()) {
          if (noise && next) break;
          const pixels = await call("paint", noise);
          face.getContext("2d").putImageData(new ImageData(pixels, face.width, face.height), 0, 0);
          if (!noise) byId("speed").textContent = `Painted here, by the model itself, in ${Math.round(performance.now() - begun)} ms.`;
          if (reads.length) found.push(await call("read", pixels));
        }
        if (!next && reads.length) measured(reads.map((_, i) => found.reduce((sum, each) => sum + each[i], 0) / found.length), now.atStart);
        document.documentElement.dataset.painted = next ? "" : performance.now();
      }
      busy = false;
    };
  }

  const bytes = data.live && Uint8Array.from(atob(byId("weights").textContent), letter => letter.charCodeAt(0)).buffer;

  /* Where an adapter on the map is, in numbers of the space. */
  function scoresOf(i) {
    const [, , [, k], at] = data.live.index.find(([name]) => name === "scores");
    return [...new Float32Array(bytes, at + 4 * k * i, k)];
  }

  let goTo = null, nearestTo = null;  // an adapter on the map becomes the point that sliders begin at; who lists the nearest

  function together(stages) {
    const { record, start, vectors } = data.together, past = [], paint = (data.live ? painter : mixture)(stages);
    const state = () => ({ ...base, strengths: stages.map(each => each.strength()) });
    let base = { at: start, name: "" }, last = state();
    const steps = () => stages.map(({ name, strength }) => [name, strength()]).filter(([, strength]) => strength);
    const scores = () => base.at.map((value, k) => steps().reduce((sum, [name, strength]) => sum + strength * vectors[name][k], value));

    function draw() {
      const moved = steps(), at = scores();
      paint(at, !moved.length);
      const origin = { page: Object.fromEntries(moved), ...(base.name && { start: base.name }) };
      const file = { ...record, points: { ...record.points, scores: [at], origin } };
      byId("save").href = `data:application/json,${encodeURIComponent(JSON.stringify(file))}`;
      const words = moved.map(([name, strength]) => `${name} ${sigma(strength)}`).join(", ");
      byId("position").textContent = [base.name, words || "All at 0."].filter(Boolean).join(": ");
      byId("undo").disabled = !past.length;
    }

    const settled = () => { if (nearestTo) nearestTo(scores()); };
    const remember = () => { past.push(last); last = state(); draw(); settled(); };
    const move = ({ at, name, strengths }) => { base = { at, name }; stages.forEach((each, i) => each.set(strengths[i])); };
    stages.forEach(({ slider }) => {
      slider.addEventListener("input", draw);
      slider.addEventListener("change", remember);
    });
    const zeros = stages.map(() => 0);
    byId("random").addEventListener("click", () => {
      move({ ...base, strengths: stages.map(({ strengths }) => strengths[Math.floor(Math.random() * strengths.length)]) });
      remember();
    });
    byId("undo").addEventListener("click", () => { last = past.pop(); move(last); draw(); settled(); });
    byId("reset").addEventListener("click", () => { move({ ...base, strengths: zeros }); remember(); });
    if (data.live) goTo = (name, i) => { move({ at: scoresOf(i), name, strengths: zeros }); remember(); };
    draw();
    return settled;
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

    function neighborButton(item, similarity, go = () => choose(item, true)) {
      const button = make("button", { type: "button" }, portrait(item, ""),
        make("span", { class: "name" }, item.name), make("span", { class: "unit" }, similarity.toFixed(2).replace("-", "\u2212")));
      button.addEventListener("click", go);
      return button;
    }

    function visit(item) {
      goTo(item.name, item.number);
      byId("together").scrollIntoView({ block: "nearest" });
    }

    /* The models nearest to a point, by the cosine of what both add to the mean of those on the map. */
    function nearestModels(at) {
      const points = trained.map((_, i) => scoresOf(i));
      const mean = at.map((_, k) => points.reduce((sum, point) => sum + point[k], 0) / points.length);
      const cosine = point => {
        let both = 0, one = 0, other = 0;
        for (let k = 0; k < at.length; k++) {
          const a = point[k] - mean[k], b = at[k] - mean[k];
          both += a * b; one += a * a; other += b * b;
        }
        return both / Math.sqrt(one * other || 1);
      };
      const found = points.map((point, i) => [cosine(point), i]).sort((a, b) => b[0] - a[0]).slice(0, 4);
      byId("nearest").replaceChildren(...found.map(([value, i]) => {
        const button = neighborButton(trained[i], value, () => visit(trained[i]));
        return make("li", {}, button);
      }));
    }

    function describe(item) {
      card.replaceChildren();
      if (!item) return;
      const facts = make("dl");
      if (item.number !== null)
        for (const [name, values] of Object.entries(source.labels))
          facts.append(make("dt", {}, name), make("dd", {}, say(values[item.number])));
      const about = make("div", { class: "about" }, make("h3", {}, item.name), facts);
      if (goTo && item.number !== null) {
        const go = make("button", { type: "button", class: "go" }, "Put it on the sliders");
        go.addEventListener("click", () => visit(item));
        about.append(go);
      }
      card.append(portrait(item, "portrait"), about);
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
    if (data.live) nearestTo = nearestModels;
    draw();
    choose(trained[0]);
  }

  document.documentElement.classList.add("scripted");
  Promise.all([...document.images].map(image => image.decode())).then(() => {
    const stages = [...document.querySelectorAll(".stage")].map(stage);
    const settled = data.together && together(stages);
    if (data.map) adapterMap();
    if (settled) settled();
    document.documentElement.dataset.ready = "yes";
  });
})();
