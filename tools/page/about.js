// ---- Runs: their starts, the time of their steps, and their configuration
function settingsOf({settings: all}) {  // the line of each run above the curves
  const judges = all.genrm?.length ? all.genrm : all.router_address ?? [];
  const last = path => String(path).split("/").slice(-2).join("/");
  const withSettings = name => all[name] && [last(all[name]), all[`${name}_kwargs`]].filter(text => text && text !== "{}").join(" ");
  const values = {model: all.model && last(all.model), "LoRA rank": all.lora_rank || null,
    reward: all.reward_fn && last(all.reward_fn), judge: [judges].flat().map(last).join(", "),
    "λ": penaltyOf(all),
    advantage: withSettings("advantage"), loss: withSettings("loss"),
    "learning rate": all.lr?.toExponential(),
    "prompts × samples": all.group_size && `${all.train_batch_size} × ${all.group_size}`,
    steps: all.total_steps, seed: all.seed};
  return Object.entries(values).filter(([, value]) => value != null && value !== "");
}
function settingsView() {  // settings that all runs share are listed once
  const SHOWN = ["lora_rank", "lr", "train_batch_size", "group_size", "total_steps", "seed"];
  // Also list other numbers and switches in which the runs differ, including options of the user.
  const further = [...new Set(RUNS.flatMap(run => Object.keys(run.settings)))].filter(key =>
    !SHOWN.includes(key) && RUNS.some(run => ["number", "boolean"].includes(typeof run.settings[key]))
    && new Set(RUNS.map(run => run.settings[key])).size > 1);
  const words = RUNS.map(run => [...settingsOf(run), ...further.map(key => [key, run.settings[key] ?? "not set"])]
    .map(([name, value]) => `${name} ${value}`));
  const alike = RUNS.length > 1 ? words[0].filter(one => words.every(some => some.includes(one))) : [];
  const lineOf = (head, settings) => settings.length
    ? [el("p", {class: "soft"}, head, settings.map(text => [" · ", text]))] : [];
  return [...lineOf(el("b", {}, "all runs"), alike), ...RUNS.flatMap((run, i) => lineOf(
    [square(run.colour), el("b", {}, run.name)], words[i].filter(one => !alike.includes(one))))];
}

const timeOf = seconds => new Date(1000 * seconds).toLocaleString();
function startView({time, step, command, commit, versions, machine}) {
  const packages = Object.entries(versions).map(([name, version]) => `${name} ${version}`);
  return el("div", {class: "box"}, el("div", {}, timeOf(time), step ? `, resumed after step ${step}` : ", started"),
    el("pre", {}, command),
    el("div", {class: "soft"}, [`commit ${commit || "unknown"}`, machine, ...packages].join(" · ")));
}
function runView(run) {  // the progress of a run, its duration and its starts
  const [first, resumes] = [run.starts[0], Math.max(0, run.starts.length - 1)];
  const steps = run.totals.time.length, total = run.settings.total_steps;
  const words = [plural(steps, "step") + (total ? ` of ${total}` : ""),
    steps && `${durationOf(run.totals.time.at(-1)[1])} in steps`,
    first && run.written && `${durationOf(run.written - first.time)} from the start to the last line`,
    run.written && `last line ${timeOf(run.written)}`,
    first && (resumes ? `resumed ${plural(resumes, "time")}` : "never resumed")];
  return [el("h3", {}, square(run.colour), run.name), el("p", {}, words.filter(Boolean).join(" · ")),
    ...run.starts.map(startView)];
}

// ---- The time of a step
const PARTS = {"time/rollout": "rollout", "time/reward_wait": "waiting for rewards", "time/update": "update",
  "time/sync": "weight sync", "time/rollout_wait": "waiting for overlapped rollouts"};
const OTHER = "other";
const colourOfPart = name => `var(--part-${[...Object.values(PARTS), OTHER].indexOf(name)})`;

