// ---- Curves: every metric of every run, and histograms of the logged samples
const CHARTS = {"reward/mean": "reward", "reward/acc": "accuracy",
  "reward/flawed_positive_rate": "flawed among right answers, by the judge",
  "reward/oracle_flawed_positive_rate": "flawed among right answers, by the oracle",
  "reward/truly_correct": "fully correct: correct answer, no wrong step",
  "reward/audit_flawed":
    "called flawed by a second judge, accepted by the first (bars: last 20 steps, ± 3 standard errors)",
  "reward/no_verdict": "samples without a verdict",
  "genrm/error_rate": "requests to the judge without a verdict", "response_length/mean": "response length",
  "actor/entropy": "entropy", "time/step": "time of a step"};
// Listed under "All other metrics". Other metrics that begin with reward/ come from the reward function and are open.
const LESS = ["reward/score", "reward/groups_with_spread", "reward/seconds_mean", "reward/seconds_max"];
const SHARES = /acc$|_rate$|audit_flawed$|audited$|_correct$|no_verdict$/;  // the axis goes from 0 to 1
const UNITS = [[/^reward\/(mean|score)$/, "reward"], [SHARES, "share"], [/^time\/|seconds/, "seconds"],
  [/^response_length\/(mean|max)/, "tokens"], [/entropy$/, "nats"]];
const GLYPHS = "●◆■▲▼★";  // one per held-out data source
const METRICS = [...new Set(RUNS.flatMap(run => Object.keys(run.metrics)))].sort();
// A source's name may contain slashes. A metric that every source has shows where the name ends.
const NO_VERDICT_OF = /^val\/(.+)\/no_verdict\/mean@\d+$/;
const SOURCES = [...new Set(METRICS.map(key => key.match(NO_VERDICT_OF)?.[1]).filter(Boolean))];
// Of two sources such as gsm8k and gsm8k/main, the longer name counts.
const sourceOf = key => SOURCES.filter(source => key.startsWith(`val/${source}/`)).sort().at(-1);
const glyph = source => GLYPHS[SOURCES.indexOf(source) % GLYPHS.length];

function inTraining(name) {  // the name of a held-out metric in training, or the same name if there is none
  const source = sourceOf(name);
  const parts = source && name.slice(`val/${source}`.length).match(/^(?:\/(.+))?\/mean@\d+$/);
  return parts ? `reward/${{score: "mean"}[parts[1]] ?? parts[1] ?? "acc"}` : name;
}
const belongs = (name, key) => name === key || inTraining(name) === key;

// ---- The horizontal axis: steps, or the total time or tokens up to a step
const TOTALS = {__proto__: null, time: "time/step", tokens: "perf/tokens"};
for (const run of RUNS) {
  run.totals = {};
  for (const [axis, key] of Object.entries(TOTALS)) {
    let total = 0;
    run.totals[axis] = (run.metrics[key] ?? []).map(([step, value]) => [step, total += value]);
  }
}
function totalAt(points, step) {  // the latest total up to this step, by binary search
  let low = 0, high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= step) low = middle + 1; else high = middle;
  }
  return low ? points[low - 1][1] : 0;
}
const LONGEST = Math.max(0, ...RUNS.map(run => run.totals.time.at(-1)?.[1] ?? 0));
const TIME_UNITS = [[3600, "hours", 7200], [60, "minutes", 180], [1, "seconds", -1]];
const [TIME_UNIT, TIME_NAME] = TIME_UNITS.find(([, , least]) => LONGEST > least);
const axisName = () => ({__proto__: null, time: TIME_NAME, tokens: "response tokens"}[state.axis] ?? "step");
function xOf(run, step) {
  if (!(state.axis in TOTALS)) return step;
  return totalAt(run.totals[state.axis], step) / (state.axis === "time" ? TIME_UNIT : 1);
}
const LAST = Math.max(1, ...RUNS.flatMap(run =>  // samples are written before the metrics of their step
  [...Object.values(run.metrics).map(points => points.at(-1)[0]), ...new Set(run.groups.map(group => group.step))]));
function domain() {  // [start, end] for all charts
  const end = Math.max(...RUNS.map(run => xOf(run, LAST))) || 1;
  const from = +(state.from || 0), to = +(state.to || end);
  return to > from ? [from, to] : [0, end];
}

