// Charts on uPlot in the page's colours, told apart by patterns, dashes and labels as well. `frugal.chart` draws one.
"use strict";
const frugal = (() => {
  const data = (name) => JSON.parse(document.getElementById(`data-${name}`).textContent);

  const MIB = 1024 ** 2, GIB = 1024 ** 3;

  // Bytes as text: `format_bytes` of frugal/units.py.
  function bytes(value) {
    return Math.abs(value) >= GIB ? `${(value / GIB).toFixed(2)} GiB` : `${(value / MIB).toFixed(1)} MiB`;
  }

  // The same for an axis, whose numbers are round; and the distances that its numbers may have.
  const roundBytes = (value) => bytes(value).replace(/\.0+ /, " ").replace(/(\.\d)0 /, "$1 ");
  const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);

  // The value of a colour of page.css, such as "--line" or "--c1".
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Of each pattern what is drawn on a tile of 8 by 8: stretches from x, y to x, y.
  const TILES = [
    [],
    [[0, 8, 8, 0], [-2, 2, 2, -2], [6, 10, 10, 6]],
    [[0, 4, 8, 4]],
    [[0, 0, 8, 8], [-2, 6, 2, 10], [6, -2, 10, 2]],
    [[4, 0, 4, 8]],
    [[0, 0, 8, 8], [0, 8, 8, 0]],
    [[4, 3, 4, 5]],
    [[0, 4, 8, 4], [4, 0, 4, 8]],
    [[0, 2, 4, 2], [4, 6, 8, 6]],
  ];
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 5], [14, 4], [6, 2, 2, 2, 2, 2], [3, 6]];

  // How the area with a number, from 1 on, is filled.
  function pattern(context, number) {
    const tile = document.createElement("canvas");
    const scale = Math.max(1, Math.round(devicePixelRatio));
    tile.width = tile.height = 8 * scale;
    const pen = tile.getContext("2d");
    pen.scale(scale, scale);
    pen.fillStyle = colour(`--c${number}`);
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = colour("--hatch");
    pen.lineWidth = 1;
    for (const [x0, y0, x1, y1] of TILES[(number - 1) % TILES.length]) {
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.lineTo(x1, y1);
      pen.stroke();
    }
    return context.createPattern(tile, "repeat");
  }

  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';

  function axis(format, label, extra) {
    return {
      stroke: () => colour("--faint"),
      font: FONT,
      labelFont: FONT,
      labelSize: 20,
      label,
      grid: { stroke: () => colour("--grid"), width: 1 },
      ticks: { show: false },
      values: (_, values) => values.map((value) => (value === null ? "" : format(value))),
      ...extra,
    };
  }

  // uPlot's description of one series; `top` is what is drawn: the sum of stacked values.
  function described(series, stacked) {
    const number = series.colour ?? 1;
    const stroke = () => colour(`--c${number}`);
    const paths = series.steps ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
    if (stacked || series.kind === "area") {
      return { label: series.label, fill: (u) => pattern(u.ctx, number), stroke: () => colour("--paper"), width: 0.5, paths, points: { show: false } };
    }
    if (series.kind === "points") {
      return { label: series.label, stroke, paths: () => null, points: { show: false } };
    }
    return { label: series.label, stroke, width: 2, dash: DASHES[(number - 1) % DASHES.length], paths, points: { show: series.values.length < 2 }, spanGaps: true };
  }

  // The sums of each series and those before it.
  function stackedUp(series) {
    let below = null;
    return series.map(({ values }) => (below = values.map((value, i) => value + (below ? below[i] : 0))));
  }

  function text(u, words, x, y, { align = "left", name = "--text", bold = false } = {}) {
    const { ctx } = u;
    ctx.save();
    ctx.scale(uPlot.pxRatio, uPlot.pxRatio);
    ctx.font = bold ? `600 ${FONT}` : FONT;
    ctx.textAlign = align;
    ctx.textBaseline = "middle";
    ctx.lineJoin = "round";
    ctx.lineWidth = 4;
    ctx.strokeStyle = colour("--paper");
    ctx.strokeText(words, x / uPlot.pxRatio, y / uPlot.pxRatio);
    ctx.fillStyle = colour(name);
    ctx.fillText(words, x / uPlot.pxRatio, y / uPlot.pxRatio);
    ctx.restore();
  }

  function stroked(u, from, to, name, dash, width = 1) {
    const { ctx } = u;
    ctx.save();
    ctx.strokeStyle = colour(name);
    ctx.lineWidth = width * uPlot.pxRatio;
    ctx.setLineDash(dash.map((length) => length * uPlot.pxRatio));
    ctx.beginPath();
    ctx.moveTo(...from);
    ctx.lineTo(...to);
    ctx.stroke();
    ctx.restore();
  }

  // Every second stretch between marks, shaded.
  function drawBands(u, marks) {
    const { left, top, width, height } = u.bbox;
    const edges = [...marks.map(({ x }) => Math.max(left, u.valToPos(x, "x", true))), left + width];
    u.ctx.save();
    u.ctx.fillStyle = colour("--band");
    for (let i = 0; i < marks.length; i += 2) u.ctx.fillRect(edges[i], top, Math.max(0, edges[i + 1] - edges[i]), height);
    u.ctx.restore();
  }

  // Horizontal lines with their names, such as the memory of a card; the names are away from the note.
  function drawLevels(u, levels, note) {
    const { left, top, width, height } = u.bbox, ratio = uPlot.pxRatio;
    const isLeft = note && u.valToPos(note.x, "x", true) > left + width / 2;
    for (const level of levels) {
      const y = u.valToPos(level.value, "y", true);
      if (y < top - 1 || y > top + height) continue;
      stroked(u, [left, y], [left + width, y], level.colour ?? "--text", level.dash ?? [6, 4], 1.5);
      text(u, level.label, isLeft ? left + 6 * ratio : left + width - 6 * ratio, y + (level.below ? 11 : -9) * ratio, { align: isLeft ? "left" : "right", name: level.colour });
    }
  }

  // Vertical lines with what happens there, in the place of the numbers of the axis where it has none.
  function drawMarks(u, marks, isBelow) {
    const { left, top, width, height } = u.bbox, ratio = uPlot.pxRatio;
    const y = top + height + (isBelow ? 12 : -10) * ratio;
    let free = -Infinity;
    for (const mark of marks) {
      const x = u.valToPos(mark.x, "x", true);
      if (x < left - 1 || x > left + width + 1) continue;
      stroked(u, [x, top], [x, top + height], "--faint", mark.dash ?? [2, 3]);
      u.ctx.save();
      u.ctx.font = FONT;
      const wide = u.ctx.measureText(mark.label).width * ratio;
      u.ctx.restore();
      const at = Math.min(x + (isBelow ? 0 : 4) * ratio, left + width - wide);
      if (at < free) continue; // its name would lie on another's; a table has it
      text(u, mark.label, at, y, { name: "--faint" });
      free = at + wide + 8 * ratio;
    }
  }

  // The name of each area in the middle of its highest stretch, if there is room for it.
  function drawNames(u, series, tops) {
    const y = (value) => u.valToPos(value, "y", true), x = (i) => u.valToPos(u.data[0][i], "x", true);
    const room = 17 * uPlot.pxRatio;
    series.forEach(({ label, values, letter }, number) => {
      const height = (i) => y(tops[number][i] - values[i]) - y(tops[number][i]);
      let best = 0;
      values.forEach((value, i) => { if (value > values[best]) best = i; });
      let first = best, last = best;
      while (first > 0 && height(first - 1) >= room) first--;
      while (last < values.length - 1 && height(last + 1) >= room) last++;
      if (height(best) < room || x(last) - x(first) < 70 * uPlot.pxRatio) return;
      const middle = Math.round((first + last) / 2);
      text(u, letter ? `${letter} ${label}` : label, x(middle), y(tops[number][middle] - values[middle] / 2), { align: "center" });
    });
  }

  // The path of a marker: circle, cross, triangle or star.
  function marker(ctx, shape, x, y, size) {
    ctx.beginPath();
    if (shape === "cross") {
      for (const [dx, dy] of [[1, 1], [1, -1]]) {
        ctx.moveTo(x - dx * size, y - dy * size);
        ctx.lineTo(x + dx * size, y + dy * size);
      }
    } else if (shape === "triangle" || shape === "star") {
      const corners = shape === "star" ? 10 : 3;
      for (let i = 0; i < corners; i++) {
        const angle = -Math.PI / 2 + (2 * Math.PI * i) / corners;
        const far = (shape === "star" && i % 2 ? 0.6 : 1.4) * size;
        ctx.lineTo(x + far * Math.cos(angle), y + far * Math.sin(angle));
      }
      ctx.closePath();
    } else {
      ctx.arc(x, y, size, 0, 2 * Math.PI);
    }
  }

  function paintMarker(ctx, series, x, y, size) {
    ctx.save();
    ctx.fillStyle = colour(`--c${series.colour ?? 1}`);
    ctx.strokeStyle = colour(series.shape === "cross" ? "--bad" : "--text");
    ctx.lineWidth = size / (series.shape === "cross" ? 2.5 : 5);
    marker(ctx, series.shape, x, y, size);
    if (series.shape !== "cross") ctx.fill();
    ctx.stroke();
    ctx.restore();
  }

  // Points by their shapes, each with its name where it does not lie on another's.
  function drawPoints(u, series) {
    const taken = [];
    for (const each of series) {
      if (each.kind !== "points") continue;
      each.values.forEach((value, i) => {
        if (value === null || value === undefined) return;
        const x = u.valToPos(u.data[0][i], "x", true), y = u.valToPos(value, "y", true);
        paintMarker(u.ctx, each, x, y, 5 * uPlot.pxRatio);
        const name = each.names?.[i];
        if (!name || taken.some(([a, b]) => Math.abs(a - x) < 22 * uPlot.pxRatio && Math.abs(b - y) < 14 * uPlot.pxRatio)) return;
        taken.push([x, y]);
        text(u, name, x + 9 * uPlot.pxRatio, y - 7 * uPlot.pxRatio, { name: "--faint" });
      });
    }
  }

  function drawNote(u, note) {
    const x = u.valToPos(note.x, "x", true), y = u.valToPos(note.y, "y", true);
    const { ctx } = u;
    ctx.save();
    ctx.fillStyle = colour("--text");
    ctx.strokeStyle = colour("--paper");
    ctx.lineWidth = 2 * uPlot.pxRatio;
    ctx.beginPath();
    ctx.arc(x, y, 5 * uPlot.pxRatio, 0, 2 * Math.PI);
    ctx.fill();
    ctx.stroke();
    ctx.restore();
    const { left, top, width } = u.bbox, ratio = uPlot.pxRatio;
    const isRight = x > left + width / 2;
    const bottom = top + (note.lines.length * 15 + 4) * ratio;
    if (bottom < y) stroked(u, [x, bottom], [x, y - 6 * ratio], "--text", []);
    u.ctx.save();
    u.ctx.font = `600 ${FONT}`;
    const wide = Math.max(...note.lines.map((line) => u.ctx.measureText(line).width)) * ratio;
    u.ctx.restore();
    const edge = u.ctx.canvas.width - 4 * ratio - wide;
    const from = Math.max(Math.min(left + 4 * ratio, edge), Math.min(isRight ? x + 4 * ratio - wide : x - 4 * ratio, edge));
    note.lines.forEach((line, i) => text(u, line, from, top + (i * 15 + 9) * ratio, { bold: i === 0 }));
  }

  // The legend: a swatch in colour and pattern, a letter where one is given, and the name.
  function legendOf(spec) {
    const list = document.createElement("ul");
    list.className = "legend";
    for (const series of spec.series) {
      const item = document.createElement("li");
      const swatch = document.createElement("canvas");
      swatch.width = 44;
      swatch.height = 24;
      swatch.setAttribute("aria-hidden", "true");
      const pen = swatch.getContext("2d");
      if (spec.stacked || series.kind === "area") {
        pen.fillStyle = pattern(pen, series.colour ?? 1);
        pen.fillRect(0, 0, 44, 24);
      } else if (series.kind === "points") {
        paintMarker(pen, series, 22, 12, 9);
      } else {
        pen.strokeStyle = colour(`--c${series.colour ?? 1}`);
        pen.lineWidth = 4;
        pen.setLineDash(DASHES[((series.colour ?? 1) - 1) % DASHES.length].map((length) => 2 * length));
        pen.moveTo(0, 12);
        pen.lineTo(44, 12);
        pen.stroke();
      }
      item.append(swatch, `${series.letter ? `${series.letter} ` : ""}${series.label}`);
      list.append(item);
    }
    return list;
  }

  // Draws `spec` into `place`, anew when the page's width or theme changes; the answer draws another.
  //
  // x: numbers. series: [{label, values, colour: 1..9, kind: "line" | "area" | "points", steps, letter}]; a value may be
  // null. Points have a shape: "circle" | "cross" | "triangle" | "star", and names, one a value. stacked: areas upon
  // each other. levels: [{label, value, dash, colour, below}]. marks: [{x, label, dash}].
  // bands: stretches between marks are shaded in turn. note: {x, y, lines}. xFormat, yFormat: number -> text. xLabel, yLabel, height, yMax, xSplits. xPad: what the axis is longer.
  // hover: (index) -> text.
  function chart(place, first) {
    let spec = first, plot = null;
    const words = document.createElement("p");
    words.className = "hover";
    words.setAttribute("aria-hidden", "true");

    function draw() {
      plot?.destroy();
      place.replaceChildren();
      const width = place.clientWidth;
      if (!width) return;
      const number = (value) => String(+value.toPrecision(6));
      const tops = spec.stacked ? stackedUp(spec.series) : spec.series.map(({ values }) => values);
      const order = spec.series.map((_, i) => i);
      if (spec.stacked) order.reverse(); // the highest sum first, the others over it
      const highest = Math.max(...tops.flatMap((values) => values.reduce((most, value) => Math.max(most, value ?? -Infinity), -Infinity)), ...(spec.levels ?? []).filter((level) => level.scales !== false).map(({ value }) => value));
      const height = spec.height ?? (width < 500 ? 260 : 340);
      const inside = height - 60, above = spec.note ? 15 * spec.note.lines.length + 24 : 0; // pixels, of the note and the name of a level
      const room = above ? inside / (inside - above) : 1.12;
      const lowest = spec.yMin ?? (spec.stacked ? 0 : undefined);
      plot = new uPlot({
        width,
        height,
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { show: !spec.stacked } },
        scales: { x: { time: false, ...(spec.xPad ? { range: (_, low, high) => [low - spec.xPad * (high - low || 1), high + spec.xPad * (high - low || 1)] } : {}) }, y: { range: (_, low, high) => [lowest ?? low - 0.05 * (high - low || 1), spec.yMax ?? (highest > 0 ? highest * room : high)] } },
        axes: [
          axis(spec.xFormat ?? number, spec.xLabel, { size: 32, ...(spec.xSplits ? { splits: () => spec.xSplits } : {}) }),
          axis(spec.yFormat === bytes ? roundBytes : spec.yFormat ?? number, spec.yLabel, { size: 64, ...(spec.yFormat === bytes ? { incrs: BINARY } : {}) }),
        ],
        series: [{}, ...order.map((i) => described(spec.series[i], spec.stacked))],
        hooks: {
          drawClear: [(u) => { if (spec.bands) drawBands(u, spec.marks); }],
          draw: [(u) => {
            if (spec.stacked) drawNames(u, spec.series, tops);
            drawMarks(u, spec.marks ?? [], spec.xFormat && spec.xFormat(1) === "");
            drawLevels(u, spec.levels ?? [], spec.note);
            drawPoints(u, spec.series);
            if (spec.note) drawNote(u, spec.note);
          }],
          setCursor: [(u) => { words.textContent = u.cursor.idx === null || !spec.hover ? "" : spec.hover(u.cursor.idx); }],
        },
      }, [spec.x, ...order.map((i) => tops[i])], place);
      place.append(words);
      if (spec.series.length > 1) place.append(legendOf(spec));
    }

    let drawn = 0;
    new ResizeObserver(() => {
      if (place.clientWidth !== drawn) {
        drawn = place.clientWidth;
        draw();
      }
    }).observe(place);
    document.addEventListener("theme", draw);
    return { update: (next) => { spec = next; draw(); } };
  }

  return { data, bytes, colour, pattern, chart };
})();