function partsOf(run) {  // [step, {part: seconds}] of each step, with consecutive parts
  const values = Object.fromEntries(Object.keys(PARTS).map(key => [key, new Map(run.metrics[key] ?? [])]));
  return (run.metrics["time/step"] ?? []).map(([step, whole]) => {
    // With --overlap, rollouts and rewards happen during the update of the previous step.
    const isOverlapped = values["time/rollout_wait"].has(step);
    const shown = Object.keys(PARTS).filter(key => !(isOverlapped && /rollout$|reward_wait$/.test(key)));
    const parts = Object.fromEntries(shown.map(key => [PARTS[key], values[key].get(step) ?? 0]));
    parts[OTHER] = Math.max(0, whole - sum(Object.values(parts)));
    return [step, parts];
  });
}
function timeChart(run) {
  const steps = partsOf(run), count = Math.min(60, steps.length);
  if (!count) return null;
  const names = [...Object.values(PARTS), OTHER].filter(name => steps.some(([, parts]) => parts[name] > 0));
  const bins = Array.from({length: count}, (_, i) => steps.slice(
    Math.floor(i * steps.length / count), Math.floor((i + 1) * steps.length / count)));
  const means = bins.map(bin => names.map(name => sum(bin.map(([, parts]) => parts[name] ?? 0)) / bin.length));
  const high = endOf(means.map(sum)) || 1, width = (W - LEFT - RIGHT) / count;
  const y = value => TOP + (high - Math.min(value, high)) / high * (H - TOP - BOTTOM);
  const labelled = bins.filter((_, i) => i % Math.ceil(count / 6) === 0);
  const stack = (values, i) => values.map((value, part) => {
    const below = sum(values.slice(0, part)), [first, last] = [bins[i][0][0], bins[i].at(-1)[0]];
    return svg("rect", {class: "cell", style: `color:${colourOfPart(names[part])}`, x: LEFT + i * width,
      y: y(below + value), width: .9 * width, height: y(below) - y(below + value)},
      svg("title", {}, `step ${first === last ? first : `${first} to ${last}`}: ${names[part]} ${show(value)} s`));
  });
  const totals = names.map(name => sum(steps.map(([, parts]) => parts[name] ?? 0))), whole = sum(totals) || 1;
  const words = names.map((name, i) => `${name} ${Math.round(100 * totals[i] / whole)} %`);
  return el("figure", {"data-time": run.name}, el("figcaption", {}, square(run.colour), run.name),
    svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `Seconds per step: ${words.join(", ")}`},
      ticks(0, high).map(value => [svg("path", {d: `M${LEFT} ${y(value)}H${W - RIGHT}`, stroke: "var(--line)"}),
        svg("text", {x: LEFT - 24, y: y(value) + 3}, brief(value))]),
      means.map(stack),
      labelled.map(bin => svg("text", {x: LEFT + (bins.indexOf(bin) + .45) * width, y: H - 18}, String(bin[0][0]))),
      svg("text", {x: (LEFT + W - RIGHT) / 2, y: H - 4}, "step"),
      svg("text", {transform: `translate(10 ${(TOP + H - BOTTOM) / 2}) rotate(-90)`}, "seconds")),
    noteOfEnd(high, means.map(sum)),
    el("div", {class: "readout"}, names.map((name, i) => el("span", {}, square(colourOfPart(name)), words[i],
      ` (${durationOf(totals[i])}) `))));
}

