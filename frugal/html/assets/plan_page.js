// The page of a plan: its controls, the chart of memory over a step, and the chart of the strategies.
"use strict";
(() => {
  const plan = frugal.data("plan"), written = frugal.data("profiles");
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
      hover: (i) => `${points[i].number}: ${points[i].name}, ${points[i].kind}, ${seconds(points[i].seconds)}, ${bytes(points[i].bytes)}`,
      xPad: 0.06,
    });
  }

  // The number of each strategy in the table leads to what the page computes of it.
  function linkRows() {
    const rows = document.querySelectorAll("#strategies ~ .scrolls tbody tr");
    plan.rows.forEach((row, i) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: String(i + 1), title: row.name });
      button.setAttribute("aria-label", `${i + 1}: show ${row.name}`);
      button.addEventListener("click", () => showRow(row));
      rows[i].cells[0].replaceChildren(button);
    });
  }

  // What is asked

  const own = written.strategies.findIndex(({ name }) => name === plan.strategy);
  const unique = (values) => [...new Set(values)];
  const known = Object.keys(written.profiles).map((key) => key.split("/").map(Number));
  const gpuCounts = unique(known.map(([gpus]) => gpus)).sort((a, b) => a - b);
  const lengths = unique(known.map(([, length]) => length)).sort((a, b) => a - b);

  const TRAITS = ["stage", "checkpointing", "loss", "offload", "mlp", "sharing", "buckets"];
  const PLAIN = { mlp: "plain", sharing: 1, buckets: "usual" }; // of traits that are seldom another
  const percent = (ratio) => `${Number((100 * ratio).toPrecision(3))} %`;
  const offloaded = (value) => ({ none: "nothing", optimizer: "optimizer to the host", all: "optimizer and parameters to the host" })[value] ?? (value.startsWith("optimizer ") ? `${percent(value.split(" ")[1])} of the optimizer to the host` : value);
  const WORDS = {
    stage: (value) => `ZeRO-${value}`, offload: offloaded,
    sharing: (value) => (value > 1 ? plural(value, written.noun) : "none"),
  };

  const devices = (gpus) => written.devices[String(gpus)] ?? [];

  const start = () => ({
    gpus: plan.gpus, memory: plan.memory, microBatch: plan.microBatch, seqLen: plan.seqLen,
    ...Object.fromEntries(TRAITS.map((trait) => [trait, written.strategies[own][trait]])),
  });

  let asked = null, chart = null, turn = 0, changedWithIt = "";

  const strategyOf = (choice) => written.strategies.findIndex((each) => TRAITS.every((trait) => each[trait] === choice[trait]));
  const deviceOf = ({ gpus, memory }) => devices(gpus).find((each) => each.memory === memory);

  // Ranks, or groups of them that share their samples.
  const takers = ({ gpus, sharing }) => Math.floor(gpus * written.nodes / sharing);

  // Samples that a rank may take at once at most.
  function cap(choice) {
    const share = written.ranks ? Math.ceil(written.samples / Math.max(1, takers(choice))) : written.samples;
    return Math.max(1, Math.min(share, written.cap ?? share));
  }

  function cutOf(choice) {
    return written.ranks && takers(choice) ? frugalPredict.batch(written.samples, takers(choice), choice.microBatch) : null;
  }

  function pointOf(choice, cut) {
    return { gpus: choice.gpus, seqLen: choice.seqLen, strategy: strategyOf(choice), accumulates: (cut?.steps ?? plan.steps) > 1 };
  }

  const describe = (choice) => `${plural(choice.gpus, written.noun)}, samples of ${plural(choice.seqLen, "token")}, ${written.strategies[strategyOf(choice)].name}`;

  // What asks `frugal plan` for a choice. Mixtures of layers are found anew: no flag names one.
  function flags(choice) {
    const { checkpointing, loss, mlp, sharing } = choice, [offload, ratio] = choice.offload.split(" ");
    const mode = checkpointing.includes(" ") ? "budget" : checkpointing;
    const words = ["--gpus", choice.gpus, "--seq-len", choice.seqLen, "--zero-stage", choice.stage, "--activation-checkpointing", mode, "--loss", loss, "--offload", ratio ? `${offload}:${ratio}` : offload, "--micro-batch", choice.microBatch];
    if (mlp !== PLAIN.mlp) words.push("--mlp", mlp);
    if (sharing !== PLAIN.sharing) words.push("--sequence-parallel", sharing);
    return words.join(" ");
  }

  // What the page says of a choice: {choice, cut, made, memory, time, device}; `made` is null where it does not know.
  async function predict(choice) {
    const cut = cutOf(choice), device = deviceOf(choice);
    const made = device ? await frugalPredict.profile(pointOf(choice, cut)) : null;
    if (made === null) return { choice, cut, device, made };
    const microBatch = cut ? cut.largest : choice.microBatch;
    return { choice, cut, device, made, microBatch, memory: frugalPredict.memory(made, microBatch, device), time: cut ? frugalPredict.seconds(made, cut) : null };
  }

  // What is said

  const PLACES_BACK = 400;

  // Where in the model the peak is: the module that ran, or in backward, which belongs to no module, that of the last
  // tensor before it that was born or died in one.
  function whereIs({ rank: { timeline }, event, module }) {
    if (module) return module;
    for (let i = event; i >= Math.max(0, event - PLACES_BACK); i--) {
      const name = written.names[timeline.modules[timeline.storages[i]]];
      if (name) return `near ${name}`;
    }
    return "";
  }

  const operatorName = (name) => name.replace(/^aten\./, "").replace(/\.default$/, "");

  function sayAnswer(answer, most) {
    const place = at("answer");
    if (answer.made === null) {
      const why = answer.device ? `${describe(answer.choice)}${pointOf(answer.choice, answer.cut).accumulates ? "" : ", in one micro-step"}` : `a card of ${bytes(answer.choice.memory)}`;
      const row = rowOf(answer.choice);
      const planned = row ? ` The plan says: ${row.says}. Sliders do not apply to it.` : "";
      place.replaceChildren(mark("?", "warn"), ` Not computed in this page: ${why}.${planned} `, code(`frugal plan ${flags(answer.choice)}`), ` tells.${changedWithIt}`);
      return;
    }
    const { memory, cut, time, choice, device } = answer;
    const host = hostShortfall(answer);
    const fits = memory.fits && host <= 0;
    const words = [];
    words.push(`${bytes(memory.total)} of ${bytes(device.memory)}, ${memory.fits ? `${bytes(memory.headroom)} of headroom` : `${bytes(-memory.headroom)} too much`}`);
    if (host > 0) words.push(`a host lacks ${bytes(host)}`);
    if (choice.offload !== "none") words.push(`${bytes(hostNeeded(answer))} of each host`);
    if (cut) words.push(cutInWords(choice, cut));
    if (time && fits) words.push(`${seconds(time.total)} a step, ${rate(time)}`);
    if (most !== undefined) words.push(most ? `at most micro-batch ${most} fits` : "not even one sample fits");
    place.replaceChildren(mark(fits ? "fits" : "does not fit", fits ? "good" : "bad"), ` ${words.join("; ")}.`);
    if (changedWithIt) place.append(changedWithIt);
    if (isOwn(choice) && memory.total !== plan.total) place.append(` The dry run of the plan says ${bytes(plan.total)}.`);
  }

  const rate = (time) => `${(written.samples / time.total).toPrecision(3)} samples/s`;

  // `BatchPlan.arithmetic`.
  function cutInWords(choice, { steps, sizes }) {
    const { sharing } = choice, last = sizes.at(-1);
    const ranks = sharing > 1 ? `${plural(takers(choice), "group")} of ${plural(sharing, written.noun)}` : plural(takers(choice), written.noun);
    const start = `${plural(written.samples, "sample")} = ${ranks} x`;
    if (sizes.length === 1) return `${start} micro-batch ${last} x ${plural(steps, "accumulation step")}`;
    const range = sizes.length === 2 ? `${sizes[0]} or ${plural(last, "sample")}` : `${sizes[0]} to ${last} samples`;
    return `${start} ${plural(steps, "micro-step")} of ${range}`;
  }

  const hostNeeded = ({ memory, made, choice }) => Math.max(memory.rankHost * choice.gpus, made.loading);
  const hostShortfall = (answer) => (written.host === null || written.kind === "cpu" ? 0 : hostNeeded(answer) - written.host);

  const mark = (text, name) => Object.assign(document.createElement("strong"), { textContent: text, className: name });
  const code = (text) => Object.assign(document.createElement("code"), { textContent: text });
  const isOwn = (choice) => Object.entries(start()).every(([name, value]) => choice[name] === value);

  function fillTables({ memory, device }, moments) {
    const parts = Object.keys(LETTERS).filter((name) => memory[name]).map((name) => [`${LETTERS[name]} ${name}`, bytes(memory[name]), String(memory[name])]);
    at("breakdown").replaceChildren(table(`At the peak, in ${memory.phase} (${operatorName(memory.operator)}${whereIs(memory) ? `, ${whereIs(memory)}` : ""})`, ["category", "", "bytes"], [...parts, ["total", bytes(memory.total), String(memory.total)], ["may be used", bytes(device.usable + device.context), String(device.usable + device.context)]]));
    const fullest = new Map();
    for (const moment of moments) {
      const phase = frugalTimeline.phaseOf(memory.rank.timeline, moment.event);
      fullest.set(phase, Math.max(fullest.get(phase) ?? 0, moment.total));
    }
    at("phases").replaceChildren(table("Live tensors at the fullest moment of each phase", ["phase", "", "bytes"], [...fullest].map(([phase, total]) => [phase, bytes(total), String(total)])));
  }

  // The chart of memory

  const MOMENTS = 1200;

  // Where the chart begins: with the second optimizer step, which is like all that follow, if the peak is in it.
  function firstEvent({ memory }) {
    const { phases } = memory.rank.timeline;
    const ends = phases.findIndex(([name]) => name === "optimizer step");
    const second = phases[ends + 1]?.[1] ?? 0;
    return at("whole").checked || memory.event < second ? 0 : second;
  }

  function pictured(answer) {
    const { memory, device, microBatch } = answer, { rank } = memory;
    const { sizes } = rank.at(microBatch, device.threads, answer.made.expandable);
    const first = firstEvent(answer);
    return { first, moments: frugalTimeline.picture(rank.timeline, sizes, first, MOMENTS) };
  }

  function chartOf(answer, first, moments) {
    const { memory, device } = answer, { timeline } = memory.rank, names = frugalTimeline.CATEGORIES;
    const shown = names.map((name, i) => ({ name, values: moments.map(({ categories }) => categories[i]) })).filter(({ values }) => values.some((value) => value));
    const series = shown.map(({ name, values }) => ({ label: name, letter: LETTERS[name], colour: names.indexOf(name) + 1, steps: true, values }));
    if (device.context) series.unshift({ label: "context", letter: "x", colour: 9, steps: true, values: moments.map(() => device.context) });
    const lines = [`peak ${bytes(memory.live + device.context)}${memory.slack ? `, ${bytes(memory.total)} with the allocator's slack` : ""}`, `${operatorName(memory.operator)} in ${memory.phase}`, whereIs(memory)].filter(Boolean);
    const limit = device.usable + device.context;
    return {
      x: moments.map(({ event }) => event), stacked: true, series, yFormat: bytes, xFormat: () => "", yMin: 0,
      xLabel: "allocations and frees, in order",
      levels: [
        { label: `${bytes(device.memory)}: out of memory`, value: device.memory, colour: "--bad", dash: [] },
        { label: `${bytes(limit)} may be used`, value: limit, dash: [6, 4], below: true },
      ],
      marks: timeline.phases.filter(([, event]) => event >= first && !(event === first && first === 0 && timeline.phases[0][1] !== event)).map(([label, event]) => ({ x: event, label })),
      note: { x: memory.event, y: memory.live + device.context, lines },
      hover: (i) => {
        const { event, total, storage, categories } = moments[i];
        const module = written.names[timeline.modules[storage]];
        const held = names.map((name, j) => [name, categories[j]]).filter(([, size]) => size).sort((a, b) => b[1] - a[1]).slice(0, 3);
        return `${frugalTimeline.phaseOf(timeline, event)}${module ? `, ${module}` : ""}: ${bytes(total + device.context)} (${held.map(([name, size]) => `${name} ${bytes(size)}`).join(", ")})`;
      },
    };
  }

  function draw(answer) {
    const { first, moments } = pictured(answer);
    const spec = chartOf(answer, first, moments);
    chart ??= frugal.chart(at("memory"), spec);
    chart.update(spec);
    at("memory").setAttribute("aria-label", `Memory by category over the events of an optimizer step: ${at("answer").textContent} The peak is in ${answer.memory.phase}.`);
    fillTables(answer, moments);
  }

  // Controls

  const SLIDERS = {
    gpus: { name: "gpus", values: () => gpuCounts, words: (value) => plural(value, written.noun) },
    card: { name: "memory", values: () => devices(asked.gpus).map(({ memory }) => memory), words: bytes },
    micro: { name: "microBatch", values: () => Array.from({ length: sliderEnd() }, (_, i) => i + 1), words: (value) => plural(value, "sample") },
    length: { name: "seqLen", values: () => lengths, words: (value) => plural(value, "token") },
  };

  const sliderEnd = () => Math.min(cap(asked), Math.max(asked.microBatch, 4 * plan.microBatch, 16));

  function nearest(values, wanted) {
    return values.reduce((best, value, i) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);
  }

  function showControls() {
    for (const [id, { name, values, words }] of Object.entries(SLIDERS)) {
      const all = values(), slider = at(id), place = nearest(all, asked[name]);
      slider.max = all.length - 1;
      slider.value = place;
      slider.disabled = all.length < 2;
      slider.setAttribute("aria-valuetext", words(asked[name]));
      at(`${id}-value`).textContent = words(asked[name]);
    }
    for (const trait of TRAITS) at(trait).value = String(asked[trait]);
    at("strategy").value = strategyOf(asked);
  }

  // The row of the plan's table, for the plan's own GPUs and samples.
  const rowOf = ({ gpus, seqLen, memory, ...choice }) => (gpus === plan.gpus && seqLen === plan.seqLen && memory === plan.memory ? plan.rows.find(({ name }) => name === written.strategies[strategyOf(choice)].name) : undefined);

  const traitsOf = (strategy) => Object.fromEntries(TRAITS.map((trait) => [trait, strategy[trait]]));

  // What was asked with another trait. Not every mixture of traits is in the page: of those that have the new one, the
  // strategy that differs in the fewest others.
  function withTrait(trait, value) {
    const differences = (each) => TRAITS.filter((name) => each[name] !== asked[name]);
    const having = written.strategies.filter((each) => each[trait] === value);
    const nearest = having.reduce((best, each) => (differences(each).length < differences(best).length ? each : best));
    const others = differences(nearest).filter((name) => name !== trait).map((name) => at(name).labels[0].textContent);
    changedWithIt = others.length ? ` Changed with it, as this page has no other strategy like that: ${others.join(", ")}.` : "";
    return traitsOf(nearest);
  }

  // A row of the plan's table as it was planned.
  function showRow(row) {
    change({ ...start(), ...traitsOf(written.strategies.find(({ name }) => name === row.name)), microBatch: row.microBatch });
    at("memory-heading").scrollIntoView();
  }

  function fillSelections() {
    for (const trait of TRAITS) {
      const values = unique(written.strategies.map((each) => each[trait]));
      at(trait).replaceChildren(...values.sort().map((value) => new Option((WORDS[trait] ?? String)(value), value)));
      at(trait).disabled = values.length < 2;
      at(trait).parentElement.hidden = trait in PLAIN && values.length < 2 && values[0] === PLAIN[trait];
      at(trait).addEventListener("change", () => {
        change(withTrait(trait, values.find((value) => String(value) === at(trait).value)), changedWithIt);
      });
    }
    at("strategy").replaceChildren(...written.strategies.map(({ name }, i) => new Option(name, i)));
    at("strategy").disabled = written.strategies.length < 2;
    at("strategy").addEventListener("change", () => change(traitsOf(written.strategies[at("strategy").value])));
    for (const [id, { name, values }] of Object.entries(SLIDERS)) {
      at(id).addEventListener("input", () => change({ [name]: values()[Number(at(id).value)] }));
    }
  }

  function change(what, note = "") {
    changedWithIt = note;
    asked = { ...asked, ...what };
    const memories = devices(asked.gpus).map(({ memory }) => memory);
    if (!memories.includes(asked.memory) && memories.length) asked.memory = memories[nearest(memories, asked.memory)];
    asked.microBatch = Math.max(1, Math.min(asked.microBatch, cap(asked)));
    return show();
  }

  // Answer the latest question: first whether it fits, then, when there is time, the most that would.
  async function show() {
    const mine = ++turn;
    showControls();
    remember();
    const answer = await predict(asked);
    if (mine !== turn) return;
    sayAnswer(answer);
    at("largest").disabled = answer.made === null;
    if (answer.made === null) return;
    draw(answer);
    setTimeout(() => {
      if (mine === turn) sayAnswer(answer, largest(answer));
    }, 150);
  }

  const largest = ({ made, device, choice }) => frugalPredict.largestMicroBatch(made, device, cap(choice));

  // The choice is in the address, so that a link to the page leads to it.
  function remember() {
    const hash = isOwn(asked) ? "" : `#${new URLSearchParams(asked)}`;
    try {
      history.replaceState(null, "", `${location.pathname}${location.search}${hash}`);
    } catch { /* a browser may refuse it to files */ }
  }

  function remembered() {
    const given = new URLSearchParams(location.hash.slice(1)), choice = start();
    for (const [name, value] of Object.entries(choice)) {
      if (given.has(name)) choice[name] = typeof value === "number" ? Number(given.get(name)) : given.get(name);
    }
    const isSound = gpuCounts.includes(choice.gpus) && lengths.includes(choice.seqLen) && deviceOf(choice) && strategyOf(choice) >= 0 && Number.isInteger(choice.microBatch) && choice.microBatch >= 1 && choice.microBatch <= cap(choice);
    return isSound ? choice : start();
  }

  drawStrategies();
  if (own >= 0) {
    asked = remembered();
    fillSelections();
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("whole").addEventListener("change", () => show());
    linkRows();
    at("back").addEventListener("click", () => change(start()));
    at("largest").addEventListener("click", async () => {
      const answer = await predict(asked);
      if (answer.made) change({ microBatch: Math.max(1, largest(answer)) });
    });
    show();
  }
})();
