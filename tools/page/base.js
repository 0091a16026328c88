"use strict";
// The page of view_run.py. This file has helpers, the state in the address, and the meaning of lines in samples.jsonl.
// All data passes through append(), which turns it into text, or through the encoding of a link.
const $ = id => document.getElementById(id);
const {title: TITLE, live: LIVE, runs: RUNS} = JSON.parse($("data").textContent);
const COLOURS = 6;  // --run-0, --run-1, ... in page.css; further runs have dashed lines
const colourOf = index => ({colour: `var(--run-${index % COLOURS})`, dash: index < COLOURS ? null : "5 3"});
RUNS.forEach((run, index) => Object.assign(run, colourOf(index)));
let state = {};  // the state in the address after the #

// ---- Helpers
function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter(child => child != null && child !== false));
  return node;
}
const el = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
const SVG = "http://www.w3.org/2000/svg";
const svg = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);
const square = colour => el("i", {class: "swatch", style: `color:${colour}`});
const options = pairs => pairs.map(([value, name]) => el("option", {value}, name));
const show = value => value == null ? "–" : String(+value.toPrecision(3)).replace("-", "−");
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 3});
const brief = value => Math.abs(value) < 1e4 ? show(value) : compact.format(value);
const signed = value => (value > 0 ? "+" : "") + show(value);
function textOfValue(value) {
  if (typeof value === "string") return value;
  const isSmall = typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3;
  return isSmall ? value.toExponential() : JSON.stringify(value);
}
const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
function durationOf(seconds) {
  if (seconds < 90) return `${show(seconds)} s`;
  return seconds < 5400 ? `${show(seconds / 60)} min` : `${show(seconds / 3600)} h`;
}
const sum = values => values.reduce((total, value) => total + value, 0);
const unique = values => [...new Set(values)].sort((a, b) => a - b);
const nearest = (values, to) =>
  values.reduce((a, b) => Math.abs(b - to) < Math.abs(a - to) ? b : a, values[0]);
function extremes(values) {  // [lowest, highest], even if there are too many values for Math.min(...values)
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}
const link = changes =>
  "#" + new URLSearchParams(Object.entries({...state, ...changes}).filter(([, value]) => value !== ""));
const go = changes => location.replace(link(changes));

// ---- What a run did, according to its config.json
function penaltyOf({reward_fn, reward_kwargs}) {  // λ; null: the judge only adds metrics; undefined: unknown
  const isFapo = /:compute_score_fapo(_oracle)?$/.test(reward_fn);
  // Python also reads Infinity and NaN, which are not JSON. They become strings.
  const json = (reward_kwargs ?? "{}").replace(/"(?:\\.|[^"\\])*"|-?Infinity|NaN/g,
    word => word.startsWith('"') ? word : `"${word}"`);
  const {penalty = isFapo ? 1 : undefined} = JSON.parse(json);
  return penalty;
}
const advantageOf = run => run.settings.advantage ?? "grpo";

// ---- From a line of samples.jsonl to what the page shows
const NO_VERDICT = ["truncated", "unparsable", "http_error", "timeout"];  // failures of a request to the judge
const MARKS = {good: "✓", flawed: "!", bad: "✗", silent: "?", plain: "•"};  // page.css has a colour for each

const isRight = ({acc}) => acc === true || acc === 1;

function verdictOf(reward, status, info, judge, oracle, hasTruth) {  // [kind, words]
  const says = flawed => flawed == null ? "not judged" : flawed ? "flawed" : "sound";
  if (reward == null) return ["silent", `no verdict: ${info.genrm_status ?? status}`];
  if (info.acc == null) return ["plain", "scored"];
  if ("exact" in info) {
    if (info.exact) return ["good", "verdict right"];
    return isRight(info) ? ["flawed", "right that it is flawed, other paragraph"] : ["bad", "verdict wrong"];
  }
  // A game has no ground truth, and so no right answer.
  if (!isRight(info)) return ["bad", hasTruth ? "wrong answer" : "not solved"];
  let kind = "good";
  if (judge == null && oracle == null) kind = "plain";
  if (judge || oracle) kind = "flawed";
  const byOracle = oracle == null || oracle === judge ? "" : ` (oracle: ${says(oracle)})`;
  return [kind, `${hasTruth ? "right answer" : "solved"}, ${says(judge)}${byOracle}`];
}

