/* The small pipeline, computed here: a point becomes the U-Net's weights, and noise becomes pixels in a few steps.
   Activations are rows of places and columns of channels. Runs in a worker of its own. */
"use strict";
const KINDS = { f4: Float32Array, i1: Int8Array };
const tensors = {}, own = {};
let config;

function half(bits) {
  const size = bits & 0x7fff, low = size & 0x3ff, high = size >> 10;
  return (bits & 0x8000 ? -1 : 1) * (high ? (1 + low / 1024) * 2 ** (high - 15) : low * 2 ** -24);
}

function unpack({ index, bytes }) {
  for (const [name, kind, shape, at] of index) {
    const count = shape.reduce((a, b) => a * b, 1);
    const data = kind === "f2" ? Float32Array.from(new Uint16Array(bytes, at, count), half) : new KINDS[kind](bytes, at, count);
    tensors[name] = { data, shape };
  }
}

const weight = name => own[name] || tensors[name].data, has = name => name in tensors;

// ---- layers ----

/* x (rows, k) times w (outs, k) transposed; in blocks of 4 × 4, so that sums stay in registers. */
function product(x, rows, w, outs, k, bias, y = new Float32Array(rows * outs)) {
  for (let p = 0; p < rows; p += 4) {
    const p1 = Math.min(p + 1, rows - 1) * k, p2 = Math.min(p + 2, rows - 1) * k, p3 = Math.min(p + 3, rows - 1) * k;
    for (let o = 0; o < outs; o += 4) {
      const o0 = o * k, o1 = Math.min(o + 1, outs - 1) * k, o2 = Math.min(o + 2, outs - 1) * k, o3 = Math.min(o + 3, outs - 1) * k;
      let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
      let c0 = 0, c1 = 0, c2 = 0, c3 = 0, d0 = 0, d1 = 0, d2 = 0, d3 = 0;
      for (let i = 0, j = p * k; i < k; i++, j++) {
        const s = x[j], t = x[p1 + i], u = x[p2 + i], v = x[p3 + i];
        const e = w[o0 + i], f = w[o1 + i], g = w[o2 + i], h = w[o3 + i];
        a0 += s * e; a1 += s * f; a2 += s * g; a3 += s * h;
        b0 += t * e; b1 += t * f; b2 += t * g; b3 += t * h;
        c0 += u * e; c1 += u * f; c2 += u * g; c3 += u * h;
        d0 += v * e; d1 += v * f; d2 += v * g; d3 += v * h;
      }
      const sums = [a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3];
      for (let r = 0; r < 4 && p + r < rows; r++)
        for (let q = 0; q < 4 && o + q < outs; q++) y[(p + r) * outs + o + q] = sums[4 * r + q] + (bias ? bias[o + q] : 0);
    }
  }
  return y;
}

function linear(x, rows, name) {
  const [outs] = tensors[`${name}.weight`].shape;
  return product(x, rows, weight(`${name}.weight`), outs, x.length / rows, has(`${name}.bias`) && weight(`${name}.bias`));
}

/* A convolution with odd kernel, its channels last, and zeros around; `map` is { x, h, w, c }. */
function conv({ x, h, w, c }, name, stride = 1) {
  const [outs, side] = tensors[`${name}.weight`].shape, pad = side >> 1;
  const high = Math.ceil(h / stride), wide = Math.ceil(w / stride);
  let columns = x;
  if (side > 1 || stride > 1) {
    columns = new Float32Array(high * wide * c * side * side);
    for (let row = 0, to = 0; row < high; row++)
      for (let column = 0; column < wide; column++)
        for (let i = 0; i < side; i++, to += c * side) {
          const y = row * stride + i - pad, left = column * stride - pad, z = Math.max(left, 0), end = Math.min(left + side, w);
          if (y >= 0 && y < h) columns.set(x.subarray((y * w + z) * c, (y * w + end) * c), to + (z - left) * c);
        }
  }
  return { x: linear(columns, high * wide, name), h: high, w: wide, c: outs };
}

/* Mean 0 and deviation 1 in each group of channels, over all places. */
function groupNorm({ x, h, w, c }, name, groups, eps) {
  const scale = weight(`${name}.weight`), shift = weight(`${name}.bias`), size = c / groups, y = new Float32Array(x.length);
  for (let group = 0; group < groups; group++) {
    let sum = 0, squares = 0;
    const each = visit => { for (let at = group * size; at < x.length; at += c) for (let n = at; n < at + size; n++) visit(n); };
    each(n => { sum += x[n]; });
    const mean = sum / (h * w * size);
    each(n => { squares += (x[n] - mean) ** 2; });
    const over = 1 / Math.sqrt(squares / (h * w * size) + eps);
    each(n => { y[n] = (x[n] - mean) * over * scale[n % c] + shift[n % c]; });
  }
  return { x: y, h, w, c };
}

