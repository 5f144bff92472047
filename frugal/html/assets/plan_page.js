// The page of a plan: its controls, the chart of memory over a step, and the chart of the strategies. All numbers were
// computed by Python, see frugal/tools/plan_page/answers.py; here they are looked up.
"use strict";
(() => {
  const plan = frugal.data("plan"), { answers, largest, strategies, timelines, devices } = frugal.data("answers");
  const { bytes } = frugal;
  const at = (id) => document.getElementById(id);

  const LETTERS = { parameters: "p", gradients: "g", optimizer: "o", activations: "a", logits: "l", communication: "c", temporary: "t", slack: "s", context: "x" };

  // `format_seconds` of frugal/units.py.
  function seconds(value) {
    if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
    if (value < 60) return `${value.toFixed(1)} s`;
    const two = (number) => String(number).padStart(2, "0"), whole = Math.trunc(value);
    if (value < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
    return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  }

  const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  const mark = (text, name) => Object.assign(document.createElement("strong"), { textContent: text, className: name });
  const code = (text) => Object.assign(document.createElement("code"), { textContent: text });

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
      xLabel: "seconds of a step", xFormat: (value) => String(+value.toPrecision(3)), yFormat: bytes, yMin: 0,
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

  function drawMemory() {
    const shown = timelines[row], { name, microBatch, says } = plan.rows[row];
    if (!shown) {
      at("shown").textContent = `Only a dry run could draw ${name}. The plan says: ${says}. The chart is of another strategy.`;
      return;
    }
    at("shown").textContent = `The chart is of ${name}, micro-batch ${microBatch}, on the plan's ${plan.noun}s.`;
    const spec = chartOf(shown, at("whole").checked ? 0 : shown.second);
    chart ??= frugal.chart(at("memory"), spec);
    chart.update(spec);
    const { peak, parts, phases, total } = shown;
    at("memory").setAttribute("aria-label", `Memory by category over an optimizer step of ${name}: at most ${bytes(total)}, in ${peak.phase}. The tables below have its peak.`);
    const held = Object.entries(LETTERS).filter(([part]) => parts[part]).map(([part, letter]) => [`${letter} ${part}`, bytes(parts[part]), String(parts[part])]);
    at("breakdown").replaceChildren(table(`At the peak, in ${[peak.phase, peak.operator, peak.where].filter(Boolean).join(", ")}`, ["category", "", "bytes"], [...held, ["total", bytes(total), String(total)], ["may be used", bytes(plan.limit), String(plan.limit)]]));
    at("phases").replaceChildren(table("Live tensors at the fullest moment of each phase", ["phase", "", "bytes"], Object.entries(phases).map(([phase, size]) => [phase, bytes(size), String(size)])));
  }

  function chartOf({ x, unit, live, modules, names, marks, peak, parts, total }, first) {
    const events = x.slice(first), { context } = plan;
    const series = Object.entries(live).map(([name, values]) => ({
      label: name, letter: LETTERS[name], colour: Object.keys(LETTERS).indexOf(name) + 1, steps: true,
      values: events.map((_, i) => unit * (Array.isArray(values) ? values[first + i] : values)),
    }));
    if (context) series.unshift({ label: "context", letter: "x", colour: 9, steps: true, values: events.map(() => context) });
    const top = peak.bytes + context, phaseOf = (event) => marks.findLast(([, start]) => start <= event)[0];
    return {
      x: events, stacked: true, series, yFormat: bytes, xFormat: () => "", yMin: 0, xLabel: "allocations and frees, in order",
      levels: [
        { label: `${bytes(plan.memory)}: out of memory`, value: plan.memory, colour: "--bad", dash: [] },
        { label: `${bytes(plan.limit)} may be used`, value: plan.limit, dash: [6, 4], below: true },
      ],
      marks: marks.filter(([, event], i) => event >= events[0] || marks[i + 1]?.[1] > events[0]).map(([label, event]) => ({ x: Math.max(event, events[0]), label })),
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
    plan.rows.forEach(({ name, microBatch }, i) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: String(i + 1), title: name });
      button.setAttribute("aria-label", `${i + 1}: show ${name}`);
      button.addEventListener("click", () => {
        row = i;
        drawMemory();
        const strategy = strategies.findIndex((each) => each.name === name);
        if (strategy >= 0) change({ ...start(), strategy, microBatch });
        at("memory-heading").scrollIntoView();
      });
      rows[i].cells[0].replaceChildren(button);
    });
  }

  // What is asked

  const known = Object.keys(answers).map((key) => key.split("/").map(Number));
  const inOrder = (values) => [...new Set(values)].sort((a, b) => a - b);
  const nearest = (values, wanted) => values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best));
  const start = () => ({ gpus: plan.gpus, memory: plan.memory, microBatch: plan.rows[0].microBatch, seqLen: plan.seqLen, strategy: Math.max(0, strategies.findIndex(({ name }) => name === plan.rows[0].name)) });
  const deviceOf = ({ gpus, memory }) => devices[gpus].find((each) => each.memory === memory);
  const keyOf = (choice) => `${choice.gpus}/${choice.seqLen}/${choice.strategy}/${deviceOf(choice).threads}`;
  const microBatches = (choice) => Object.keys(answers[keyOf(choice)] ?? {}).map(Number);

  let asked = null;

  const SLIDERS = {
    gpus: { name: "gpus", values: () => inOrder(known.map(([gpus]) => gpus)), words: (value) => plural(value, plan.noun) },
    card: { name: "memory", values: () => devices[asked.gpus].map(({ memory }) => memory), words: bytes },
    micro: { name: "microBatch", values: () => microBatches(asked), words: (value) => plural(value, "sample") },
    length: { name: "seqLen", values: () => inOrder(known.map(([, length]) => length)), words: (value) => plural(value, "token") },
  };

  // The largest micro-batch that fits: exact for the plan's card, of those in the page for another one.
  function mostThatFits(choice) {
    const key = keyOf(choice), device = deviceOf(choice);
    if (choice.memory === plan.memory && key in largest) return largest[key];
    return Math.max(0, ...microBatches(choice).filter((size) => answers[key][size].needed <= device.usable));
  }

  function sayAnswer() {
    const place = at("answer"), device = deviceOf(asked), answer = answers[keyOf(asked)]?.[asked.microBatch];
    const { name, flags } = strategies[asked.strategy];
    at("largest").disabled = !answer || !mostThatFits(asked);
    if (!answer) {
      const command = `frugal plan --model ${plan.model} --gpus ${asked.gpus} --mem ${bytes(asked.memory).replace(" ", "")} --seq-len ${asked.seqLen} ${flags}`;
      place.replaceChildren(mark("?", "warn"), ` Not in this page: ${plural(asked.gpus, plan.noun)} of ${bytes(asked.memory)}, samples of ${plural(asked.seqLen, "token")}, ${name}. `, code(command), " computes it.");
      return;
    }
    const headroom = device.usable - answer.needed, fits = headroom >= 0 && !answer.hostLacks;
    const most = mostThatFits(asked), isExact = asked.memory === plan.memory;
    const words = [`${bytes(answer.needed + device.context)} of ${bytes(device.memory)}, ${headroom >= 0 ? `${bytes(headroom)} of headroom` : `${bytes(-headroom)} too much`}`];
    if (answer.hostLacks) words.push(`a host lacks ${bytes(answer.hostLacks)}`);
    if (flags.includes("--offload") && !flags.includes("--offload none")) words.push(`${bytes(answer.host)} of each host`);
    words.push(answer.cut);
    if (answer.seconds !== null && fits) words.push(`${seconds(answer.seconds)} a step, ${(answer.samples / answer.seconds).toPrecision(3)} samples/s`);
    words.push(most ? `at most micro-batch ${most} fits${isExact ? "" : ", of those in this page"}` : isExact ? "not even one sample fits" : "none in this page fits");
    place.replaceChildren(mark(fits ? "fits" : "does not fit", fits ? "good" : "bad"), ` ${words.join("; ")}.`);
    const isOwn = Object.entries(start()).every(([key, value]) => asked[key] === value);
    if (isOwn && answer.needed + device.context !== plan.total) place.append(` The dry run of the plan says ${bytes(plan.total)}.`);
  }

  function show() {
    for (const [id, { name, values, words }] of Object.entries(SLIDERS)) {
      const all = values(), slider = at(id), says = all.length ? words(asked[name]) : "not in this page";
      slider.max = Math.max(0, all.length - 1);
      slider.value = Math.max(0, all.indexOf(asked[name]));
      slider.disabled = all.length < 2;
      slider.setAttribute("aria-valuetext", says);
      at(`${id}-value`).textContent = says;
    }
    strategies.forEach(({ name }, i) => { // those without an answer cannot be chosen, and say so
      const option = at("strategy").options[i], isKnown = keyOf({ ...asked, strategy: i }) in answers;
      option.disabled = !isKnown && i !== asked.strategy;
      option.textContent = isKnown ? name : `${name} (not in this page for these settings)`;
    });
    at("strategy").value = asked.strategy;
    sayAnswer();
    remember();
  }

  function change(what) {
    asked = { ...asked, ...what };
    asked.memory = nearest(devices[asked.gpus].map(({ memory }) => memory), asked.memory);
    if (microBatches(asked).length) asked.microBatch = nearest(microBatches(asked), asked.microBatch);
    show();
  }

  // The choice is in the address, so that a link to the page leads to it.
  function remember() {
    const given = new URLSearchParams(asked).toString();
    const hash = given === new URLSearchParams(start()).toString() ? "" : `#${given}`;
    try {
      history.replaceState(null, "", `${location.pathname}${location.search}${hash}`);
    } catch { /* a browser may refuse it to files */ }
  }

  function remembered() {
    const given = new URLSearchParams(location.hash.slice(1)), choice = start();
    for (const name of Object.keys(choice)) if (given.has(name)) choice[name] = Number(given.get(name));
    const isSound = choice.gpus in devices && deviceOf(choice) && strategies[choice.strategy] && known.some(([, length]) => length === choice.seqLen);
    return isSound ? choice : start();
  }

  function showStrategy(strategy) {
    const place = plan.rows.findIndex(({ name }) => name === strategies[strategy].name);
    if (place >= 0 && timelines[place]) {
      row = place;
      drawMemory();
    }
    change({ strategy });
  }

  drawStrategies();
  if (timelines.some(Boolean)) {
    row = Math.max(0, timelines.findIndex(Boolean));
    at("whole").addEventListener("change", drawMemory);
    linkRows();
    drawMemory();
  }
  if (at("controls")) {
    asked = remembered();
    at("strategy").replaceChildren(...strategies.map(({ name }, i) => new Option(name, i)));
    at("strategy").disabled = strategies.length < 2;
    at("strategy").addEventListener("change", () => showStrategy(Number(at("strategy").value)));
    for (const [id, { name, values }] of Object.entries(SLIDERS)) {
      at(id).addEventListener("input", () => change({ [name]: values()[Number(at(id).value)] }));
    }
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("back").addEventListener("click", () => { asked = start(); showStrategy(asked.strategy); });
    at("largest").addEventListener("click", () => change({ microBatch: mostThatFits(asked) }));
    change({});
  }
})();
