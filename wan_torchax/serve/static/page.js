// The page has no state of its own that matters: videos live on the server, and a reload finds them all.
"use strict";

const find = (selector, place = document) => place.querySelector(selector);
const all = (selector, place = document) => [...place.querySelectorAll(selector)];
const form = find("#form");
const files = {};  // by field: a list of File

// ---------------------------------------------------------------- asking

async function ask(path, options) {
  const answer = await fetch(path, options);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error.message);
  return content;
}

function delay(milliseconds, action) {
  let timer;
  return () => { clearTimeout(timer); timer = setTimeout(action, milliseconds); };
}

const seconds = (value) => value < 90 ? `${value < 10 ? value.toFixed(1) : Math.round(value)} s`
  : value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;

// ---------------------------------------------------------------- the form

function fields() {
  const values = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
  if (!values.size) values.size = find("#other-size").value.trim();
  if (!values.size) delete values.size;
  values.negative_prompt ??= "";
  return values;
}

function body(values) {
  const data = new FormData();
  for (const [name, value] of Object.entries(values)) data.append(name, value);
  for (const [name, list] of Object.entries(files)) for (const file of list) data.append(name, file);
  return data;
}

function showError(message) {
  find("#error").hidden = !message;
  find("#error").textContent = message ?? "";
}

let asked = 0;
const estimate = delay(350, async () => {
  const values = fields(), number = ++asked, place = find("#estimate");
  values.prompt ||= "a prompt";
  try {
    const plan = await ask("/page/estimate", { method: "POST", body: body(values) });
    if (number !== asked) return;
    if (plan.problem) throw new Error(plan.problem);
    const parts = [`${plan.width} × ${plan.height}, ${plan.frames} frames, ${plan.video_seconds.toFixed(1)} s of video`];
    if (plan.source === "measured") parts.push(`about ${seconds(plan.seconds)} to make (${seconds(plan.step_seconds)} a step)`);
    if (plan.source === "floor") parts.push(`at least ${seconds(plan.seconds)} to make`);
    if (plan.ahead) parts.push(`${plan.ahead} before it`);
    place.replaceChildren(...parts.flatMap((text, index) => {
      const part = document.createElement(text.includes("to make") ? "b" : "span");
      part.textContent = text;
      return index ? [" · ", part] : [part];
    }));
    showError();
  } catch (error) {
    if (number !== asked) return;
    place.textContent = "";
    showError(error.message);
  }
});

function remember() {
  localStorage.setItem("form", JSON.stringify(fields()));
  estimate();
}

function fill(values) {
  for (const [name, value] of Object.entries(values)) {
    const field = form.elements[name];
    if (value === null || value === undefined || name === "size" || !field) continue;
    field.value = value;
    if (field.closest("details") && field.value !== field.defaultValue) field.closest("details").open = true;
  }
  if (values.size) {
    const radio = find(`input[name=size][value="${CSS.escape(values.size)}"]`) ?? find("input[name=size][value='']");
    radio.checked = true;
    find("#other-size").value = radio.value ? "" : values.size;
  }
  showOther();
  remember();
}

function showOther() {
  find("#other-size").hidden = fields().size === find("input[name=size]:checked").value;
  if (find("input[name=size]:checked").value === "") find("#other-size").hidden = false;
}

form.addEventListener("input", () => { showOther(); remember(); });
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = find("#run");
  button.disabled = true;
  try {
    // A key of its own for every press: a repeated request, after a lost answer, makes no second video.
    const headers = { "Idempotency-Key": `${Date.now()}-${Math.random()}` };
    await ask("/v1/videos", { method: "POST", body: body(fields()), headers });
    showError();
    say("Added to the queue");
    if (innerWidth < 900) find("#queue-title").scrollIntoView({ behavior: "smooth" });
  } catch (error) {
    showError(error.message);
  } finally {
    button.disabled = false;
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.contains(event.target)) form.requestSubmit();
});
find("#dice").addEventListener("click", () => fill({ seed: Math.floor(Math.random() * 2 ** 32) }));

for (const shape of all(".shape")) {
  const [width, height] = shape.dataset.size.split("x").map(Number), scale = 15 / Math.max(width, height);
  shape.style.width = `${width * scale}px`;
  shape.style.height = `${height * scale}px`;
}

// ---------------------------------------------------------------- files

for (const drop of all(".drop")) {
  const input = find("input", drop), image = find("img", drop), words = find("span", drop), remove = find(".remove", drop);
  const usual = words.innerHTML;
  const take = (list) => {
    const chosen = [...list].slice(0, input.multiple ? 16 : 1), picture = chosen.find((file) => file.type.startsWith("image/"));
    if (image.src) URL.revokeObjectURL(image.src);
    if (chosen.length) files[drop.dataset.key] = chosen; else delete files[drop.dataset.key];
    image.hidden = !picture;
    remove.hidden = !chosen.length;
    if (picture) image.src = URL.createObjectURL(picture);
    if (chosen.length) words.textContent = chosen.map((file) => file.name).join(", "); else words.innerHTML = usual;
    input.value = "";
    estimate();
  };
  input.addEventListener("change", () => { if (input.files.length) take(input.files); });
  remove.addEventListener("click", () => take([]));
  drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files.length) take(event.dataTransfer.files);
  });
}