// ---- Teams: a line shows a run, or all seeds of a setting
const SEED = /[-_/.]?seed[-_]?\d+/gi;
function settingKey({settings, name}) {  // equal for runs that differ only in the seed
  const {seed, out_dir, ...others} = settings;
  return seed === undefined ? name : JSON.stringify(others).replace(SEED, "");
}
const SETTINGS = new Map();
for (const run of RUNS) SETTINGS.set(settingKey(run), [...SETTINGS.get(settingKey(run)) ?? [], run]);
function teamName([first, ...others]) {
  if (!others.length) return first.name;
  return `${first.name.replace(SEED, "").replace(/^\//, "") || "runs"} (${others.length + 1} seeds)`;
}
const TEAMS = [...SETTINGS.values()].map((runs, index) => ({runs, name: teamName(runs), ...colourOf(index)}));
const HAS_SEEDS = TEAMS.some(team => team.runs.length > 1);
const SINGLES = RUNS.map(run => ({runs: [run], name: run.name, colour: run.colour, dash: run.dash}));
const teams = () => state.bands && HAS_SEEDS ? TEAMS : SINGLES;
const isHidden = team => (state.hide ?? "").split("\n").includes(team.name);

const windowOf = () => Math.max(1, Math.trunc(+(state.window ?? 5)) || 1);  // steps per average of a thick line
const smooth = points => points.map(([step], i) => {
  const last = points.slice(Math.max(0, i - windowOf() + 1), i + 1);
  return [step, sum(last.map(point => point[1])) / last.length];
});
function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
function mergeSeeds(team, name, isHeldOut) {  // [{step, x, value, low, high, seeds}], over the seeds of a team
  const found = new Map();
  for (const run of team.runs) {
    const points = run.metrics[name] ?? [];
    for (const [step, value] of isHeldOut ? points : smooth(points)) {
      if (!found.has(step)) found.set(step, []);
      found.get(step).push([value, xOf(run, step)]);
    }
  }
  return [...found].sort(([a], [b]) => a - b).map(([step, pairs]) => {
    const values = pairs.map(pair => pair[0]), [low, high] = extremes(values);
    return {step, x: median(pairs.map(pair => pair[1])), value: median(values), low, high, seeds: values.length};
  });
}
function seriesOf(key, team) {
  const names = [...new Set(team.runs.flatMap(run => Object.keys(run.metrics)))].filter(name => belongs(name, key));
  return names.map(name => {
    const source = sourceOf(name), [run] = team.runs;
    const raw = source || team.runs.length > 1 ? []
      : run.metrics[name].map(([step, value]) => ({x: xOf(run, step), value}));
    const points = mergeSeeds(team, name, !!source);
    raw.forEach((point, i) => { points[i].exact = point.value; });  // for the readout, which is not averaged
    return {team, source, points, raw};
  });
}

// ---- One chart
const W = 360, H = 208, LEFT = 58, RIGHT = 16, TOP = 12, BOTTOM = 34;  // no marker at an edge is cut off
let drawn = [];  // one function per visible chart: pointing at one chart shows the values in all of them