function layerNorm(x, c, name) {
  const scale = weight(`${name}.weight`), shift = weight(`${name}.bias`), y = new Float32Array(x.length);
  for (let at = 0; at < x.length; at += c) {
    let sum = 0, squares = 0;
    for (let n = 0; n < c; n++) sum += x[at + n];
    for (let n = 0; n < c; n++) squares += (x[at + n] - sum / c) ** 2;
    const over = 1 / Math.sqrt(squares / c + 1e-5);
    for (let n = 0; n < c; n++) y[at + n] = (x[at + n] - sum / c) * over * scale[n] + shift[n];
  }
  return y;
}

function silu(x) {
  const y = new Float32Array(x.length);
  for (let n = 0; n < x.length; n++) y[n] = x[n] / (1 + Math.exp(-x[n]));
  return y;
}

const add = (x, y) => { for (let n = 0; n < x.length; n++) x[n] += y[n]; return x; };

/* x Φ(x), with the error function to 2e-7 (Abramowitz and Stegun, 7.1.26). */
function gelu(x) {
  const z = Math.abs(x) / Math.SQRT2, t = 1 / (1 + 0.3275911 * z);
  const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * Math.exp(-z * z);
  return x * (x < 0 ? tail : 2 - tail) / 2;
}

function attention(x, rows, context, name) {
  const q = linear(x, rows, `${name}.to_q`), tokens = context.length / tensors[`${name}.to_k.weight`].shape[1];
  const k = linear(context, tokens, `${name}.to_k`), v = linear(context, tokens, `${name}.to_v`);
  const c = q.length / rows, size = c / config.heads, y = new Float32Array(q.length), share = new Float64Array(tokens);
  for (let start = 0; start < c; start += size)
    for (let row = 0; row < rows; row++) {
      let most = -Infinity, total = 0;
      for (let token = 0; token < tokens; token++) {
        let sum = 0;
        for (let n = start; n < start + size; n++) sum += q[row * c + n] * k[token * c + n];
        most = Math.max(most, share[token] = sum / Math.sqrt(size));
      }
      for (let token = 0; token < tokens; token++) total += share[token] = Math.exp(share[token] - most);
      for (let token = 0; token < tokens; token++)
        for (let n = start; n < start + size; n++) y[row * c + n] += share[token] / total * v[token * c + n];
    }
  return linear(y, rows, `${name}.to_out.0`);
}

function gated(x, rows, name) {
  const both = linear(x, rows, `${name}.net.0.proj`), c = both.length / rows / 2, y = new Float32Array(rows * c);
  for (let row = 0; row < rows; row++)
    for (let n = 0; n < c; n++) y[row * c + n] = both[2 * row * c + n] * gelu(both[(2 * row + 1) * c + n]);
  return linear(y, rows, `${name}.net.2`);
}

function transformer(map, text, name) {
  const rows = map.h * map.w, normed = groupNorm(map, `${name}.norm`, config.groups, 1e-6);
  let x = linear(normed.x, rows, `${name}.proj_in`);
  const c = x.length / rows;
  for (let block, i = 0; has(`${block = `${name}.transformer_blocks.${i}`}.norm1.weight`); i++) {
    const own = layerNorm(x, c, `${block}.norm1`);
    x = add(attention(own, rows, own, `${block}.attn1`), x);
    x = add(attention(layerNorm(x, c, `${block}.norm2`), rows, text, `${block}.attn2`), x);
    x = add(gated(layerNorm(x, c, `${block}.norm3`), rows, `${block}.ff`), x);
  }
  return { ...map, x: add(linear(x, rows, `${name}.proj_out`), map.x) };
}

function resnet(map, time, name) {
  const active = part => ({ ...part, x: silu(part.x) });
  const first = conv(active(groupNorm(map, `${name}.norm1`, config.groups, config.eps)), `${name}.conv1`);
  const shift = linear(silu(time), 1, `${name}.time_emb_proj`);
  for (let n = 0; n < first.x.length; n++) first.x[n] += shift[n % first.c];
  const second = conv(active(groupNorm(first, `${name}.norm2`, config.groups, config.eps)), `${name}.conv2`);
  add(second.x, (has(`${name}.conv_shortcut.weight`) ? conv(map, `${name}.conv_shortcut`) : map).x);
  return second;
}

function joined(one, other) {
  const c = one.c + other.c, x = new Float32Array(one.h * one.w * c);
  for (let place = 0; place < one.h * one.w; place++) {
    x.set(one.x.subarray(place * one.c, (place + 1) * one.c), place * c);
    x.set(other.x.subarray(place * other.c, (place + 1) * other.c), place * c + one.c);
  }
  return { ...one, x, c };
}

function doubled({ x, h, w, c }) {
  const y = new Float32Array(4 * x.length);
  for (let place = 0; place < 4 * h * w; place++) {
    const from = (Math.floor(place / (4 * w)) * w + (place % (2 * w) >> 1)) * c;
    y.set(x.subarray(from, from + c), place * c);
  }
  return { x: y, h: 2 * h, w: 2 * w, c };
}

