// ---- The list of all samples
const SORTS = {__proto__: null, "": ["first step first", ({group}) => group.step],
  newest: ["last step first", ({group}) => -group.step],
  low: ["lowest reward first", ({sample}) => sample.reward ?? Infinity],
  high: ["highest reward first", ({sample}) => -(sample.reward ?? -Infinity)],
  down: ["lowest advantage first", ({sample}) => sample.advantage ?? Infinity],
  up: ["highest advantage first", ({sample}) => -(sample.advantage ?? -Infinity)],
  longest: ["longest first", ({sample}) => -sample.length]};
const ROWS = 100;  // drawing all samples of a long run at once would take seconds

function allSamples(run, split) {  // matching samples in the selected order
  const found = run.groups.filter(group => matchesGroup(group, split)).flatMap(group =>
    group.samples.map((sample, i) => ({group, sample, i})).filter(one => matches(group, one.sample)));
  const valueOf = (SORTS[state.sort] ?? SORTS[""])[1];
  return found.map(one => [valueOf(one), one]).sort(([a], [b]) => a < b ? -1 : +(a > b)).map(([, one]) => one);
}

function rowOf(run, {group, sample, i}) {
  const texts = [group.source, group.prompt.slice(0, 90), sample.paragraphs.join(" ").slice(0, 120)];
  const address = link(addressOf(run, group, i));
  const row = el("tr", {}, el("td", {}, el("a", {href: address}, `${group.step}, sample ${i}`)),
    el("td", {}, chip(sample)), el("td", {class: "number"}, show(sample.reward)),
    el("td", {class: "number", style: tint(sample.advantage)}, show(sample.advantage)),
    el("td", {class: "number"}, sample.length), texts.map(text => el("td", {}, text)));
  row.addEventListener("click", () => { location.hash = address; });  // for the mouse; the keyboard uses the link
  return row;
}

function renderSamples() {
  const [run, split] = showChoice(), found = allSamples(run, split);
  const pages = Math.max(1, Math.ceil(found.length / ROWS));
  const page = Math.min(Math.max(0, Math.trunc(+state.page) || 0), pages - 1);
  $("found").textContent = `${plural(found.length, "sample")}, page ${page + 1} of ${pages}`;
  for (const [id, to] of [["before", page - 1], ["after", page + 1]]) {
    build($(id), {href: link({page: Math.max(to, 0)})}, []);
    $(id).hidden = to < 0 || to >= pages;
  }
  $("rows").replaceChildren(...found.slice(page * ROWS, (page + 1) * ROWS).map(one => rowOf(run, one)));
  $("download").onclick = () => {  // created on demand, because a run can have 20,000 samples
    const lines = found.map(({group, sample, i}) => JSON.stringify({run: run.name, step: group.step, split,
      group: group.group, sample: i, data_source: group.source, prompt: group.prompt,
      ground_truth: group.ground_truth, ...sample.line}) + "\n");
    $("download").href = URL.createObjectURL(new Blob(lines, {type: "application/jsonl"}));
  };
  $("download").href ||= "#";
}

// ---- Groups and the samples in them
let current = {};  // the visible group and sample
function neighbour(by) {  // the address of the next or previous matching sample, across all steps
  const [run, split] = showChoice(), found = allSamples(run, split);
  const at = found.findIndex(one => one.group === current.group && one.i === current.chosen);
  const to = found[at + by];
  return to ? addressOf(run, to.group, to.i) : null;
}
addEventListener("keydown", event => {
  const isTyping = ["INPUT", "SELECT"].includes(event.target.tagName);
  const by = {j: 1, k: -1}[event.key];
  if (!by || state.view !== "groups" || isTyping || event.ctrlKey || event.metaKey) return;
  const to = neighbour(by);
  if (to) go(to);
});

const chip = ({kind, verdict}) => el("span", {class: "chip", style: `color:rgb(var(--${kind}))`},
  `${MARKS[kind]} `, verdict);
function tint(advantage) {  // blue above 0, red below 0, no colour for 0 or without an advantage
  if (!advantage) return "";
  const strength = (.12 + .14 * Math.min(Math.abs(advantage), 2)).toFixed(2);
  return `background:rgb(var(--${advantage > 0 ? "good" : "bad"}) / ${strength})`;
}
function changes({advantages, advantage}) {  // [paragraph, advantage] wherever the advantage changes
  const each = advantages ?? [advantage];
  return each.map((own, i) => [i, own]).filter(([i, own]) => i === 0 || own !== each[i - 1]);
}
const bars = sample => changes(sample).map(([i, own]) => el("span", {class: "advantage", style: tint(own)},
  own == null ? "no advantage" : `${i ? "then" : "advantage"} ${signed(own)}`));