// ---------------------------------------------------------------- the queue

const WORDS = {
  queued: "waiting", loading: "loading weights", compiling: "compiling", encoding: "reading the prompt",
  denoising: "denoising", decoding: "decoding", writing: "writing the video",
};
let waiting = new Map();

function say(text) { find("#said").textContent = text; }

function phase(video, place) {
  if (video.status === "failed") return video.error.message;
  if (video.phase === "step" || video.phase === "preview") return `step ${video.step} of ${video.steps}`;
  if (video.phase === "queued" && place > 0) return `waiting, ${place} before it`;
  return WORDS[video.phase] ?? video.phase;
}

function showJob(video, place) {
  const id = `job-${video.id}`, known = document.getElementById(id);
  const item = known ?? find("#job").content.firstElementChild.cloneNode(true);
  if (!known) {
    item.id = id;
    find(".prompt", item).textContent = video.prompt;
    find("progress", item).setAttribute("aria-label", `Progress of ${video.prompt}`);
    find(".cancel", item).setAttribute("aria-label", `Cancel ${video.prompt}`);
    find(".cancel", item).addEventListener("click", () => cancel(video.id));
  }
  const failed = video.status === "failed";
  item.className = `job card ${video.status}`;
  find("progress", item).hidden = failed;
  find(".cancel", item).textContent = failed ? "Remove" : "Cancel";
  find(".phase", item).textContent = phase(video, place);
  find("progress", item).value = video.progress;
  const image = find("img", item);
  if (video.preview && image.dataset.step !== String(video.preview)) {
    image.dataset.step = video.preview;
    image.src = `/v1/videos/${video.id}/preview?step=${video.preview}`;
    image.hidden = false;
  }
  return item;
}

async function cancel(id) {
  try {
    await ask(`/v1/videos/${id}`, { method: "DELETE" });
    document.getElementById(`job-${id}`)?.remove();
    say("Cancelled");
  } catch (error) {
    showError(error.message);
  }
}

function showQueue(videos) {
  const now = new Map(videos.map((video) => [video.id, video]));
  for (const video of waiting.values()) if (!now.has(video.id)) ended(video);
  for (const video of videos) {
    if (video.status === "failed" && waiting.get(video.id)?.status !== "failed" && waiting.size) say(`Failed: ${video.prompt}`);
  }
  waiting = now;
  find("#queue").replaceChildren(...videos.map(showJob));
  find("#queue-count").textContent = videos.length || "";
  find("#queue-empty").hidden = videos.length > 0;
}

async function ended(video) {
  await showGallery();
  if (runs.some((run) => run.id === video.id)) say(`Finished: ${video.prompt}`);
  estimate();
}

function connect() {
  const stream = new EventSource("/page/queue");
  stream.addEventListener("queue", (event) => { showReady(); showQueue(JSON.parse(event.data)); });
  stream.addEventListener("error", () => {
    showReady();
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  });
}

async function showReady() {
  const pill = find("#ready");
  const answer = await fetch("/readyz").catch(() => null);
  const word = answer ? (await answer.text()).trim() : "no connection";
  pill.textContent = word;
  pill.className = `pill ${word === "ready" ? "good" : answer ? "" : "bad"}`;
  if (word !== "ready") setTimeout(showReady, 1500);
}

// ---------------------------------------------------------------- the gallery

let runs = [];
const picked = new Map();

async function showGallery(more = false) {
  const query = find("#search").value.trim();
  const start = more ? runs.length : 0;
  const answer = await ask(`/page/runs?query=${encodeURIComponent(query)}&start=${start}`).catch(() => null);
  if (!answer || query !== find("#search").value.trim()) return;
  runs = more ? [...runs, ...answer.data] : answer.data;
  find("#gallery").replaceChildren(...runs.map(showRun));
  find("#gallery-count").textContent = answer.total || "";
  find("#gallery-empty").hidden = answer.total > 0;
  find("#gallery-empty").textContent = query ? "No finished video has these words." : "Finished videos will be here.";
  find("#more").hidden = runs.length >= answer.total;
}

function facts(run) {
  const parts = [`${run.width} × ${run.height} × ${run.frames}`, `${run.steps} steps`, `guidance ${run.guidance_scale}`,
    `seed ${run.seed}`, run.preset ?? run.model, `made in ${seconds(run.total_seconds)}`];
  return parts.filter(Boolean).join(" · ");
}

