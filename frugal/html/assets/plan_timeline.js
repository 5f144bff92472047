// A timeline as `frugal.plan_page.streams` writes it: storages of `fixed + perSample * microBatch` bytes that are
// born and die, and from these what is alive when. All sizes are whole numbers of bytes below 2 ** 53, so exact.
"use strict";
const frugalTimeline = (() => {
  const CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "logits", "communication", "temporary"];

  // Deflated bytes in base64 as they were.
  async function inflated(base64) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // Whole numbers of seven bits a byte, the lowest first.
  function integers(bytes) {
    const numbers = [];
    let number = 0, weight = 1;
    for (const byte of bytes) {
      number += (byte & 127) * weight; // no shifts, which end at 32 bits
      if (byte < 128) {
        numbers.push(number);
        number = 0;
        weight = 1;
      } else {
        weight *= 128;
      }
    }
    return numbers;
  }

  const signed = (number) => (number % 2 ? -(number + 1) / 2 : number / 2);

  // A timeline; `part` gives the integers of a part.
  async function read(written, part) {
    const [births, events, steps, flat] = await Promise.all(
      [written.births, written.events, written.modules, written.classes].map(part),
    );
    const classes = [];
    for (let i = 0; i < flat.length; i += 5) {
      const [fixed, perSample, category, operator, columns] = flat.slice(i, i + 5);
      classes.push({ fixed: signed(fixed), perSample, category, operator, columns });
    }
    const modules = new Int32Array(steps.length);
    steps.forEach((step, i) => { modules[i] = (i ? modules[i - 1] : 0) + signed(step); });
    return { births, modules, classes, phases: written.phases, empties: written.empties, storages: storagesOf(events), numEvents: events.length };
  }

  // Of each event its storage, in the order of birth.
  function storagesOf(events) {
    const storages = new Int32Array(events.length);
    const live = [];
    let born = 0;
    events.forEach((back, i) => {
      if (back === 0) {
        live.push(born);
        storages[i] = born++;
      } else {
        storages[i] = live.splice(live.length - back, 1)[0];
      }
    });
    return storages;
  }

  // Scratch memory of a sum over rows of so many columns: `scratch_bytes` of frugal.planning.memory.workspaces.
  function scratchBytes(columns, residentThreads) {
    const across = Math.ceil(columns / 128), blocks = Math.floor(residentThreads / 128);
    if (columns % 4 || columns < 128 || across > blocks) return 0;
    const down = Math.ceil(blocks / across);
    return down > 1 ? 4 * columns * down * 128 : 0;
  }

  // Bytes of every storage, in the order of birth.
  function sizes(timeline, microBatch, residentThreads) {
    const ofClass = timeline.classes.map(({ fixed, perSample, columns }) =>
      columns ? scratchBytes(columns, residentThreads) : fixed + perSample * microBatch);
    return Float64Array.from(timeline.births, (number) => ofClass[number]);
  }

  // What is alive: `visit(event, storage, isBirth, total)` after every event.
  function walk(timeline, bytes, visit) {
    const { storages } = timeline;
    const alive = new Uint8Array(bytes.length);
    let total = 0;
    for (let event = 0; event < storages.length; event++) {
      const storage = storages[event];
      const isBirth = alive[storage] === 0;
      alive[storage] = isBirth ? 1 : 2;
      total += isBirth ? bytes[storage] : -bytes[storage];
      visit(event, storage, isBirth, total);
    }
  }

  const phaseOf = (timeline, event) => timeline.phases.findLast(([, first]) => first <= event)[0];

  // The fullest moment: bytes in total and by category, its phase, operator and module (both as numbers of names).
  // Of equally full ones the one that grows least with the micro-batch, and then the first, as Timeline.peak has it.
  function peak(timeline, bytes) {
    let best = { total: -1, slope: 0, event: 0, storage: 0 }, slope = 0;
    walk(timeline, bytes, (event, storage, isBirth, total) => {
      const { perSample } = timeline.classes[timeline.births[storage]];
      slope += isBirth ? perSample : -perSample;
      if (isBirth && (total > best.total || (total === best.total && slope < best.slope))) best = { total, slope, event, storage };
    });
    const { operator } = timeline.classes[timeline.births[best.storage]];
    return {
      total: best.total,
      categories: categoriesAt(timeline, bytes, best.event),
      event: best.event,
      phase: phaseOf(timeline, best.event),
      operator,
      module: timeline.modules[best.storage],
    };
  }

  function categoriesAt(timeline, bytes, last) {
    const held = new Array(CATEGORIES.length).fill(0);
    const alive = new Uint8Array(bytes.length);
    for (let event = 0; event <= last; event++) {
      const storage = timeline.storages[event];
      held[timeline.classes[timeline.births[storage]].category] += alive[storage] ? -bytes[storage] : bytes[storage];
      alive[storage]++;
    }
    return Object.fromEntries(CATEGORIES.map((name, i) => [name, held[i]]));
  }

  // At most `most` moments from event `first` on, of each stretch of equal length the fullest one, with all categories.
  function picture(timeline, bytes, first, most) {
    const stretch = Math.max(1, Math.ceil((timeline.numEvents - first) / most));
    const held = new Float64Array(CATEGORIES.length);
    const moments = [];
    let kept = null;
    walk(timeline, bytes, (event, storage, isBirth, total) => {
      held[timeline.classes[timeline.births[storage]].category] += isBirth ? bytes[storage] : -bytes[storage];
      if (event < first) return;
      if (kept === null || (event - first) % stretch === 0) {
        kept = { event: -1, total: -1 };
        moments.push(kept);
      }
      if (total > kept.total) Object.assign(kept, { event, total, storage, categories: [...held] });
    });
    return moments;
  }

  return { CATEGORIES, inflated, integers, read, sizes, peak, picture, phaseOf };
})();
