// The page of a plan: its controls, the chart of memory over a step, and the chart of the strategies. All numbers were
// computed by Python, see frugal/tools/plan_page/answers.py; here they are looked up.
"use strict";
(() => {
  const plan = frugal.data("plan"), { grid, timelines } = frugal.data("answers");
  const { bytes } = frugal;
  const at = (id) => document.getElementById(id);

  const LETTERS = { parameters: "p", gradients: "g", optimizer: "o", activations: "a", logits: "l", communication: "c", temporary: "t", slack: "s", context: "x" };

  const make = (tag, properties, ...content) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...content);
    return made;
  };

  // A table that a script fills: rows of texts, the first of which names the row.
  function table(caption, columns, rows) {
    const made = document.createElement("table");
    made.createCaption().textContent = caption;
    const head = made.createTHead().insertRow();
    for (const name of columns) head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: name }));
    const body = made.createTBody();
    for (const [first, ...others] of rows) {
      const row = body.insertRow();
      row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: first }));
      for (const text of others) Object.assign(row.insertCell(), { textContent: text, className: "number" });
    }
    return made;
  }

  // The strategies' chart

  const SHAPES = { chosen: "star", fits: "circle", "lower bound": "triangle", "does not fit": "cross" };

  function drawStrategies() {
    const place = at("strategies");
    if (plan.points.length < 2) return place.closest("section").classList.add("no-chart");
    const points = plan.points.filter(({ seconds: value }) => value <= 8 * plan.points[0].seconds).reverse();
    points.sort((a, b) => a.seconds - b.seconds);
    const kinds = Object.keys(SHAPES).filter((kind) => points.some((point) => point.kind === kind));
    frugal.chart(place, {
      x: points.map((point) => point.seconds),
      xLabel: "seconds of a step", xFormat: (value) => String(+value.toPrecision(6)), yFormat: bytes, yMin: 0,
      series: kinds.map((kind, i) => ({
        label: kind, kind: "points", shape: SHAPES[kind], colour: [1, 3, 8, 2][i],
        values: points.map((point) => (point.kind === kind ? point.bytes : null)),
        names: points.map((point) => String(point.number)),
      })),
      levels: [{ label: `${bytes(plan.limit)} may be used`, value: plan.limit, colour: "--bad", dash: [6, 4] }],
      hover: (i) => points[i].says,
      xPad: 0.06,
    });
  }

  // The chart of memory, of one row of the table of strategies

  let row = 0, chart = null;
  const view = () => document.querySelector("input[name=view]:checked").value;

  function drawMemory() {
    const shown = timelines[row], { name, says } = plan.rows[row];
    if (!shown) {
      at("shown").textContent = `Only a dry run could draw ${name}. The plan says: ${says}. The chart is of another strategy.`;
      return;
    }
    at("shown").textContent = `The chart is of ${name}, micro-batch ${shown.microBatch}, on the plan's ${plan.noun}s.`;
    const spec = view() === "peak" ? chartOf(shown, shown.zoom, 0) : chartOf(shown, shown.step, view() === "start" ? 0 : shown.second);
    chart ??= frugal.chart(at("memory"), spec);
    chart.update(spec);
    const { peak, parts, phases, total } = shown;
    at("memory").setAttribute("aria-label", `Memory by category over an optimizer step of ${name}: at most ${bytes(total)}, in ${peak.phase}. The tables below have its peak.`);
    const held = Object.entries(LETTERS).filter(([part]) => parts[part]).map(([part, letter]) => [`${letter} ${part}`, bytes(parts[part]), String(parts[part])]);
    at("breakdown").replaceChildren(table(`At the peak, in ${[peak.phase, peak.operator, peak.where].filter(Boolean).join(", ")}`, ["category", "", "bytes"], [...held, ["total", bytes(total), String(total)], ["may be used", bytes(plan.limit), String(plan.limit)]]));
    at("phases").replaceChildren(table("Live tensors at the fullest moment of each phase", ["phase", "", "bytes"], Object.entries(phases).map(([phase, size]) => [phase, bytes(size), String(size)])));
  }

  // `drawn` is the step, or what is near the peak; from its point `first` on.
  function chartOf({ unit, names, marks, peak, parts, total }, { x, live, modules }, first) {
    const events = x.slice(first), { context } = plan;
    const series = Object.entries(live).map(([name, values]) => ({
      label: name, letter: LETTERS[name], colour: Object.keys(LETTERS).indexOf(name) + 1, steps: true,
      values: events.map((_, i) => unit * (Array.isArray(values) ? values[first + i] : values)),
    }));
    if (context) series.unshift({ label: "context", letter: "x", colour: 9, steps: true, values: events.map(() => context) });
    const top = peak.bytes + context, phaseOf = (event) => marks.findLast(([, start]) => start <= event)[0];
    return {
      x: events, stacked: true, bands: true, series, yFormat: bytes, xFormat: () => "", yMin: 0,
      height: innerWidth < 1232 ? 260 : 352,
      xLabel: `${events.length === x.length && x.at(-1) - x[0] < x.length ? "every allocation and free near the peak" : "allocations and frees"}, in order`,
      levels: [
        { label: `${bytes(plan.memory)}: out of memory`, value: plan.memory, colour: "--bad", dash: [] },
        { label: `${bytes(plan.limit)} may be used`, value: plan.limit, dash: [6, 4], below: true },
      ],
      marks: marks.filter(([, event], i) => event <= events.at(-1) && (event >= events[0] || !(marks[i + 1]?.[1] <= events[0]))).map(([label, event]) => ({ x: Math.max(event, events[0]), label })),
      note: { x: peak.event, y: top, lines: [`peak ${bytes(top)}`, parts.slack ? `${bytes(total)} with the allocator's slack` : "", `${peak.operator} in ${peak.phase}`, peak.where].filter(Boolean) },
      hover: (i) => {
        const held = series.map(({ label, values }) => [label, values[i]]).filter(([, size]) => size).sort((a, b) => b[1] - a[1]);
        const words = held.slice(0, 3).map(([label, size]) => `${label} ${bytes(size)}`);
        return `${[phaseOf(events[i]), names[modules[first + i]]].filter(Boolean).join(", ")}: ${bytes(held.reduce((sum, [, size]) => sum + size, 0))} (${words.join(", ")})`;
      },
    };
  }

  // The number of each strategy in the table leads to its timeline.
  function linkRows() {
    const rows = document.querySelectorAll("#strategies ~ .scrolls tbody tr");
    plan.rows.forEach(({ name }, i) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: String(i + 1), title: name });
      button.setAttribute("aria-label", `${i + 1}: show ${name}`);
      button.addEventListener("click", () => {
        row = i;
        drawMemory();
        const strategy = grid?.strategies.findIndex((each) => each.name === name) ?? -1;
        if (strategy >= 0) change({ ...start(), strategy });
        at("memory-heading").scrollIntoView();
      });
      rows[i].cells[0].replaceChildren(button);
    });
  }

  // What is asked: an index of each axis of the grid, and of the strategy

  const AXES = ["length", "gpus", "card", "batch"], TRAITS = ["stage", "checkpointing", "loss", "offload"];
  const { axes, strategies } = grid ?? {};
  const start = () => ({
    ...Object.fromEntries(AXES.map((name) => [name, axes[name].values.indexOf(plan.own[name])])),
    strategy: Math.max(0, strategies.findIndex(({ name }) => name === plan.rows[0].name)),
  });

  let asked = null;

  function answerTo(choice) {
    const place = AXES.reduce((so_far, name) => so_far * axes[name].values.length + choice[name], 0);
    const [fits, isBound, total, headroom, context, host, hostLacks, seconds, parts, batch, step, binds] = grid.answers[grid.entries[place * strategies.length + choice.strategy]];
    return { fits, isBound, total, headroom, context, host, hostLacks, seconds, parts: grid.parts[parts], batch: grid.texts[batch], step: grid.texts[step], binds: grid.texts[binds] };
  }

  // The rows of a verdict, as `frugal plan` prints them.
  function rowsOf(answer, own) {
    const words = (name) => axes[name].words[asked[name]], { flags } = strategies[asked.strategy];
    const other = AXES.filter((name) => asked[name] !== start()[name]);
    if (!answer.total) return [["because", answer.batch]];
    const least = answer.isBound ? "at least " : "";
    const room = answer.headroom < 0 ? `${least}${bytes(-answer.headroom)} short` : `${bytes(answer.headroom)} of headroom`;
    const ofHost = [answer.host && `; ${least}${bytes(answer.host)} of each host`, answer.hostLacks && `, which lacks ${bytes(answer.hostLacks)}`].filter(Boolean).join("");
    const faster = own.seconds && answer.seconds ? Math.round(100 * (answer.seconds / own.seconds - 1)) : 0;
    const compared = faster ? `; ${Math.abs(faster)} % ${faster < 0 ? "less" : "more"} than the plan's` : "";
    return [
      ["batch", answer.batch],
      [answer.headroom < 0 ? "lacks" : "fits", `${least}${bytes(answer.total)} of ${words("card")} on each ${plan.noun}, ${room}${ofHost}`],
      ["step", answer.step && answer.step + compared],
      ["binds", answer.binds],
      ["plan it", other.length || asked.strategy !== start().strategy ? `${other.map((name) => `${plan.flags[name]} ${name === "card" ? words(name).replace(" ", "") : axes[name].values[asked[name]]} `).join("")}${flags}` : ""],
    ].filter(([, text]) => text);
  }

  // The bar of a card's memory, as the verdict has it.
  function barOf({ total, headroom, context, parts }) {
    const card = axes.card.values[asked.card], sizes = Object.keys(LETTERS).slice(0, 7).map((name, i) => [name, parts[i] * 1024 ** 2]);
    const live = sizes.reduce((sum, [, size]) => sum + size, 0);
    sizes.push(["slack", Math.max(0, total - context - live)], ["context", context], ["headroom", Math.max(0, headroom)], ["margin", Math.max(0, card - total - Math.max(0, headroom))]);
    const all = Math.max(card, total), says = sizes.filter(([, size]) => size).map(([name, size]) => `${name} ${bytes(size)}`);
    const bar = make("div", { className: "bar-of-memory", title: says.join(", ") }, ...sizes.map(([name, size]) => {
      const part = make("span", { className: name }, size / all > 0.06 && LETTERS[name] ? make("b", { textContent: LETTERS[name] }) : "");
      part.style.width = `${(100 * size) / all}%`;
      return part;
    }));
    if (total > card) bar.append(Object.assign(make("i"), { style: `left: ${(100 * card) / all}%` }));
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `Memory of a ${plan.noun}: ${says.join(", ")}`);
    return bar;
  }

  function sayAnswer() {
    const answer = answerTo(asked), isOwn = JSON.stringify(asked) === JSON.stringify(start());
    const verdict = answer.total ? (answer.fits ? "fits" : "does not fit") : "impossible";
    const rows = rowsOf(answer, answerTo(start()));
    if (isOwn && answer.total !== plan.total) rows.push(["plan", `${bytes(plan.total)} by its dry run`]);
    at("answer").replaceChildren(
      make("p", { className: "says" }, make("strong", { className: `badge ${answer.fits ? "good" : "bad"}`, textContent: verdict }), ` ${isOwn ? "The plan's own settings" : strategies[asked.strategy].name}`),
      ...(answer.total ? [barOf(answer)] : []),
      make("dl", { className: "verdict-rows" }, ...rows.map(([name, text]) => make("div", {}, make("dt", { textContent: name }), make("dd", {}, name === "plan it" ? make("code", { textContent: text }) : text)))),
    );
    at("spoken").textContent = [verdict, ...rows.slice(0, 3).map(([, text]) => text)].join("; ");
  }

  // Options that no strategy has together with the other selections are disabled, and say what they need.
  function showTraits() {
    const own = strategies[asked.strategy];
    for (const trait of TRAITS) {
      const others = TRAITS.filter((each) => each !== trait), select = at(trait);
      for (const option of select.options) {
        const having = strategies.filter((each) => each[trait] === option.value);
        const differ = (each) => others.filter((other) => each[other] !== own[other]);
        const nearest = having.reduce((best, each) => (differ(each).length < differ(best).length ? each : best));
        const needs = differ(nearest).map((other) => (other === "checkpointing" ? `activation checkpointing ${nearest[other]}` : other === "offload" && nearest[other] === "nothing" ? "nothing offloaded" : nearest[other]));
        option.disabled = needs.length > 0;
        option.textContent = needs.length ? `${option.value} (only with ${needs.join(", ")})` : option.value;
      }
      select.value = own[trait];
    }
  }

  function show() {
    for (const name of AXES) {
      const slider = at(name), says = axes[name].words[asked[name]];
      slider.value = asked[name];
      slider.setAttribute("aria-valuetext", says);
      at(`${name}-value`).textContent = says;
    }
    showTraits();
    sayAnswer();
    remember();
  }

  function change(what) {
    asked = { ...asked, ...what };
    if ("strategy" in what) {
      const place = plan.rows.findIndex(({ name }) => name === strategies[asked.strategy].name);
      if (place >= 0 && timelines[place] && place !== row) {
        row = place;
        drawMemory();
      }
    }
    show();
  }

  // The choice is in the address, so that a link to the page leads to it.
  function remember() {
    const given = new URLSearchParams({ ...Object.fromEntries(AXES.map((name) => [name, axes[name].values[asked[name]]])), strategy: asked.strategy });
    const hash = JSON.stringify(asked) === JSON.stringify(start()) ? "" : `#${given}`;
    try {
      history.replaceState(null, "", `${location.pathname}${location.search}${hash}`);
    } catch { /* a browser may refuse it to files */ }
  }

  function remembered() {
    const given = new URLSearchParams(location.hash.slice(1)), choice = start();
    for (const name of AXES) if (given.has(name)) choice[name] = axes[name].values.indexOf(Number(given.get(name)));
    if (given.has("strategy")) choice.strategy = Number(given.get("strategy"));
    return Object.values(choice).includes(-1) || !strategies[choice.strategy] ? start() : choice;
  }

  // A control with a single value is disabled; beneath it stands why.
  function disable(id, number, why) {
    at(id).disabled = number < 2;
    at(`${id}-why`).textContent = number < 2 ? why : "";
  }

  drawStrategies();
  if (timelines.some(Boolean)) {
    row = Math.max(0, timelines.findIndex(Boolean));
    for (const input of document.querySelectorAll("input[name=view]")) input.addEventListener("change", drawMemory);
    linkRows();
    drawMemory();
  }
  if (grid) {
    for (const name of AXES) {
      const slider = at(name);
      slider.max = axes[name].values.length - 1;
      disable(name, axes[name].values.length, axes[name].why);
      slider.addEventListener("input", () => change({ [name]: Number(slider.value) }));
    }
    for (const trait of TRAITS) {
      const values = [...new Set(strategies.map((each) => each[trait]))], select = at(trait);
      select.replaceChildren(...values.map((value) => new Option(value, value)));
      disable(trait, values.length, grid.why);
      select.addEventListener("change", () => {
        const wanted = { ...strategies[asked.strategy], [trait]: select.value };
        change({ strategy: strategies.findIndex((each) => TRAITS.every((other) => each[other] === wanted[other])) });
      });
    }
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("back").addEventListener("click", () => change(start()));
    asked = start();
    change(remembered());
  }
})();
