// CUDA's caching allocator, as frugal/planning/memory/allocator.py replays it: the same words for the same things, and
// there is why. Lengths and addresses are in units of 512 bytes.
"use strict";
const frugalAllocator = (() => {
  const UNIT = 512, MIB = 1 << 20;
  const SMALL = MIB / UNIT, ENDLESS = 2 ** 51;

  function segmentUnits(length) {
    const size = length * UNIT;
    if (size <= MIB) return (2 * MIB) / UNIT;
    if (size < 10 * MIB) return (20 * MIB) / UNIT;
    return (Math.ceil(size / (2 * MIB)) * 2 * MIB) / UNIT;
  }

  // Where `value` is or would be in a sorted list.
  function place(sorted, value) {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  const insert = (sorted, value) => sorted.splice(place(sorted, value), 0, value);
  const removeFrom = (sorted, value) => sorted.splice(place(sorted, value), 1);
  const inOrder = (map) => [...map.keys()].sort((a, b) => a - b);

  // The free blocks of one of the two kinds of segments; see `_Pool`.
  class Pool {
    constructor(leastRest) {
      this.leastRest = leastRest;
      this.starts = new Map();
      this.ends = new Map();
      this.ofLength = new Map();
      this.lengths = [];
      this.holes = new Map();
    }

    take(wanted) {
      for (const [address, length] of this.from(wanted)) {
        this.remove(address);
        return this.cut(address, length, wanted);
      }
      return null;
    }

    *from(wanted) {
      let index = place(this.lengths, wanted);
      while (index < this.lengths.length) {
        const length = this.lengths[index];
        const addresses = this.ofLength.get(length);
        if (addresses.length) {
          for (const address of addresses) yield [address, length];
          index++;
        } else {
          this.ofLength.delete(length);
          this.lengths.splice(index, 1);
        }
      }
    }

    cut(address, length, wanted) {
      if (length - wanted < this.leastRest) return [address, length];
      this.add(address + wanted, length - wanted);
      return [address, wanted];
    }

    add(address, length) {
      this.starts.set(address, length);
      this.ends.set(address + length, address);
      const same = this.ofLength.get(length);
      if (same) {
        insert(same, address);
      } else {
        this.ofLength.set(length, [address]);
        insert(this.lengths, length);
      }
    }

    remove(address) {
      const length = this.starts.get(address);
      this.starts.delete(address);
      this.ends.delete(address + length);
      removeFrom(this.ofLength.get(length), address);
      return length;
    }
  }

  // Where segments are: each at the lowest address with room; see `_Addresses`.
  class Addresses {
    constructor() {
      this.ends = new Map();
    }

    take(length) {
      let address = 0;
      for (const start of inOrder(this.ends)) {
        if (start - address > length) break;
        address = this.ends.get(start) + 1;
      }
      this.ends.set(address, address + length);
      return address;
    }

    giveBack(address) {
      this.ends.delete(address);
    }
  }

  class SegmentPool extends Pool {
    constructor(leastRest, addresses) {
      super(leastRest);
      this.segments = new Map();
      this.addresses = addresses;
    }

    grow(wanted) {
      const segment = segmentUnits(wanted);
      const address = this.addresses.take(segment);
      this.segments.set(address, segment);
      return [this.cut(address, segment, wanted), segment];
    }

    releaseCached() {
      let released = 0;
      for (const [address, length] of [...this.segments]) {
        if (this.starts.get(address) !== length) continue;
        this.segments.delete(address);
        this.addresses.giveBack(address);
        this.remove(address);
        released += length;
      }
      return released;
    }
  }

  // One segment that grows in pages; see `_ExpandablePool`.
  class ExpandablePool extends Pool {
    constructor(page) {
      super(1);
      this.page = page;
      this.holes.set(0, ENDLESS);
    }

    take(wanted) {
      let chosen = -1, least = 0;
      for (const [address, length] of this.from(wanted)) {
        const room = length + (this.holes.get(address + length) ?? 0);
        if (chosen >= 0 && room >= least) break;
        chosen = address;
        least = room;
      }
      return chosen < 0 ? null : this.cut(chosen, this.remove(chosen), wanted);
    }

    grow(wanted) {
      const start = inOrder(this.holes).map((hole) => this.ends.get(hole) ?? hole).find((from) => this.hasRoom(from, wanted));
      let length = this.starts.has(start) ? this.remove(start) : 0, mapped = 0;
      while (length < wanted) {
        const hole = start + length, room = this.holes.get(hole);
        const pages = Math.min(Math.ceil((wanted - length) / this.page) * this.page, room);
        this.holes.delete(hole);
        if (room > pages) this.holes.set(hole + pages, room - pages);
        mapped += pages;
        length += pages;
        if (this.starts.has(start + length)) length += this.remove(start + length);
      }
      return [this.cut(start, length, wanted), mapped];
    }

    hasRoom(start, wanted) {
      let end = start;
      while (end < start + wanted) {
        const stretch = this.starts.get(end) || this.holes.get(end);
        if (stretch === undefined) return false;
        end += stretch;
      }
      return true;
    }

    releaseCached() {
      let released = 0;
      for (const [address, length] of [...this.starts]) {
        const first = Math.ceil(address / this.page) * this.page;
        const end = Math.floor((address + length) / this.page) * this.page;
        if (first >= end) continue;
        this.remove(address);
        if (first > address) this.add(address, first - address);
        if (end < address + length) this.add(end, address + length - end);
        this.holes.set(first, end - first);
        released += end - first;
      }
      let before = -1;
      for (const hole of inOrder(this.holes)) {
        if (before >= 0 && before + this.holes.get(before) === hole) {
          this.holes.set(before, this.holes.get(before) + this.holes.get(hole));
          this.holes.delete(hole);
        } else {
          before = hole;
        }
      }
      return released;
    }
  }

  // The two pools of a device with `limit` units for their segments; see `_Device`.
  class CardMemory {
    constructor(limit, expandable) {
      this.limit = limit;
      if (expandable) {
        [this.small, this.large] = [2 * MIB, 20 * MIB].map((page) => new ExpandablePool(page / UNIT));
      } else {
        const addresses = new Addresses();
        [this.small, this.large] = [1, SMALL + 1].map((rest) => new SegmentPool(rest, addresses));
      }
      this.reserved = this.mostReserved = this.mostGranted = 0;
      this.leastRefused = Infinity;
    }

    more(pool, length) {
      const segment = segmentUnits(length);
      if (!this.grants(segment)) {
        this.emptyCache();
        if (!this.grants(segment)) return null;
      }
      this.mostGranted = Math.max(this.mostGranted, this.reserved + segment);
      const [block, added] = pool.grow(length);
      this.reserved += added;
      this.mostReserved = Math.max(this.mostReserved, this.reserved);
      return block;
    }

    grants(segment) {
      if (this.reserved + segment <= this.limit) return true;
      this.leastRefused = Math.min(this.leastRefused, this.reserved + segment);
      return false;
    }

    emptyCache() {
      this.reserved -= this.small.releaseCached() + this.large.releaseCached();
    }
  }

  function free(pool, address, length) {
    let start = address, end = address + length;
    if (pool.starts.has(end)) end += pool.remove(end);
    if (pool.ends.has(start)) {
      start = pool.ends.get(start);
      pool.remove(start);
    }
    pool.add(start, end - start);
  }

  // A stream of storages of so many units under a limit; see `_replay`.
  function replay(lengths, storages, empties, limitBytes, expandable) {
    const device = new CardMemory(Math.floor(limitBytes / UNIT), expandable);
    const addresses = new Float64Array(lengths.length), blocks = new Float64Array(lengths.length);
    let allocated = 0, mostAllocated = 0, survived = true, nextEmpty = 0;
    for (let event = 0; event < storages.length && survived; event++) {
      while (nextEmpty < empties.length && empties[nextEmpty] === event) {
        if (event) device.emptyCache();
        nextEmpty++;
      }
      const storage = storages[event], wanted = lengths[storage];
      const pool = wanted > SMALL ? device.large : device.small;
      if (blocks[storage]) {
        allocated -= blocks[storage];
        free(pool, addresses[storage], blocks[storage]);
      } else if (wanted) {
        const block = pool.take(wanted) ?? device.more(pool, wanted);
        if (block === null) {
          survived = false;
        } else {
          [addresses[storage], blocks[storage]] = block;
          allocated += block[1];
          mostAllocated = Math.max(mostAllocated, allocated);
        }
      }
    }
    return {
      survived,
      allocated: mostAllocated * UNIT,
      reserved: device.mostReserved * UNIT,
      granted: device.mostGranted * UNIT,
      refused: device.leastRefused * UNIT,
    };
  }

  // Replays of one stream under any limit, each done once; see `Replays`.
  class Replays {
    constructor(sizes, storages, empties, expandable) {
      this.lengths = Float64Array.from(sizes, (size) => Math.ceil(size / UNIT));
      this.storages = storages;
      this.empties = empties;
      this.expandable = expandable;
      this.known = [];
    }

    under(limit) {
      const known = this.known.find(({ granted, refused }) => granted <= limit && limit < refused);
      if (known) return known;
      const result = replay(this.lengths, this.storages, this.empties, limit, this.expandable);
      this.known.push(result);
      return result;
    }

    survives(limit) {
      const { survived, reserved } = this.under(limit);
      return survived && reserved <= limit;
    }

    smallestCapacity(wanted) {
      const endless = ENDLESS * UNIT, needed = ({ granted, reserved }) => Math.max(granted, reserved);
      let low = wanted, first = this.under(wanted);
      if (this.survives(wanted)) {
        low = first.allocated;
      } else {
        first = this.under(endless);
        low = Math.max(low, first.allocated);
      }
      let high = needed(first);
      while (high - low > Math.max(2 * MIB, 0.002 * low)) {
        const middle = Math.floor((low + high) / 2);
        if (this.survives(middle)) high = Math.min(middle, needed(this.under(middle)));
        else low = middle;
      }
      return high;
    }
  }

  return { Replays };
})();
