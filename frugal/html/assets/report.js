// The charts of a run's page: their descriptions are data, see frugal/report/page.py.
"use strict";
(() => {
  const trimmed = (value, digits) => String(+value.toPrecision(digits));
  const FORMATS = {
    step: (value) => Number.isInteger(value) ? value.toLocaleString("en") : "",
    number: (value) => trimmed(value, 5),
    small: (value) => value === 0 ? "0" : value.toExponential(1),
    count: (value) => Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : trimmed(value, 3),
    percent: (value) => `${trimmed(100 * value, 3)} %`,
  };
  for (const [name, spec] of Object.entries(frugal.data("charts"))) {
    const xFormat = FORMATS[spec.xFormat], yFormat = FORMATS[spec.yFormat];
    const at = (index) => spec.xFormat === "step" ? `step ${xFormat(spec.x[index])}` : `${xFormat(spec.x[index])} ${spec.xLabel.split(" ")[0]}`;
    const hover = (index) => [
      at(index),
      ...spec.series.filter(({ values }) => values[index] !== null).map(({ label, values }) => `${label} ${yFormat(values[index])}`),
      ...spec.marks.filter(({ x }) => x === spec.x[index]).map(({ label }) => label),
    ].join("  ·  ");
    frugal.chart(document.getElementById(name), { ...spec, xFormat, yFormat, hover, height: 260 });
  }
})();