function ticks(low, high) {
  const least = (high - low) / 5, power = 10 ** Math.floor(Math.log10(least));
  const size = power * [1, 2, 5, 10].find(n => n * power > .99 * least), first = Math.ceil(low / size - 1e-9);
  return Array.from({length: Math.floor(high / size + 1e-9) - first + 1}, (_, i) => (first + i) * size);
}
function logTicks(low, high) {  // powers of ten, and if there are few, also their multiples by 2 and 5
  if (high / low < 5) return ticks(low, high);
  const powers = ticks(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))).filter(Number.isInteger);
  const factors = Math.log10(high / low) > 2 ? [1] : [1, 2, 5];
  return powers.flatMap(power => factors.map(factor => factor * 10 ** power))
    .filter(value => value >= .999 * low && value <= 1.001 * high);
}
const AT_LEAST = 8;  // With fewer values, none of them counts as rare.
function endOf(values) {  // the end of an axis of seconds: a few slow steps, such as the first, flatten all others
  const sorted = [...values].sort((a, b) => a - b), highest = sorted.at(-1);
  const most = sorted[Math.floor(.95 * (sorted.length - 1))];
  return sorted.length >= AT_LEAST && most > 0 && highest > 2 * most ? 1.2 * most : highest;
}
function noteOfEnd(end, values) {
  const above = values.filter(value => value > end);
  if (!above.length) return null;
  const count = `${above.length} of ${plural(values.length, "value")} ${above.length === 1 ? "is" : "are"} higher`;
  return el("div", {class: "soft"}, `The axis ends at ${show(end)} s; ${count}, up to ${show(extremes(above)[1])} s.`);
}
function scales(key, values, highest) {  // {x, y, valueTicks}: from values to positions in the picture
  const [start, end] = domain();
  const x = at => LEFT + (at - start) / (end - start) * (W - LEFT - RIGHT);
  let [low, high] = extremes(values);
  if (state.log) {
    if (high === low) [low, high] = [low / 2, high * 2];
    const place = value => (Math.log(high) - Math.log(value)) / (Math.log(high) - Math.log(low));
    return {x, y: value => TOP + place(value) * (H - TOP - BOTTOM), valueTicks: logTicks(low, high)};
  }
  high = Math.min(high, highest);
  if (SHARES.test(key)) [low, high] = [0, 1];
  if (low > 0 && low < high / 2) low = 0;
  if (high === low) [low, high] = [low - .5 * (Math.abs(low) || 1), high + .5 * (Math.abs(high) || 1)];
  const place = value => (high - Math.min(value, high)) / (high - low);
  return {x, y: value => TOP + place(value) * (H - TOP - BOTTOM), valueTicks: ticks(low, high)};
}
function axes({x, y, valueTicks}, unit) {
  const places = ticks(...domain()).filter(place => state.axis || Number.isInteger(place));
  return [
    valueTicks.map(value => [
      svg("path", {d: `M${LEFT} ${y(value)}H${W - RIGHT}`, stroke: "var(--line)"}),
      svg("text", {x: LEFT - 24, y: y(value) + 3}, brief(value))]),
    places.map(place => svg("text", {class: "place", x: x(place), y: H - 18}, brief(place))),
    svg("text", {x: (LEFT + W - RIGHT) / 2, y: H - 4}, axisName()),
    svg("text", {transform: `translate(10 ${(TOP + H - BOTTOM) / 2}) rotate(-90)`}, unit)];
}
function drawing({team, source, points, raw}, {x, y}) {  // one series
  const colour = `color:${team.colour}`;
  const place = (at, value) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`;
  const line = (some, width, opacity) => svg("polyline", {fill: "none", stroke: "currentColor", style: colour,
    "stroke-width": width, opacity, "stroke-dasharray": team.dash,
    points: some.map(point => place(point.x, point.value)).join(" ")});
  const outline = [...points.map(point => place(point.x, point.high)),
    ...points.toReversed().map(point => place(point.x, point.low))];
  const band = svg("polygon", {class: "band", fill: "currentColor", style: colour, opacity: .18,
    points: outline.join(" ")});
  const marks = points.map(point => [
    point.high > point.low && svg("path", {style: colour, stroke: "currentColor", opacity: .5,
      d: `M${x(point.x)} ${y(point.low)}V${y(point.high)}`}),
    source ? svg("text", {class: "held-out", x: x(point.x), y: y(point.value), style: colour}, glyph(source))
      : svg("circle", {cx: x(point.x), cy: y(point.value), r: 3, fill: "none", stroke: "currentColor",
        "stroke-width": 2, style: colour})]);
  const lines = [team.runs.length > 1 ? band : line(raw, 1, .45), line(points, 2, 1)];
  if (source) return marks;
  return points.length > 1 ? lines : [...lines, ...marks];  // a line through one point draws nothing
}
function auditBars(series, {x, y}) {
  return series.flatMap(({team}) => team.runs.flatMap(run => run.audit.map(([step, share, error]) =>
    svg("path", {stroke: "currentColor", style: `color:${team.colour}`, opacity: .5, class: "error",
      d: `M${x(xOf(run, step))} ${y(Math.max(share - 3 * error, 0))}V${y(Math.min(share + 3 * error, 1))}`}))));
}

function chart(key, title, shown, isBrief) {  // 0: all values are 0, and `isBrief`; null: there are no values
  const [start, end] = domain();
  let isCut = false;  // a log scale cannot show some values
  const isInside = ({x, value, low = value}) => {
    const isAbove = !state.log || low > 0;
    isCut ||= !isAbove;
    return isAbove && x >= start && x <= end;
  };
  const series = shown.filter(team => !isHidden(team)).flatMap(team => seriesOf(key, team))
    .map(one => ({...one, points: one.points.filter(isInside), raw: one.raw.filter(isInside)}))
    .filter(one => one.points.length).sort((a, b) => !!a.source - !!b.source);  // markers on top
  if (!series.length) return null;
  const values = series.flatMap(({points, raw}) =>
    [...points.flatMap(point => [point.low, point.high]), ...raw.map(point => point.value)]);
  if (isBrief && values.every(value => value === 0)) return 0;
  const ofSteps = series.flatMap(({points}) => points.map(point => point.exact ?? point.high));
  const highest = key.startsWith("time/") && !state.log ? endOf(ofSteps) : Infinity;
  const scale = scales(key, values, highest);
  const unit = UNITS.find(([keys]) => keys.test(key))?.[1] ?? key.split("/").at(-1);
  const readout = el("div", {class: "readout"}), cursor = svg("path", {stroke: "currentColor", opacity: .4});
  const chosen = svg("rect", {y: TOP, height: H - TOP - BOTTOM, fill: "currentColor", opacity: .12, width: 0});
  const picture = svg("svg", {viewBox: `0 0 ${W} ${H}`, tabindex: 0, role: "img",
    "aria-label": `${title} by ${axisName()} (arrow keys: values; Enter: samples)`},
    axes(scale, unit), series.map(one => drawing(one, scale)),
    key === "reward/audit_flawed" && !state.log ? auditBars(series, scale) : [], cursor, chosen);
  listen(picture, pointer(series, scale, cursor, readout), chosen);
  return el("figure", {"data-key": key}, el("figcaption", {}, title), picture, readout,
    isCut ? el("div", {class: "soft"}, "A log scale cannot show values of 0 or less.") : null,
    noteOfEnd(highest, ofSteps));
}

function pointer(series, scale, cursor, readout) {  // moves the cursor of a chart, and shows the values below it
  const places = unique(series.flatMap(one => one.points.map(point => point.x)));
  const valueOf = at => ({team, points, source}) => {
    const point = points.findLast(one => one.x <= at + 1e-9);  // if a run has ended, its last point
    if (!point) return null;
    const range = point.high > point.low ? ` (${show(point.low)} to ${show(point.high)})` : "";
    const fewer = point.seeds < team.runs.length ? ` of ${plural(point.seeds, "seed")}` : "";
    const hasEnded = point === points.at(-1) || !state.axis;
    const earlier = hasEnded && Math.abs(point.x - at) > 1e-9 ? ` (step ${point.step})` : "";
    return el("span", {}, source ? `${glyph(source)} ` : "", el("b", {}, show(point.exact ?? point.value)), range, fewer, earlier);
  };
  const self = {at: null, places, readout};
  self.point = wanted => {
    self.at = nearest(places, wanted);
    self.step = series.flatMap(one => one.points).find(point => point.x === self.at).step;
    cursor.setAttribute("d", `M${scale.x(self.at)} ${TOP}V${H - BOTTOM}`);
    const head = state.axis ? `${brief(self.at)} ${axisName()}` : `step ${self.at}`;
    const shown = teams().filter(team => series.some(one => one.team === team));
    readout.replaceChildren(head, ...shown.map(team => el("div", {}, square(team.colour),
      el("span", {}, team.name), series.filter(one => one.team === team).map(valueOf(self.at)))));
  };
  self.point(places.at(-1));
  drawn.push(self.point);
  return self;
}

function listen(picture, self, chosen) {  // pointing, dragging (zoom), clicking, keys
  const [start, end] = domain();
  const samples = () => location.hash = link({view: "groups", step: self.step, group: "", sample: ""});
  const pointAll = at => drawn.forEach(point => point(at));
  const placeOf = event => {
    const box = picture.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * W - LEFT) / (W - LEFT - RIGHT);
    return start + Math.min(1, Math.max(0, share)) * (end - start);
  };
  const across = at => LEFT + (at - start) / (end - start) * (W - LEFT - RIGHT);
  let pressed = null;
  picture.addEventListener("pointerdown", event => { pressed = placeOf(event); });
  picture.addEventListener("pointermove", event => {
    const at = placeOf(event);
    pointAll(at);
    if (pressed === null) return;
    build(chosen, {x: across(Math.min(at, pressed)), width: Math.abs(across(at) - across(pressed))}, []);
  });
  picture.addEventListener("pointerleave", () => { pressed = null; chosen.setAttribute("width", 0); });
  picture.addEventListener("pointerup", event => {
    const ends = unique([pressed ?? placeOf(event), placeOf(event)]);
    pressed = null;
    if (ends.length === 1 || across(ends[1]) - across(ends[0]) < 6) return samples();
    go({from: +ends[0].toPrecision(4), to: +ends[1].toPrecision(4)});
  });
  // Screen readers announce only the chart with the focus.
  picture.addEventListener("focus", () => self.readout.setAttribute("aria-live", "polite"));
  picture.addEventListener("blur", () => self.readout.removeAttribute("aria-live"));
  picture.addEventListener("keydown", event => {
    const to = self.places[self.places.indexOf(self.at) + ({ArrowLeft: -1, ArrowRight: 1}[event.key] ?? NaN)];
    if (to != null) pointAll(to);
    if (event.key === "Enter") samples();
  });
}

// ---- Histograms: a column for some steps, a row for a range of values, darker if it has more samples
const COLUMNS = 40, ROWS_OF_VALUES = 12;
const MEASURED = {reward: ["reward", sample => sample.reward], length: ["response length", sample => sample.length]};

function binsOf(values) {  // [[low, high], ...], or one bin per value if there are few values
  const different = unique(values);
  if (different.length <= 8) return different.map(value => [value, value]);
  const low = different[0], size = (different.at(-1) - low) / ROWS_OF_VALUES;
  return Array.from({length: ROWS_OF_VALUES}, (_, i) => [low + i * size, low + (i + 1) * size]);
}
function histogram(run, kind) {
  const [start, end] = domain(), [title, valueOf] = MEASURED[kind];
  const samples = run.groups.filter(group => group.split === "train").flatMap(({step, samples}) =>
    samples.map(sample => ({step, at: xOf(run, step), value: valueOf(sample)})))
    .filter(({at, value}) => value != null && at >= start && at <= end);
  if (!samples.length) return null;
  const bins = binsOf(samples.map(sample => sample.value)), columns = new Map();
  const width = (W - LEFT - RIGHT) / COLUMNS, height = (H - TOP - BOTTOM) / bins.length;
  for (const sample of samples) {
    const column = Math.min(COLUMNS - 1, Math.floor((sample.at - start) / (end - start) * COLUMNS));
    const row = bins.findIndex(([low, high], i) => sample.value <= high || i === bins.length - 1);
    if (!columns.has(column)) columns.set(column, {steps: [], rows: bins.map(() => 0)});
    columns.get(column).steps.push(sample.step);
    columns.get(column).rows[row] += 1;
  }
  const nameOf = ([low, high]) => low === high ? show(low) : `${show(low)} to ${show(high)}`;
  const cells = [...columns].flatMap(([column, {steps, rows}]) => rows.map((count, row) => {
    const [first, last] = extremes(steps);
    const when = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    return count && svg("rect", {class: "cell", x: LEFT + column * width, y: H - BOTTOM - (row + 1) * height,
      width: width + .3, height: height - .5, opacity: (.15 + .85 * count / steps.length).toFixed(2)},
      svg("title", {}, `${when}: ${count} of ${plural(steps.length, "sample")}, ${title} ${nameOf(bins[row])}`));
  }));
  const middle = row => H - BOTTOM - (row + .5) * height;
  const every = Math.ceil(bins.length / 8);
  const labels = bins.map((bin, row) => row % every ? null
    : svg("text", {x: LEFT - 24, y: middle(row) + 3}, show((bin[0] + bin[1]) / 2)));
  const scale = {x: at => LEFT + (at - start) / (end - start) * (W - LEFT - RIGHT), y: null, valueTicks: []};
  const [low, high] = extremes(samples.map(sample => sample.value));
  return el("figure", {"data-histogram": kind}, el("figcaption", {}, square(run.colour), `${run.name}: ${title}`),
    svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", style: `color:${run.colour}`, "aria-label":
      `Histogram of ${title} by ${axisName()}: ${plural(samples.length, "sample")} from ${show(low)} to ${show(high)}`},
      axes(scale, kind === "length" ? "tokens" : "reward"), labels, cells));
}

// ---- The view
function rangesOf(steps) {  // [1, 2, 3, 7] -> [[1, 3], [7, 7]]
  const ranges = [];
  for (const step of steps)
    if (ranges.at(-1)?.[1] === step - 1) ranges.at(-1)[1] = step; else ranges.push([step, step]);
  return ranges;
}
const findingView = (run, {name, steps, evidence, remedy}) => el("div", {class: "box finding"},
  square(run.colour), el("b", {}, `${run.name}: ${name}`), " at ",
  rangesOf(steps).map(([first, last], i) => [i ? ", " : `step${steps.length > 1 ? "s" : ""} `,
    el("a", {href: link(addressOf(run, {split: "train", step: last, group: ""}))},
      first === last ? first : `${first}–${last}`)]),
  el("div", {class: "soft"}, evidence), el("div", {}, "→ ", remedy));

function legend() {
  const box = team => {
    const input = el("input", {type: "checkbox", id: `show-${team.name}`});
    const toggled = one => isHidden(one) !== (one === team);
    input.checked = !isHidden(team);
    input.addEventListener("change", () => go({hide: teams().filter(toggled).map(one => one.name).join("\n")}));
    return el("label", {}, input, square(team.colour), team.name);
  };
  $("legend").replaceChildren(...teams().map(box));
}
function howToRead() {
  const sources = SOURCES.map(source => `${glyph(source)} ${source}`).join(", ");
  const lines = state.bands && HAS_SEEDS
    ? "Lines are medians over seeds, bands reach from the lowest to the highest seed."
    : "Thin lines are single steps of training, thick lines their moving average.";
  const markers = SOURCES.length ? ` Markers are held-out problems (${sources}), measured only there.` : "";
  $("how").replaceChildren(`${lines}${markers} Point at a chart, or use the arrow keys, to read values; drag to `
    + "zoom; click, or press Enter, to read the samples of a step.");
}
function renderCurves() {
  $("settings").replaceChildren(...settingsView());
  $("findings").replaceChildren(...RUNS.flatMap(run => run.findings.map(finding => findingView(run, finding))));
  for (const id of ["axis", "from", "to"]) $(id).value = state[id] ?? "";
  for (const id of ["log", "bands"]) $(id).checked = !!state[id];
  $("window").value = windowOf();
  $("band-label").hidden = !HAS_SEEDS;
  build($("whole"), {href: link({from: "", to: ""})}, []);
  $("whole").hidden = !(state.from || state.to);
  legend();
  howToRead();
  drawn = [];
  const own = [...new Set(METRICS.map(inTraining))].filter(key =>
    key.startsWith("reward/") && !(key in CHARTS) && !LESS.includes(key));
  const main = {...CHARTS, ...Object.fromEntries(own.map(key => [key, key.slice("reward/".length)]))};
  const others = METRICS.filter(key => !Object.keys(main).some(shown => belongs(key, shown)));
  // A judge in training has separate axes.
  const isJudge = team => team.runs.some(run =>
    Object.keys(run.metrics).some(name => inTraining(name) === "reward/exact"));
  const kinds = [["", teams().filter(team => !isJudge(team))], [", judges in training", teams().filter(isJudge)]];
  const draw = (id, charts, isBrief) => {
    const titles = charts.flatMap(([key, title]) => kinds.map(([suffix, shown]) =>
      [title + suffix, chart(key, title + suffix, shown, isBrief)]));
    $(id).replaceChildren(...titles.map(([, picture]) => picture).filter(Boolean));
    return titles.filter(([, picture]) => picture === 0).map(([title]) => title);
  };
  const zero = draw("main-charts", Object.entries(main), true);
  $("zero").textContent = zero.length ? `0 at every step: ${zero.join("; ")}.` : "";
  const visible = teams().filter(team => !isHidden(team)).flatMap(team => team.runs);
  const histograms = visible.flatMap(run => Object.keys(MEASURED).map(kind => histogram(run, kind))).filter(Boolean);
  $("spread-charts").replaceChildren(...histograms);
  $("spread").hidden = !histograms.length;
  $("more").ontoggle = () => draw("more-charts", $("more").open ? others.map(key => [key, key]) : []);
  $("more").ontoggle();
}
