// What `frugal plan` would say of a strategy, a micro-batch and a card: memory and seconds, recomputed from the
// timelines in the page. After MemoryProfile.memory (frugal/planning/memory/profile.py), BatchPlan and cost.step_time.
"use strict";
const frugalPredict = ((written) => {
  const parts = new Map(), profiles = new Map();

  const part = (number) => {
    if (!parts.has(number)) {
      parts.set(number, frugalTimeline.inflated(written.parts[number]).then(frugalTimeline.integers));
    }
    return parts.get(number);
  };

  const keyOf = ({ gpus, seqLen, strategy, accumulates }) => `${gpus}/${seqLen}/${strategy}/${accumulates ? 1 : 0}`;

  const isKnown = (point) => keyOf(point) in written.profiles;

  // The profile of a point {gpus, seqLen, strategy: its place in `strategies`, accumulates}; null: not in this page.
  async function profile(point) {
    const key = keyOf(point);
    if (!isKnown(point)) return null;
    if (!profiles.has(key)) {
      const entry = written.profiles[key];
      const timelines = Promise.all(entry.ranks.map((rank) => frugalTimeline.read(rank, part)));
      profiles.set(key, timelines.then((read) => ({
        ...entry,
        expandable: written.strategies[point.strategy].expandable,
        ranks: read.map((timeline, i) => new Rank(timeline, entry.ranks[i])),
      })));
    }
    return profiles.get(key);
  }

  // One rank: its timeline, and what was found out of it for micro-batches so far.
  class Rank {
    constructor(timeline, { host, host_per_sample }) {
      Object.assign(this, { timeline, host, hostPerSample: host_per_sample, known: new Map() });
    }

    at(microBatch, threads, expandable) {
      const key = `${microBatch}/${threads}`;
      if (!this.known.has(key)) {
        const { timeline } = this;
        const sizes = frugalTimeline.sizes(timeline, microBatch, threads);
        const replays = new frugalAllocator.Replays(sizes, timeline.storages, timeline.empties, expandable);
        this.known.set(key, { sizes, replays, peak: frugalTimeline.peak(timeline, sizes) });
      }
      return this.known.get(key);
    }
  }

  const ranksAt = (made, microBatch, device) => made.ranks.map((rank) => ({ rank, ...rank.at(microBatch, device.threads, made.expandable) }));

  // The peak of the fullest rank on a device {memory, context, usable, threads}, bytes; see `fullest` and `breakdown`.
  function memory(made, microBatch, device) {
    const onGpu = written.kind === "cuda";
    const [first, ...others] = ranksAt(made, microBatch, device).sort((a, b) => b.peak.total - a.peak.total);
    let most = breakdown(first, device, onGpu);
    if (onGpu) {
      for (const other of others) {
        if (other.replays.survives(most.total - most.context)) continue;
        const more = breakdown(other, device, onGpu);
        if (more.total > most.total) most = more;
      }
    }
    const onHost = Math.max(...made.ranks.map((rank) => rank.host + rank.hostPerSample * microBatch));
    return { ...most, rankHost: onGpu ? hostBytes(onHost) : 0 };
  }

  function breakdown({ rank, peak, replays }, device, onGpu) {
    const slack = onGpu ? replays.smallestCapacity(device.usable) - peak.total : 0;
    return {
      ...peak.categories,
      slack,
      context: device.context,
      total: peak.total + slack + device.context,
      live: peak.total,
      headroom: device.usable - peak.total - slack,
      fits: device.usable >= peak.total + slack,
      phase: peak.phase,
      operator: written.names[peak.operator],
      module: written.names[peak.module],
      event: peak.event,
      rank,
    };
  }

  // `rank_host_bytes` of frugal.planning.memory.breakdown, of a rank on a GPU.
  const hostBytes = (tensors) => 2 * 2 ** 30 + Math.trunc(tensors * (1 + 0.03));

  // Whether `memory` would say so, found sooner.
  function fits(made, microBatch, device) {
    const ranks = ranksAt(made, microBatch, device);
    if (ranks.some(({ peak }) => peak.total > device.usable)) return false;
    return written.kind !== "cuda" || ranks.every(({ replays }) => replays.survives(device.usable));
  }

  function bisected(low, high, holds) {
    while (low < high) {
      const middle = Math.floor((low + high + 1) / 2);
      if (holds(middle)) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // The most samples, up to `cap`, whose step fits; 0: not even one. See `MemoryProfile.largest_micro_batch`.
  function largestMicroBatch(made, device, cap) {
    let most = bisected(0, cap, (samples) => ranksAt(made, samples, device).every(({ peak }) => peak.total <= device.usable));
    let tooMany = most + 1, step = 1;
    while (most && !fits(made, most, device)) {
      tooMany = most;
      most = Math.max(0, most - step);
      step *= 2;
    }
    return bisected(most, tooMany - 1, (samples) => fits(made, samples, device));
  }

  // A global batch in the fewest micro-steps of at most so many samples on each of equal ranks, or of groups of ranks
  // that share samples; see `BatchPlan.of`.
  function batch(samples, ranks, microBatch) {
    const steps = Math.ceil(samples / (microBatch * ranks));
    const each = Math.floor(samples / steps), larger = samples % steps;
    const kinds = [[larger, each + 1], [steps - larger, each]]
      .filter(([count]) => count > 0)
      .map(([count, size]) => ({ count, largest: Math.ceil(size / ranks), smallest: Math.floor(size / ranks) }));
    const sizes = [...new Set(kinds.flatMap(({ largest, smallest }) => [largest, smallest]))].sort((a, b) => a - b);
    return { steps, kinds, sizes, largest: Math.max(1, ...sizes) };
  }

  // Seconds of an optimizer step and its parts; null where the page cannot tell. See frugal.plan_page.seconds.
  function seconds(made, cut) {
    const line = made.seconds;
    if (line === null) return null;
    const parts = { compute: 0, recompute: 0, communication: line.communication[0] + line.communication[1] * cut.steps, offload: line.offload[0] + line.offload[1] * cut.steps, optimizer: line.optimizer };
    for (const { count, largest } of cut.kinds) {
      const kernels = line.kernels[0] + line.kernels[1] * largest;
      const again = line.kernels_again[0] + line.kernels_again[1] * largest;
      const join = line.adds_up ? (a, b) => a + b : Math.max;
      parts.compute += count * join(kernels, line.launch);
      parts.recompute += count * (join(again, line.launch_again) - join(kernels, line.launch));
      parts.offload += count * line.moving * largest;
      parts.communication += count * line.exchange * largest;
    }
    return { ...parts, total: Object.values(parts).reduce((sum, value) => sum + value, 0) };
  }

  return { isKnown, profile, memory, fits, largestMicroBatch, batch, seconds };
})(frugal.data("profiles"));