function solution(sample) {
  const {paragraphs, writers, judge, oracle, advantages, advantage, critique, namedBy} = sample;
  const starts = changes({advantages, advantage}).map(([i]) => i);
  const missing = oracle >= paragraphs.length ? ["(a paragraph is missing)"] : [];
  return el("ol", {start: 0}, [...paragraphs, ...missing].map((text, i) => {
    const names = [judge === i && namedBy, oracle === i && "the oracle"].filter(Boolean).join(" and ");
    const own = advantages == null ? null : advantages[i] ?? advantage;  // missing: the end token's advantage
    const isObservation = writers && writers[i] !== "policy";
    const kinds = [names && "named", isObservation && "observation"].filter(Boolean).join(" ");
    return el("li", {class: kinds, style: own == null ? null : tint(own)},
      writers ? el("div", {class: "who"}, writers[i]) : null, text,
      names && el("div", {class: "why"}, `← ${names}: first wrong ${writers ? "turn" : "paragraph"}`),
      judge === i && critique ? el("pre", {class: "critique", tabindex: 0, "aria-label": "critique"}, critique) : null,
      own != null && starts.includes(i) ? el("div", {class: "who"}, `advantage ${signed(own)}`) : null);
  }));
}

// The tokens of a sample, with the colours of their advantages, drawn on demand.
function heatLine(sample, open) {
  const {length, tokenAdvantages, advantage, writers, turnTokens} = sample;
  if (!length || advantage == null) return null;
  const runs = tokenAdvantages ?? [[length, advantage]];  // [number of tokens, their advantage]
  const owners = writers ? writers.map((who, i) => [turnTokens[i], who]) : [[length, "policy"]];
  const pieces = [];
  let first = 0, ends = [0, 0];
  const places = [0, 0];
  while (first < length && places[0] < runs.length && places[1] < owners.length) {
    const [[count, value], [tokens, who]] = [runs[places[0]], owners[places[1]]];
    const last = Math.min(ends[0] + count, ends[1] + tokens);
    if (last > first) pieces.push({first, last, value, who});
    if (last === ends[0] + count) { ends[0] = last; places[0] += 1; }
    if (last === ends[1] + tokens) { ends[1] = last; places[1] += 1; }
    first = last;
  }
  const draw = ({first, last, value, who}) => {
    const isOwn = who === "policy", about = isOwn ? `advantage ${signed(value)}` : `${who}, not learnt from`;
    return el("span", {class: isOwn ? "learnt" : "unlearnt", style: `flex:${last - first};${isOwn ? tint(value) : ""}`,
      title: `tokens ${first} to ${last - 1}: ${about}`});
  };
  const row = el("div", {class: "heat", role: "img", "aria-label": pieces.map(({first, last, value, who}) =>
    `tokens ${first} to ${last - 1}: ${who === "policy" ? signed(value) : who}`).join("; ")}, pieces.map(draw));
  const details = el("details", {id: "heat"}, el("summary", {}, "Advantage of each token"), row,
    el("div", {class: "key"}, `${plural(length, "token")}; blue: more likely, red: less likely, `
      + "hatched: written by a tool or user, not learnt from. Point at a part to read its value."));
  details.open = open;
  return details;
}

function renderGroups() {
  const [run, split] = showChoice();
  const found = run.groups.filter(group =>
    matchesGroup(group, split) && group.samples.some(sample => matches(group, sample)));
  const steps = unique(found.map(group => group.step)), step = nearest(steps, +(state.step ?? 0));
  const i = steps.indexOf(step);
  Object.assign($("step"), {max: Math.max(steps.length - 1, 0), value: i, disabled: !found.length,
    oninput: () => go({step: steps[$("step").value], group: "", sample: ""})});
  $("step").setAttribute("aria-valuetext", $("at").value = String(step ?? "none"));
  for (const [id, to] of [["previous", steps[i - 1]], ["next", steps[i + 1]]]) {
    build($(id), {href: link({step: to ?? step ?? "", group: "", sample: ""})}, []);
    $(id).hidden = to == null;
  }
  const number = sum(found.map(group => group.samples.filter(sample => matches(group, sample)).length));
  const {train_batch_size: prompts, group_size: size, dynamic_sampling: isRefilled} = run.settings;
  const isKnown = split === "train" && size && !isRefilled;
  $("count").textContent = `${plural(number, "logged sample")} in ${plural(found.length, "group")} at `
    + plural(steps.length, "step") + (isKnown ? `; a step has ${plural(prompts * size, "sample")}` : "");
  const here = found.filter(group => group.step === step);
  const group = here.find(one => String(one.group) === state.group) ?? here[0];
  const mark = ({kind, verdict}) => el("span", {class: "mark", style: `color:rgb(var(--${kind}))`, title: verdict,
    role: "img", "aria-label": verdict}, MARKS[kind]);
  $("list").replaceChildren(...here.map(one => el("a",
    {id: `group-${one.group}`, "aria-current": one === group, href: link(addressOf(run, one))},
    el("div", {}, one.prompt), one.samples.map(mark))));
  const chosen = group?.samples[+state.sample] ? +state.sample
    : group?.samples.findIndex(sample => matches(group, sample));
  const isOpen = $("heat")?.open ?? false;
  current = {group, chosen};
  $("group").replaceChildren(...group ? groupView(run, group, chosen) : ["No sample matches the filters."]);
  $("sample").replaceChildren(...group ? sampleView(run, group, chosen, isOpen) : []);
}