// ---- Configuration: one row per setting, one column per run
function configuration() {
  const known = RUNS.filter(run => Object.keys(run.settings).length);
  if (!known.length) return [el("p", {}, "No config.json was found.")];
  const defaultsOf = run => run.starts.at(-1)?.defaults ?? {};  // for settings that were changed
  const keys = [...new Set(known.flatMap(run => Object.keys(run.settings)))];
  const valueOf = (run, key) => key in run.settings ? textOfValue(run.settings[key]) : "not set";
  const isSet = key => known.some(run => key in defaultsOf(run));
  const differs = key => new Set(known.map(run => valueOf(run, key))).size > 1;
  const chosen = keys.filter(key => isSet(key) || differs(key)), others = keys.filter(key => !chosen.includes(key));
  const defaultOf = key => known.map(run => defaultsOf(run)[key]).find(value => value !== undefined);
  const row = key => el("tr", {}, el("th", {scope: "row"}, `--${key.replaceAll("_", "-")}`),
    known.map(run => el("td", {class: key in defaultsOf(run) ? "set" : null}, valueOf(run, key))),
    el("td", {class: "soft"}, isSet(key) ? textOfValue(defaultOf(key)) : ""));
  const table = (some, id) => el("div", {class: "table", tabindex: 0, role: "region", "aria-label": "Configuration"},
    el("table", {class: "settings", "data-rows": id}, el("thead", {}, el("tr", {}, el("th", {scope: "col"}, "setting"),
      known.map(run => el("th", {scope: "col"}, square(run.colour), run.name)), el("th", {scope: "col"}, "default"))),
      el("tbody", {}, some.map(row))));
  const heading = known.some(run => Object.keys(defaultsOf(run)).length)
    ? `Bold: differs from the default.${known.length > 1 ? " Settings that differ between runs are also listed." : ""}`
    : "The runs do not say which settings differ from the defaults.";
  return [el("p", {class: "soft"}, heading), chosen.length ? table(chosen, "chosen") : null,
    el("details", {open: chosen.length ? null : ""}, el("summary", {}, `${plural(others.length, "setting")}: the `
      + `${chosen.length ? "others" : "whole configuration"}`), table(others, "others"))].filter(Boolean);
}

function renderAbout() {
  $("starts").replaceChildren(...RUNS.flatMap(runView));
  $("spent").replaceChildren(...RUNS.map(timeChart).filter(Boolean));
  $("configuration").replaceChildren(...configuration());
}

// ---- The page as described by its address
function render() {
  state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const {runs, colour, dash} of teams()) runs.forEach(run => Object.assign(run, {colour, dash}));
  const views = {curves: renderCurves, groups: renderGroups, samples: renderSamples, changed: renderChanged,
    about: renderAbout};
  const view = Object.hasOwn(views, state.view) ? state.view : "curves", focus = document.activeElement.id;
  for (const name of Object.keys(views)) {
    $(name).hidden = name !== view;
    $(`tab-${name}`).href = link({view: name});
    if (name === view) $(`tab-${name}`).setAttribute("aria-current", "page");
    else $(`tab-${name}`).removeAttribute("aria-current");
  }
  $("choose").hidden = view !== "groups" && view !== "samples";
  views[view]();
  if (focus) $(focus)?.focus({preventScroll: true});  // the focused element may have been redrawn
}

document.title = $("title").textContent = TITLE;
$("notes").append(...RUNS.flatMap(run => run.notes).map(note => el("p", {class: "note"}, note)));
$("run").append(...options(RUNS.map(run => [run.name, run.name])));
$("filter").append(...options(Object.entries(FILTERS)));
$("sort").append(...options(Object.entries(SORTS).map(([value, [name]]) => [value, name])));
for (const id of ["window", "from", "to"]) $(id).addEventListener("change", () => go({[id]: $(id).value}));
$("axis").addEventListener("change", () => go({axis: $("axis").value, from: "", to: ""}));
for (const id of ["log", "bands"])
  $(id).addEventListener("change", () => go({[id]: $(id).checked ? 1 : "", ...id === "bands" ? {hide: ""} : {}}));
const place = {group: "", sample: "", page: ""};  // reset when other samples are chosen
for (const id of ["run", "split", "filter", "sort", "problem", "status", "source", "first", "last"])
  $(id).addEventListener("change", () => go({[id]: $(id).value, ...place}));
$("q").addEventListener("input", () => go({q: $("q").value, ...place}));
addEventListener("hashchange", render);
render();

// ---- A served page reloads when its runs have written more data. The address keeps the current view. While the
// user types or the tab is hidden, the page waits.
async function follow() {
  const answer = await fetch("version").catch(() => null);  // the server may have ended
  const isNew = answer?.ok && await answer.text() !== LIVE;
  const isTyping = ["search", "number"].includes(document.activeElement.type);
  if (isNew && !document.hidden && !isTyping) location.reload();
}
if (LIVE) setInterval(follow, 3000);