function denoiser(map, time, text) {
  const kept = [map = conv(map, "conv_in")];
  const layer = (part, i) => {
    map = resnet(map, time, `${part}.resnets.${i}`);
    if (has(`${part}.attentions.${i}.norm.weight`)) map = transformer(map, text, `${part}.attentions.${i}`);
  };
  const there = (part, i) => has(`${part}.resnets.${i}.norm1.weight`);
  for (let n = 0; n < config.levels; n++) {
    const part = `down_blocks.${n}`;
    for (let i = 0; there(part, i); i++) { layer(part, i); kept.push(map); }
    if (has(`${part}.downsamplers.0.conv.weight`)) kept.push(map = conv(map, `${part}.downsamplers.0.conv`, 2));
  }
  for (let i = 0; there("mid_block", i); i++) layer("mid_block", i);
  for (let n = 0; n < config.levels; n++) {
    const part = `up_blocks.${n}`;
    for (let i = 0; there(part, i); i++) { map = joined(map, kept.pop()); layer(part, i); }
    if (has(`${part}.upsamplers.0.conv.weight`)) map = conv(doubled(map), `${part}.upsamplers.0.conv`);
  }
  map = groupNorm(map, "conv_norm_out", config.groups, config.eps);
  return conv({ ...map, x: silu(map.x) }, "conv_out").x;
}

// ---- from a point to pixels ----

/* Shares of the bank's adapters in a point: Σ share × adapter is what it adds to the model. */
function shares(scores) {
  const { data, shape: [n, k] } = tensors.combinations, found = new Float32Array(n).fill(1 / n);
  for (let i = 0; i < n; i++) for (let j = 0; j < k; j++) found[i] += data[i * k + j] * scores[j];
  return found;
}

function become(scores) {
  const share = shares(scores);
  for (const name of config.modules) {
    const { data: ups, shape: [rows, n] } = tensors[`ups.${name}`], downs = tensors[`downs.${name}`].data;
    const sizes = tensors[`sizes.${name}`].data, rank = n / share.length, scaled = new Float32Array(ups.length);
    for (let i = 0; i < ups.length; i++) scaled[i] = ups[i] * sizes[i % n] * share[Math.floor(i % n / rank)];
    const base = tensors[`${name}.weight`].data;
    own[`${name}.weight`] = add(product(scaled, rows, Float32Array.from(downs), downs.length / n, n), base);
  }
}

function paint(number) {
  const [, h, w, c] = tensors.noise.shape, size = h * w * c, steps = tensors.schedule.shape[0];
  const part = (name, i, length) => tensors[name].data.slice(i * length, (i + 1) * length);
  const x = part("noise", number, size), text = part("text", number, tensors.text.data.length / tensors.text.shape[0]);
  for (let step = 0; step < steps; step++) {
    const [scale, keep, more] = part("schedule", step, 3), time = part("times", step, tensors.times.shape[1]);
    const map = { x: x.map(value => value * scale), h, w, c };
    const found = denoiser(map, time, text);
    if (config.guidance > 1) {
      const without = denoiser(map, time, tensors.empty.data);
      for (let n = 0; n < size; n++) found[n] = without[n] + config.guidance * (found[n] - without[n]);
    }
    for (let n = 0; n < size; n++) x[n] = keep * x[n] + more * found[n];
  }
  return pixelsOf({ x, h, w });
}

function pixelsOf({ x, h, w }) {
  const pixels = new Uint8ClampedArray(h * w * 4).fill(255);
  for (let n = 0; n < x.length; n++) pixels[4 * Math.floor(n / 3) + n % 3] = Math.round(255 * Math.min(1, Math.max(0, x[n] / 2 + .5)));
  return pixels;
}

/* Means over squares of places. */
function means({ x, h, w, c }, side) {
  const high = h / side, wide = w / side, y = new Float32Array(high * wide * c);
  for (let n = 0; n < x.length; n++) {
    const place = Math.floor(n / c), row = Math.floor(place / w / side), column = Math.floor(place % w / side);
    y[(row * wide + column) * c + n % c] += x[n] / side ** 2;
  }
  return { x: y, h: high, w: wide, c };
}

/* What a network makes of a picture. */
function through(layers, pixels) {
  const [, h, w] = tensors.noise.shape;
  let map = { x: new Float32Array(h * w * 3).map((_, n) => pixels[4 * Math.floor(n / 3) + n % 3] / 127.5 - 1), h, w, c: 3 };
  for (const [name, side] of layers) {
    if (name === "silu") map.x = silu(map.x);
    else if (name === "means") map = means(map, side);
    else map = side ? conv(map, name, side) : { x: linear(map.x, 1, name) };
  }
  return map;
}

const read = pixels => [...through(config.reader, pixels).x];

const CALLS = {
  open: parts => { ({ config } = parts); unpack(parts); },
  become, paint, read,
};
if (typeof onmessage !== "undefined" && typeof document === "undefined")
  onmessage = ({ data: [name, ...values] }) => postMessage(CALLS[name](...values));