function statistics(group) {
  const rewards = group.samples.map(sample => sample.reward).filter(reward => reward != null);
  const mean = sum(rewards) / rewards.length;  // NaN if no sample has a verdict
  const squares = rewards.map(reward => (reward - mean) ** 2);
  return [mean, rewards.length > 1 ? Math.sqrt(sum(squares) / (rewards.length - 1)) : NaN];
}

function verdictView(verdict) {  // what a group function reported for the whole group: words and longer texts
  const isShort = ([, text]) => text.length < 60 && !text.includes("\n"), short = verdict.filter(isShort);
  return [
    ...short.length ? [el("p", {}, el("b", {}, "The group's verdict: "),
      short.map(([key, text]) => `${key} ${text}`).join(" · "))] : [],
    ...verdict.filter(one => !isShort(one)).map(([key, text]) =>
      el("div", {}, el("b", {}, `The group's ${key}`), el("pre", {}, text)))];
}

const ADVANTAGES = {
  grpo: "Advantage = (reward − mean) / standard deviation.",
  dr_grpo: "Advantage = reward − mean."};

function groupView(run, group, chosen) {
  const [mean, std] = statistics(group), name = advantageOf(run);
  const silence = std === 0 ? " All rewards are equal: no learning signal." : "";
  const formula = ADVANTAGES[name] ?? `Advantages: see --advantage ${name}.`;
  let about = Number.isNaN(mean) ? "No sample has a verdict." : "";
  if (std >= 0) about = `Mean reward ${show(mean)}, standard deviation ${show(std)}. ${formula}${silence}`;
  return [
    el("h2", {}, square(run.colour),
      `${run.name}, step ${group.step}: one prompt, G = ${group.samples.length}`),
    el("pre", {}, group.prompt), el("p", {class: "soft"}, aboutOf(group)),
    ...verdictView(Object.entries(group.verdict).map(([key, value]) => [key, textOfValue(value)])),
    el("p", {}, about),
    el("div", {class: "cards"}, group.samples.map((sample, i) => el("a",
      {id: `card-${i}`, "aria-current": i === chosen, class: matches(group, sample) ? "card" : "card dim",
        href: link(addressOf(run, group, i))},
      `sample ${i}: reward `, el("b", {}, show(sample.reward)),
      bars(sample),
      chip(sample), el("div", {class: "soft"}, plural(sample.length, "token"), sample.clipped ? ", truncated" : "")))),
  ];
}

function advantageWords(run, group, sample) {
  const [mean, std] = statistics(group);
  const formula = {grpo: std > 0 ? `(${show(sample.reward)} − ${show(mean)}) / ${show(std)} = ` : "",
    dr_grpo: `${show(sample.reward)} − ${show(mean)} = `}[advantageOf(run)] ?? "";
  const each = sample.advantages && changes(sample).length > 1
    ? `; of the paragraphs ${sample.advantages.map(signed).join(", ")}` : "";
  if (sample.advantage != null) return formula + signed(sample.advantage) + each;
  if (group.split === "val") return "none: a held-out problem";
  return sample.reward == null ? "none: without a verdict a sample has no part in the loss"
    : "none: the group was dropped, as it has no learning signal";
}

