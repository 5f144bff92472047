// Charts on uPlot in the page's colours, told apart by patterns, dashes and labels as well. `frugal.chart` draws one.
"use strict";
const frugal = (() => {
  const data = (name) => JSON.parse(document.getElementById(`data-${name}`).textContent);

  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
  // Bytes as text, with three digits.
  function bytes(value) {
    let number = value, unit = 0;
    while (Math.abs(number) >= 1024 && unit < UNITS.length - 1) {
      number /= 1024;
      unit++;
    }
    return `${unit === 0 ? number : number.toFixed(Math.abs(number) >= 100 ? 0 : Math.abs(number) >= 10 ? 1 : 2)} ${UNITS[unit]}`;
  }

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
      return { label: series.label, stroke, fill: stroke, paths: () => null, points: { show: true, size: 7 } };
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

  // Horizontal lines with their names, such as the memory of a card.
  function drawLevels(u, levels) {
    const { left, top, width, height } = u.bbox;
    for (const level of levels) {
      const y = u.valToPos(level.value, "y", true);
      if (y < top - 1 || y > top + height) continue;
      stroked(u, [left, y], [left + width, y], level.colour ?? "--text", level.dash ?? [6, 4], 1.5);
      text(u, level.label, left + width - 6 * uPlot.pxRatio, y + (level.below ? 11 : -9) * uPlot.pxRatio, { align: "right", name: level.colour });
    }
  }

  // Vertical lines with what happens there.
  function drawMarks(u, marks) {
    const { left, top, width, height } = u.bbox;
    let free = -Infinity;
    for (const mark of marks) {
      const x = u.valToPos(mark.x, "x", true);
      if (x < left - 1 || x > left + width + 1) continue;
      stroked(u, [x, top], [x, top + height], "--faint", mark.dash ?? [2, 3]);
      const wide = u.ctx.measureText(mark.label).width;
      if (x < free) continue; // its name would lie on another's; the table has it
      text(u, mark.label, x + 4 * uPlot.pxRatio, top + height - 10 * uPlot.pxRatio, { name: "--faint" });
      free = x + wide + 12 * uPlot.pxRatio;
    }
  }

  // The name of each area where it is highest, if there is room for it.
  function drawNames(u, series, tops) {
    series.forEach(({ label, values, letter }, number) => {
      let best = 0;
      values.forEach((value, i) => { if (value > values[best]) best = i; });
      const high = u.valToPos(tops[number][best], "y", true);
      const low = u.valToPos(tops[number][best] - values[best], "y", true);
      if (low - high < 18 * uPlot.pxRatio) return;
      const wanted = u.valToPos(u.data[0][best], "x", true);
      const { left, width } = u.bbox;
      const half = 45 * uPlot.pxRatio;
      const x = Math.min(Math.max(wanted, left + half), left + width - half);
      text(u, letter ? `${letter} ${label}` : label, x, (high + low) / 2, { align: "center" });
    });
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
    const isRight = x > u.bbox.left + u.bbox.width / 2;
    note.lines.forEach((line, i) => {
      const above = (note.lines.length - 1 - i) * 15 + 14;
      text(u, line, x + (isRight ? -8 : 8) * uPlot.pxRatio, y - above * uPlot.pxRatio, { align: isRight ? "right" : "left", bold: i === 0 });
    });
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
      } else {
        pen.strokeStyle = colour(`--c${series.colour ?? 1}`);
        pen.lineWidth = 4;
        pen.setLineDash(series.kind === "points" ? [4, 8] : DASHES[((series.colour ?? 1) - 1) % DASHES.length].map((length) => 2 * length));
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
  // null. stacked: areas upon each other. levels: [{label, value, dash, colour, below}]. marks: [{x, label, dash}].
  // note: {x, y, lines}. xFormat, yFormat: number -> text. xLabel, yLabel, height, yMax, xSplits. hover: (index) -> text.
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
      const lowest = spec.yMin ?? (spec.stacked ? 0 : undefined);
      plot = new uPlot({
        width,
        height: spec.height ?? (width < 500 ? 260 : 340),
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { show: !spec.stacked } },
        scales: { x: { time: false }, y: { range: (_, low, high) => [lowest ?? low - 0.05 * (high - low || 1), spec.yMax ?? (highest > 0 ? highest * 1.12 : high)] } },
        axes: [
          axis(spec.xFormat ?? number, spec.xLabel, { size: 32, ...(spec.xSplits ? { splits: () => spec.xSplits } : {}) }),
          axis(spec.yFormat ?? number, spec.yLabel, { size: 64 }),
        ],
        series: [{}, ...order.map((i) => described(spec.series[i], spec.stacked))],
        hooks: {
          draw: [(u) => {
            if (spec.stacked) drawNames(u, spec.series, tops);
            drawMarks(u, spec.marks ?? []);
            drawLevels(u, spec.levels ?? []);
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