function showRun(run) {
  const known = document.getElementById(run.id);
  if (known) return known;
  const item = find("#run-card").content.firstElementChild.cloneNode(true), video = find("video", item);
  item.id = run.id;
  video.src = `${run.files}/video.mp4`;
  video.poster = `${run.files}/poster.png`;
  video.style.aspectRatio = Math.min(Math.max(run.width / run.height, 0.8), 1.8);  // not taller than a screen
  video.setAttribute("aria-label", run.prompt);
  video.addEventListener("mouseenter", () => video.play().catch(() => {}));
  video.addEventListener("mouseleave", () => video.pause());
  video.addEventListener("click", () => (video.paused ? video.play() : video.pause()));
  video.addEventListener("keydown", (event) => {
    if (event.key === " " || event.key === "Enter") { event.preventDefault(); video.click(); }
  });
  find(".prompt", item).textContent = run.prompt;
  find(".prompt", item).title = run.prompt;
  find(".facts", item).textContent = facts(run);
  find(".use", item).addEventListener("click", () => use(run));
  find(".download", item).href = `${run.files}/video.mp4`;
  find(".download", item).download = `${run.id}.mp4`;
  find(".download", item).setAttribute("aria-label", `Download ${run.prompt}`);
  find(".pick", item).checked = picked.has(run.id);
  find(".pick", item).addEventListener("change", (event) => pick(run, event.target));
  const remove = find(".delete", item);
  remove.hidden = !run.id.startsWith("video_");
  remove.setAttribute("aria-label", `Delete ${run.prompt}`);
  remove.addEventListener("click", () => erase(run, item));
  return item;
}

function use(run) {
  const size = `${run.width}x${run.height}`, model = run.preset ?? run.model;
  fill({ ...run, size, model: [...(form.elements.model?.options ?? [])].some((option) => option.value === model) ? model : null });
  find("#prompt").focus();
  scrollTo({ top: 0, behavior: "smooth" });
}

async function erase(run, item) {
  if (!confirm("Delete this video for good?")) return;
  await ask(`/v1/videos/${run.id}`, { method: "DELETE" }).catch((error) => showError(error.message));
  picked.delete(run.id);
  showPicked();
  item.remove();
  say("Deleted");
  showGallery();
}

// ---------------------------------------------------------------- side by side

function pick(run, box) {
  if (box.checked && picked.size === 4) { box.checked = false; say("Four videos at most"); return; }
  if (box.checked) picked.set(run.id, run); else picked.delete(run.id);
  showPicked();
}

function showPicked() {
  find("#compare-bar").hidden = picked.size === 0;
  find("#compare-count").textContent = picked.size < 2 ? "pick one more to compare" : `${picked.size} videos`;
  find("#compare-open").disabled = picked.size < 2;
}

const videos = () => all("#compare-videos video");
const longest = () => videos().reduce((most, video) => (video.duration > (most?.duration || 0) ? video : most), videos()[0]);

function openCompare() {
  find("#compare-videos").replaceChildren(...[...picked.values()].map((run) => {
    const figure = document.createElement("figure"), video = document.createElement("video");
    const caption = document.createElement("figcaption");
    Object.assign(video, { src: `${run.files}/video.mp4`, muted: true, playsInline: true, preload: "auto" });
    video.setAttribute("aria-label", run.prompt);
    caption.textContent = `${run.prompt} · ${facts(run)}`;
    figure.append(video, caption);
    return figure;
  }));
  find("#compare").showModal();
  play(true);
  requestAnimationFrame(keepInStep);
}

function play(on) {
  for (const video of videos()) if (on) video.play().catch(() => {}); else video.pause();
  find("#play").textContent = on ? "❚❚" : "▶";
  find("#play").setAttribute("aria-label", on ? "Pause" : "Play");
}

// The longest video is the clock; the others follow it, and wait at their end until it begins again.
function keepInStep() {
  if (!find("#compare").open) return;
  const clock = longest();
  if (clock?.ended) {
    for (const video of videos()) video.currentTime = 0;
    play(true);
  } else if (clock?.duration) {
    for (const video of videos()) {
      const wanted = Math.min(clock.currentTime, video.duration || 0);
      if (video !== clock && Math.abs(video.currentTime - wanted) > 0.08 && !video.seeking) video.currentTime = wanted;
    }
    find("#time").value = clock.currentTime / clock.duration;
    find("#clock").textContent = `${clock.currentTime.toFixed(1)} s`;
  }
  requestAnimationFrame(keepInStep);
}

find("#compare-open").addEventListener("click", openCompare);
find("#compare-close").addEventListener("click", () => find("#compare").close());
find("#compare").addEventListener("close", () => find("#compare-videos").replaceChildren());
find("#compare-clear").addEventListener("click", () => {
  picked.clear();
  for (const box of all(".pick")) box.checked = false;
  showPicked();
});
find("#play").addEventListener("click", () => play(videos().every((video) => video.paused)));
find("#time").addEventListener("input", (event) => {
  play(false);
  const place = event.target.value * longest().duration;
  for (const video of videos()) video.currentTime = Math.min(place, video.duration);
});

// ---------------------------------------------------------------- the start

find("#search").addEventListener("input", delay(200, () => showGallery()));
find("#more").addEventListener("click", () => showGallery(true));
fill(JSON.parse(localStorage.getItem("form") ?? "{}"));
connect();
showGallery();