function sampleView(run, group, chosen, isOpen) {
  const sample = group.samples[chosen], {genrm_status: asked, genrm_error} = sample.info;
  const error = textOfValue(genrm_error ?? "");
  let silence = `The critique was not stored; pass --reward-kwargs '{"keep_critique": true}' to store it.`;
  if (!asked || asked === "skipped") silence = "No judge was queried.";
  if (Object.keys(group.verdict).length) silence = "The group's verdict is above.";
  const isSilent = asked === undefined && !error && !sample.critique && !Object.keys(group.verdict).length;
  const isInside = sample.critique && sample.judge != null && sample.judge in sample.paragraphs;
  const terms = sample.reward == null ? [] : termsOf(sample, group, run);
  const longest = Math.max(...terms.map(([, value]) => Math.abs(value))) || 1;
  const bar = value => `background:linear-gradient(to right, rgb(var(--${value > 0 ? "good" : "bad"}) / .3) `
    + `${Math.round(100 * Math.abs(value) / longest)}%, transparent 0)`;
  const rows = [["verdict", chip(sample)],
    ...terms.map(([name, value]) => [name, signed(value), value ? bar(value) : null]),
    ["reward", sample.reward == null ? "none: no verdict" : signed(sample.reward)],
    ["advantage", el("span", {style: tint(sample.advantage)}, advantageWords(run, group, sample))],
    ["status", sample.status + (sample.seconds == null ? "" : ` in ${show(sample.seconds)} s`)]];
  const fieldsOf = info => Object.entries(info).filter(([, value]) => value !== "")
    .map(([name, value]) => [name, textOfValue(value)]);
  const table = (heading, rows) => rows.length ? [el("h2", {}, heading), el("table", {}, rows.map(
    ([name, value, style]) => el("tr", {}, el("th", {scope: "row"}, name), el("td", {style}, value))))] : null;
  const moves = [["k", "previous sample", neighbour(-1)], ["j", "next sample", neighbour(1)]];
  const own = Object.entries(addressOf(run, group, chosen));
  return [
    el("div", {class: "bar"},
      el("h2", {}, `Sample ${chosen}, ${sample.writers ? "turn by turn" : "paragraph by paragraph"}`),
      moves.map(([key, name, to]) => to && el("a", {href: link(to), "aria-keyshortcuts": key}, `${name} (${key})`)),
      el("a", {href: "#" + new URLSearchParams(own)}, "link to this sample")),
    el("div", {}, el("div", {class: "box"}, solution(sample)), heatLine(sample, isOpen),
      isInside || isSilent ? null : [el("h2", {}, "The judge's critique"), el("pre", {}, sample.critique ?? (error || silence))]),
    el("div", {}, table("Where the reward came from", rows),
      table("What else the reward function returned", fieldsOf(sample.info)),
      table("What the rollout function stored (extra_info)", fieldsOf(sample.rollout))),
  ];
}

// ---- Before and after: the same held-out problem in the first, a middle and the last evaluation
const idOf = group => `${group.source}: ${group.prompt}`;
const EVALUATED = RUNS.map(run => {
  const groups = run.groups.filter(group => group.split === "val");
  const steps = unique(groups.map(group => group.step));
  const looks = unique([0, .5, 1].map(share => nearest(steps, share * steps.at(-1))));
  return {run, groups, looks, found: new Map(groups.map(group => [`${group.step} ${idOf(group)}`, group]))};
});
const PROBLEMS = [...new Set(EVALUATED.flatMap(({groups}) => groups.map(idOf)))].map((id, number) => {
  const rows = EVALUATED
    .map(({run, looks, found}) => ({run, groups: looks.map(step => found.get(`${step} ${id}`))}))
    .filter(row => row.groups.some(Boolean));
  const kinds = new Set(rows.flatMap(row => row.groups.map(group => group?.samples[0].kind)));
  return {id, number, rows, variety: rows.length + kinds.size};
}).sort((a, b) => b.variety - a.variety);

function renderChanged() {
  const problem = PROBLEMS.find(one => String(one.number) === state.problem) ?? PROBLEMS[0];
  $("problem").replaceChildren(...options(PROBLEMS.map(({id, number}) => [number, id.slice(0, 90)])));
  if (!problem) return $("answers").replaceChildren("No run has been evaluated yet.");
  $("problem").value = problem.number;
  const group = problem.rows[0].groups.find(Boolean);
  const answer = (run, group) => [
    el("a", {href: link({...addressOf(run, group, 0), filter: "", q: ""})}, `step ${group.step}`), " ",
    chip(group.samples[0]), solution(group.samples[0])];
  $("answers").replaceChildren(el("pre", {}, group.prompt), el("p", {class: "soft"}, aboutOf(group)),
    el("table", {class: "changed"}, problem.rows.map(({run, groups}) => el("tr", {},
      el("th", {}, square(run.colour), run.name),
      groups.map(group => el("td", {}, group ? answer(run, group) : "not on this page"))))));
}
