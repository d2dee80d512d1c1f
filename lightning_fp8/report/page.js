"use strict";
(function () {
  const data = JSON.parse(document.getElementById("maps").textContent);
  const canvas = document.getElementById("map");
  if (!canvas || !data.maps.length) return;
  const told = document.getElementById("told"), context = canvas.getContext("2d");
  const MISSING = -32768, ALARM = 32767;
  for (const map of data.maps) {
    const bytes = Uint8Array.from(atob(map.values), (letter) => letter.charCodeAt(0));
    map.cells = new Int16Array(bytes.buffer);
  }
  let map = data.maps[0], row = 0, column = 0, shown = false;

  const color = (cell) => {
    if (cell === MISSING) return [0, 0, 0, 0];
    if (cell === ALARM) return [...data.alarm, 255];
    const place = Math.min(1, Math.max(0, (cell / data.unit - map.low) / Math.max(map.high - map.low, 1e-9)));
    const scaled = place * (data.colors.length - 1), left = Math.min(Math.floor(scaled), data.colors.length - 2);
    return [...data.colors[left].map((v, i) => Math.round(v + (data.colors[left + 1][i] - v) * (scaled - left))), 255];
  };

  function layout() {
    const width = canvas.parentElement.clientWidth - 24, rows = data.names.length;
    const height = Math.max(4, Math.min(20, Math.floor(560 / rows)));
    const gutter = height >= 12 && width > 560 ? Math.min(260, width * 0.3) : 0;
    return { width, rows, height, gutter, columns: data.steps.length };
  }

  function draw() {
    const { width, rows, height, gutter, columns } = layout(), ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = rows * height * ratio;
    canvas.style.height = rows * height + "px";
    const picture = document.createElement("canvas");
    picture.width = columns; picture.height = rows;
    const pixels = picture.getContext("2d").createImageData(columns, rows);
    for (let i = 0; i < rows * columns; i++) pixels.data.set(color(map.cells[i]), 4 * i);
    picture.getContext("2d").putImageData(pixels, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, gutter, 0, width - gutter, rows * height);
    const style = getComputedStyle(document.documentElement);
    if (gutter) {
      context.font = Math.min(12, height - 1) + "px system-ui, sans-serif";
      context.fillStyle = style.getPropertyValue("--ink");
      context.textBaseline = "middle"; context.textAlign = "right";
      data.names.forEach((name, i) => {
        let text = name;
        while (text.length > 4 && context.measureText(text).width > gutter - 10) text = "…" + text.slice(2);
        context.fillText(text, gutter - 6, (i + 0.5) * height);
      });
    }
    if (shown) {
      const cell = (width - gutter) / columns;
      context.lineWidth = 2; context.strokeStyle = style.getPropertyValue("--paper");
      context.strokeRect(gutter + column * cell - 2, row * height - 2, cell + 4, height + 4);
      context.strokeStyle = style.getPropertyValue("--ink");
      context.strokeRect(gutter + column * cell, row * height, cell, height);
    }
  }

  function tell() {
    const cell = map.cells[row * data.steps.length + column], value = cell / data.unit;
    let text = "not seen";
    if (cell === ALARM) text = "NaN or Inf";
    else if (cell !== MISSING) text = map.quantity === "amax" ? `amax ${(2 ** value).toPrecision(3)}` : `headroom ${value.toFixed(2)} powers of two`;
    told.textContent = `${data.names[row]}, ${map.role}, step ${data.steps[column]}: ${text}`;
    canvas.setAttribute("aria-label", `Heat map of ${map.quantity} of ${map.role}. ${told.textContent}`);
  }

  function point(event) {
    const { width, rows, height, gutter, columns } = layout(), box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left - gutter;
    if (x < 0) return;
    column = Math.min(columns - 1, Math.floor((x / (width - gutter)) * columns));
    row = Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / height)));
    shown = true; tell(); draw();
  }

  function choose() {
    const picked = (name) => document.querySelector(`input[name=${name}]:checked`).value;
    map = data.maps.find((m) => m.quantity === picked("quantity") && m.role === picked("role")) || map;
    document.getElementById("low").textContent = map.quantity === "amax" ? (2 ** map.low).toPrecision(2) : map.low.toFixed(1);
    document.getElementById("high").textContent = map.quantity === "amax" ? (2 ** map.high).toPrecision(2) : map.high.toFixed(1);
    tell(); draw();
  }

  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("focus", () => { shown = true; tell(); draw(); });
  canvas.addEventListener("keydown", (event) => {
    const last = data.steps.length - 1, lowest = data.names.length - 1;
    const moves = {
      ArrowLeft: () => (column = Math.max(0, column - 1)), ArrowRight: () => (column = Math.min(last, column + 1)),
      ArrowUp: () => (row = Math.max(0, row - 1)), ArrowDown: () => (row = Math.min(lowest, row + 1)),
      Home: () => (column = 0), End: () => (column = last),
      PageUp: () => (row = 0), PageDown: () => (row = lowest),
    };
    if (!(event.key in moves)) return;
    event.preventDefault(); moves[event.key](); shown = true; tell(); draw();
  });
  document.querySelectorAll("input[type=radio]").forEach((input) => input.addEventListener("change", choose));
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  choose();
  told.textContent = "Point at a cell, or move with the arrow keys.";
})();