function understand(line, hasTruth) {
  const {reward_extra_info: info, reward_score: reward, status, oracle} = line, asked = info.genrm_status;
  // Whether judge and oracle say "flawed". A judge in training names a paragraph, and `gt` is the correct one.
  const [judged, truly] = "exact" in info && "gt" in info
    ? [info.pred == null ? null : info.pred !== -1, info.gt !== -1]
    : [info.flawed_positive, info.oracle_flawed_positive];
  const [kind, verdict] = verdictOf(reward, status, info, judged, truly, hasTruth);
  const flags = {judge: judged, oracle: truly, wrong: judged != null && truly != null && judged !== truly,
    odd: reward > 0 && info.acc != null && !isRight(info) && !("exact" in info),
    silent: reward == null || NO_VERDICT.includes(asked), cut: line.clipped || asked === "truncated"};
  const {score = reward, critique, overlong_penalty: penalty = 0, terms, ...rest} = info;
  const isSum = terms && !Array.isArray(terms) && Object.values(terms).every(Number.isFinite);
  // The position of the first wrong step comes from the judge if one was queried, else from the reward function. A
  // box in a critique need not be a position: only the reward function knows what the judge's response means.
  const named = asked === undefined || asked === "ok" ? info.first_wrong ?? null : null;
  return {kind, verdict, flags: Object.keys(flags).filter(flag => flags[flag]), oracle, judge: named,
    namedBy: asked ? "the judge" : "the reward function",
    // If there are several turns, each is shown as a paragraph, and first_wrong is the index of a turn.
    paragraphs: line.turns?.map(turn => String(turn.text).replace(/^\n+|\n+$/g, ""))
      ?? line.response.split("\n\n").map(text => text.trim()).filter(Boolean),
    writers: line.turns?.map(turn => turn.who), turnTokens: line.turns?.map(turn => turn.tokens),
    critique: critique ? textOfValue(critique) : null, score, reward, status: String(status),
    penalty: +penalty || 0,  // A reward function may return any value under this name.
    terms: isSum ? terms : null, rollout: line.extra_info ?? {},
    // Paragraphs may have separate advantages (recipes/advantages.py: vppo, steps, spare_good_prefix).
    advantage: line.advantage, advantages: line.turns ? null : line.paragraph_advantages,
    tokenAdvantages: line.token_advantages, length: line.response_length,
    clipped: line.clipped, seconds: line.seconds, info: isSum || !terms ? rest : {...rest, terms}, line};
}
for (const run of RUNS) {
  for (const group of run.groups) {
    const {prompt, ground_truth: truth, data_source: source, samples} = group;
    const hasTruth = truth != null && truth !== "";
    Object.assign(group, {prompt: textOfValue(prompt), truth: hasTruth ? textOfValue(truth) : "",
      source: String(source), samples: samples.map(line => understand(line, hasTruth))});
  }
}

function aboutOf({source, truth, file, row, seed}) {  // where a group comes from
  const parts = [source, truth && `ground truth: ${truth}`, row != null && `row ${row} of ${file}`,
    seed != null && `seed ${seed}`];
  return parts.filter(Boolean).join("; ");
}

function termsOf({info, score, penalty, terms}, group, run) {  // [name, value] of the summands of the reward
  const rule = info.acc == null ? NaN : isRight(info) ? 1 : -1, rest = score - rule;
  const withRest = (parts, name, value) =>
    [...parts, ...Math.abs(value) > 1e-9 ? [[name, value]] : [], ["length penalty", penalty]];
  if (terms) return withRest(Object.entries(terms), "other terms", score - sum(Object.values(terms)));
  const ofGroup = Object.keys(group.verdict).length, isJudge = "exact" in info;
  if (ofGroup || !(rest === 0 || (isJudge || "flawed_positive" in info) && info.acc != null))
    return [[ofGroup ? "group" : "score", score], ["length penalty", penalty]];  // the summands are unknown
  // A judge in training loses the distance between its paragraph and the correct one.
  if (isJudge) return withRest([["flawed or not", rule]], "distance", rest);
  if (!info.flawed_positive) return withRest([["rule", rule]], "other terms", rest);
  // A flawed positive loses λ from the run's configuration, but an evaluation may only measure. The rest comes from
  // other summands.
  let finder = run.settings.reward_fn?.endsWith("_oracle") ? "the oracle" : "the reward function";
  if ("genrm_status" in info) finder = "the judge";
  const flaw = `flaw found by ${finder}`, isFree = rest === 0 && group.split === "val";
  const cost = isFree ? 0 : penaltyOf(run.settings);
  if (cost === undefined) return withRest([["rule", rule]], `${flaw}, and other terms`, rest);
  return withRest([["rule", rule], [flaw, -(cost ?? 0)]], "other terms", rest + (cost ?? 0));
}

// ---- Filters: the samples selected by the address
const FILTERS = {"": "all samples", judge: "flagged as flawed", oracle: "flawed by the oracle",
  wrong: "flag and oracle disagree", odd: "wrong answer, reward above 0", silent: "no verdict", cut: "truncated"};
const CHOSEN = ["filter", "status", "source", "first", "last", "q"];  // reset by "clear filters"

const textOf = (group, {paragraphs, critique, verdict, info}) =>
  [group.prompt, group.source, ...Object.values(group.verdict), ...paragraphs, critique, verdict, info.error]
    .join("\n").toLowerCase();
const inRange = ({step}) => step >= +(state.first || 0) && step <= +(state.last || Infinity);
const matchesGroup = (group, split) => group.split === split && inRange(group)
  && (!state.source || group.source === state.source);
const matches = (group, sample) => (!state.filter || sample.flags.includes(state.filter))
  && (!state.status || sample.status === state.status)
  && (!state.q || textOf(group, sample).includes(state.q.toLowerCase()));
const addressOf = (run, {split, step, group}, sample = "") =>
  ({view: "groups", run: run.name, split, step, group, sample});

function showChoice() {  // show the run and the split of the address, also in the controls
  const run = RUNS.find(one => one.name === state.run) ?? RUNS.find(one => one.groups.length) ?? RUNS[0];
  const split = state.split ?? (run.groups.some(group => group.split === "train") ? "train" : "val");
  const {filter = "", q = "", sort = "", status = "", source = "", first = "", last = ""} = state;
  const known = (values, chosen) => options([["", "all"], ...[...new Set([...values, chosen])].filter(Boolean)
    .sort().map(value => [value, value])]);
  $("status").replaceChildren(...known(run.groups.flatMap(({samples}) => samples.map(one => one.status)), status));
  $("source").replaceChildren(...known(run.groups.map(group => group.source), source));
  for (const [id, value] of Object.entries({run: run.name, split, filter, q, sort, status, source, first, last}))
    if ($(id).value !== value) $(id).value = value;
  build($("reset"), {href: link(Object.fromEntries(CHOSEN.map(key => [key, ""])))}, []);
  $("reset").hidden = !CHOSEN.some(key => state[key]);
  return [run, split];
}
