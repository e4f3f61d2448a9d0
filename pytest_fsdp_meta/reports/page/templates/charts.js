// Charts; on a page with many, each is drawn when it first comes into view.
const drawn = new Map();
const HEIGHT = 220;
// Canvas does not resolve light-dark(): a probe element gives the current value of a variable.
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
const HUES = [212, 28, 150, 275, 340, 185, 60, 240];
const rankColour = (rank) => `hsl(${HUES[rank % HUES.length]} ${isDark() ? "65% 68%" : "60% 42%"})`;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function bytes(value) {
  if (value == null) return "–";
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${+value.toPrecision(4)} ${UNITS[unit]}`;
}
const axis = (label, more) => ({
  label, labelSize: 18, labelFont: "12px system-ui, sans-serif", font: "11px system-ui, sans-serif",
  stroke: () => colour("quiet"), grid: { stroke: () => colour("line"), width: 1 },
  ticks: { stroke: () => colour("line"), width: 1 }, ...more,
});
const steps = () => axis("step", { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], size: 34 });
const byStep = (count) => ({ time: false, range: () => [0.85, count + 0.15] });
// At most six powers of ten: uPlot's own grid of a log scale has nine lines for each.
function decades(_, __, low, high) {
  const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high)), apart = Math.ceil((last - first + 1) / 6);
  return Array.from({ length: Math.floor((last - first) / apart) + 1 }, (_, index) => 10 ** (first + index * apart));
}
const exponent = (value) => (value == null ? "–" : value.toExponential(1));

// The steps at which a loss is NaN have no point: a cross on the axis marks them.
function markLost(chart, lost) {
  const { ctx, bbox } = chart, size = 5 * devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("bad");
  ctx.lineWidth = 2 * devicePixelRatio;
  ctx.font = `600 ${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  for (const step of lost) {
    const x = chart.valToPos(step, "x", true), y = bbox.top + bbox.height;
    ctx.beginPath();
    ctx.moveTo(x - size, y - size); ctx.lineTo(x + size, y + size);
    ctx.moveTo(x - size, y + size); ctx.lineTo(x + size, y - size);
    ctx.stroke();
    ctx.fillText("NaN", x, y - 2 * size);
  }
  ctx.restore();
}
function fillBand(chart, allowed) {
  const { ctx, bbox } = chart, at = (value) => chart.valToPos(value, "y", true);
  const points = allowed.flatMap((value, index) => (value == null ? [] : [[chart.valToPos(index + 1, "x", true), at(value)]]));
  if (!points.length) return;
  const bottom = bbox.top + bbox.height, right = bbox.left + bbox.width;
  ctx.save();
  ctx.fillStyle = colour("good-soft");
  ctx.beginPath();
  ctx.moveTo(bbox.left, bottom);
  [[bbox.left, points[0][1]], ...points, [right, points.at(-1)[1]], [right, bottom]].forEach(([x, y]) => ctx.lineTo(x, y));
  ctx.fill();
  ctx.restore();
}
function markOff(chart, difference, allowed) {
  const { ctx } = chart;
  ctx.save();
  ctx.fillStyle = colour("bad-fill");
  difference.forEach((value, index) => {
    if (value == null || allowed[index] == null || value <= allowed[index]) return;
    ctx.beginPath();
    ctx.arc(chart.valToPos(index + 1, "x", true), chart.valToPos(value, "y", true), 5 * devicePixelRatio, 0, 2 * Math.PI);
    ctx.fill();
  });
  ctx.restore();
}

const CHARTS = {
  difference({ difference, allowed, lost }) {
    const xs = difference.map((_, step) => step + 1);
    const known = [...difference, ...allowed].filter((value) => value > 0);
    const low = Math.min(1e-7, ...known) / 2, high = Math.max(1e-4, ...known) * 3;
    const value = (_, number) => exponent(number), points = [xs, difference];
    const series = [{ label: "step" }, { label: "difference", stroke: () => colour("link"), width: 2, points: { show: true, size: 7 }, value }];
    if (allowed.some((value) => value != null)) {
      series.push({ label: "allowed", stroke: () => colour("good"), width: 1.5, dash: [6, 4], points: { show: false }, value });
      points.push(allowed);
    }
    return {
      points, series, x: byStep(xs.length), y: { distr: 3, range: () => [low, high] },
      axes: [steps(), axis("relative difference", { size: 58, splits: decades, filter: (_, ticks) => ticks, values: (_, ticks) => ticks.map((tick) => tick.toExponential(0)) })],
      hooks: {
        drawClear: [(chart) => fillBand(chart, allowed)],
        draw: [(chart) => { markOff(chart, difference, allowed); markLost(chart, lost); }],
      },
    };
  },
  losses({ mean, ranks, lost }) {
    const xs = mean.map((_, step) => step + 1);
    const number = (_, value) => (value == null ? "–" : value.toPrecision(6));
    const series = [{ label: "step" }], points = [xs];
    if (ranks.length > 1) ranks.forEach((curve, slice) => {
      series.push({ label: `slice ${slice}`, stroke: () => colour("whole"), width: 1, alpha: Math.min(1, 8 / ranks.length), points: { show: false }, value: number });
      points.push(curve);
    });
    series.push({ label: "mean of ranks", stroke: () => colour("link"), width: 2, points: { show: true, size: 6 }, value: number });
    points.push(mean);
    return { points, series, x: byStep(xs.length), axes: [steps(), axis("loss", { size: 58 })], hooks: { draw: [(chart) => markLost(chart, lost)] } };
  },
  memory({ ranks, model, budget }) {
    const xs = [...new Set([0, ...ranks.flat().map(([seconds]) => seconds)])].sort((a, b) => a - b);
    const value = (_, number) => bytes(number);
    const series = [{ label: "seconds", value: (_, number) => (number == null ? "–" : `${number} s`) }], points = [xs];
    ranks.forEach((line, rank) => {
      const at = new Map(line);
      let held = 0;
      points.push(xs.map((x) => (held = at.get(x) ?? held)));
      series.push({
        label: `rank ${rank}`, stroke: () => rankColour(rank), width: 1.5, points: { show: false },
        dash: rank < HUES.length ? undefined : [4, 3], paths: uPlot.paths.stepped({ align: 1 }), value,
      });
    });
    for (const [label, level, name, dash] of [["whole model", model, "ink", [2, 3]], ["a rank may hold", budget, "bad", [7, 4]]]) {
      if (!level) continue;
      points.push(xs.map(() => level));
      series.push({ label, stroke: () => colour(name), width: 1.5, dash, points: { show: false }, value });
    }
    return {
      points, series, x: { time: false }, y: { range: (_, low, high) => [0, high * 1.05 || 1] },
      axes: [axis("seconds since loading began", { size: 34 }), axis("live bytes on the host", { size: 76, incrs: Array.from({ length: 50 }, (_, power) => 2 ** power), values: (_, ticks) => ticks.map(bytes) })],
    };
  },
};
function draw(place) {
  if (drawn.has(place) || !place.clientWidth) return;
  const { points, series, axes, x, y, hooks } = CHARTS[place.dataset.chart](JSON.parse(place.dataset.points));
  const chart = new uPlot({
    width: place.clientWidth, height: HEIGHT, series, axes, hooks, scales: { x, y: y ?? {} },
    legend: { show: series.length <= 12 }, cursor: { drag: { x: false, y: false } },
  }, points, place);
  drawn.set(place, chart);
  sizes.observe(place);
  // The legend follows the pointer only; assistive technology has the table below the chart.
  all(".u-legend", place).forEach((legend) => legend.setAttribute("role", "presentation"));
  showRank(place, chart);
}
function resize(place, width) {
  const chart = drawn.get(place);
  if (chart && width && chart.width !== width) chart.setSize({ width, height: HEIGHT });
}
const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => resize(target, target.clientWidth)));
const seen = new IntersectionObserver((entries) => entries.forEach(({ isIntersecting, target }) => isIntersecting && draw(target)), { rootMargin: "300px" });
function showRank(place, chart) {
  if (place.dataset.chart !== "memory") return;
  const rank = state().rank;
  chart.series.forEach((line, index) => index && line.label.startsWith("rank ") && chart.setSeries(index, { show: rank === "" || line.label === `rank ${rank}` }));
}
