// The page has no state of its own that matters: videos live on the server, and a reload finds them all.
"use strict";

const find = (selector, place = document) => place.querySelector(selector);
const all = (selector, place = document) => [...place.querySelectorAll(selector)];
const form = find("#form");
const files = {};  // by field: a list of File
const take = {};  // by field: what is called with a list of File to put them into the form
const AUTO = "auto";  // a size: that of the files
const STORED = `form ${form.dataset.model}`;  // another model has other settings

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
  if (!values.size || values.size === AUTO) delete values.size;
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

let asked = 0, touched = false, refused = false;  // what a refused request said stays until the form changes
const estimate = delay(350, async () => {
  const values = fields(), number = ++asked, place = find("#estimate"), count = Number(find("#count").value);
  values.prompt ||= "a prompt";
  try {
    const plan = await ask("/page/estimate", { method: "POST", body: body(values) });
    if (number !== asked) return;
    if (plan.missing || (plan.problem && !touched)) {
      place.textContent = plan.missing ?? plan.problem;
      return refused || showError();
    }
    if (plan.problem) throw new Error(plan.problem);
    const length = plan.frames === 1 ? "a picture" : `${plan.frames} frames, ${plan.video_seconds.toFixed(1)} s of video`;
    const parts = [`${plan.width} × ${plan.height}, ${length}`];
    const which = count > 1 ? ` all ${count}` : "";
    if (plan.source === "measured") parts.push(`about ${seconds(count * plan.seconds)} to make${which} (${seconds(plan.step_seconds)} a step)`);
    if (plan.source === "floor") parts.push(`at least ${seconds(count * plan.seconds)} to make${which}`);
    if (plan.ahead) parts.push(`${plan.ahead} before it`);
    place.replaceChildren(...parts.flatMap((text, index) => {
      const part = document.createElement(text.includes("to make") ? "b" : "span");
      part.textContent = text;
      return index ? [" · ", part] : [part];
    }));
    if (!refused) showError();
  } catch (error) {
    if (number !== asked) return;
    place.textContent = "";
    if (!refused) showError(error.message);
  }
});

// What differs from how the server has it: nothing else is remembered, so that its owner may change it.
function changed() {
  const usual = (name) => name === "size" ? find("input[name=size]").value
    : form.elements[name].options ? form.elements[name].options[0].value : form.elements[name].defaultValue;
  const same = (name, value) => value === usual(name)
    || (form.elements[name].type === "number" && Number(value) === Number(usual(name)));  // 3 is 3.0
  return Object.fromEntries(Object.entries(fields()).filter(([name, value]) => !same(name, value)));
}

function remember() {
  refused = false;
  try { localStorage.setItem(STORED, JSON.stringify(changed())); } catch { /* full, or not allowed */ }
  find("#examples").hidden = find("#prompt").value !== "";
  showCall();
  estimate();
}

function remembered() {
  try {
    const values = JSON.parse(localStorage.getItem(STORED));
    return Object.fromEntries(Object.entries(values ?? {}).filter(([, value]) => typeof value === "string"));
  } catch {
    return {};
  }
}

function fill(values) {
  for (const [name, value] of Object.entries(values)) {
    const field = form.elements[name];
    if (value === null || value === undefined || name === "size" || !field?.type) continue;
    field.value = value;
    if (field.options && field.selectedIndex < 0) field.selectedIndex = 0;
    const { rangeUnderflow, rangeOverflow, valueMissing } = field.validity;
    if (field.type === "number" && (rangeUnderflow || rangeOverflow || valueMissing)) field.value = field.defaultValue;
    if (field.closest("details") && name in changed()) field.closest("details").open = true;
  }
  if (/^([0-9]+x[0-9]+|auto)$/.test(values.size)) {
    const radio = find(`input[name=size][value="${CSS.escape(values.size)}"]`) ?? find("input[name=size][value='']");
    radio.checked = true;
    find("#other-size").value = radio.value ? "" : values.size;
  }
  showOther();
  remember();
}

function showOther() {
  find("#other-size").hidden = find("input[name=size]:checked").value !== "";
}

// Another model, adapter or recipe has other numbers: those that the server would take.
async function follow() {
  const chosen = Object.fromEntries(all("select[name]", form).map((field) => [field.name, field.value]).filter(([, value]) => value));
  const plan = await ask("/page/estimate", { method: "POST", body: body({ prompt: "a prompt", ...chosen }) }).catch(() => ({}));
  if (plan.values) fill(plan.values);
}

form.addEventListener("input", () => { touched = true; showOther(); remember(); });
form.addEventListener("change", (event) => { if (event.target.matches("select[name]")) follow(); });
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = find("#run"), values = fields();
  button.disabled = touched = true;
  try {
    for (let number = 0; number < Number(find("#count").value); number++) {
      const seed = (Number(values.seed) + number) % 2 ** 32;
      // A key of its own for every video: a repeated request, after a lost answer, makes no second one.
      const headers = { "Idempotency-Key": `${Date.now()}-${Math.random()}` };
      await ask("/page/videos", { method: "POST", body: body({ ...values, seed }), headers });
    }
    refused = false;
    showError();
    say("Added to the queue");
    if (innerWidth < 900) find("#queue-title").scrollIntoView({ behavior: "smooth" });
  } catch (error) {
    refused = true;
    showError(error.message);
  } finally {
    button.disabled = false;
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.contains(event.target)) form.requestSubmit();
});
find("#dice").addEventListener("click", () => fill({ seed: Math.floor(Math.random() * 2 ** 32) }));
find("#count").addEventListener("change", estimate);
find("#start-over").addEventListener("click", () => {
  form.reset();
  for (const put of Object.values(take)) put([]);
  touched = false;
  showError();
  fill({});
  find("#prompt").focus();
});
for (const move of all(".move")) {
  move.addEventListener("click", () => {
    const moves = form.elements.camera.value.split(",").map((one) => one.trim()).filter(Boolean);
    fill({ camera: [...moves, move.textContent].join(", ") });
  });
}
for (const example of all("#examples .example")) {
  example.addEventListener("click", () => { fill({ prompt: example.textContent }); find("#prompt").focus(); });
}

for (const shape of all(".shape")) {
  const [width, height] = shape.dataset.size.split("x").map(Number), scale = 15 / Math.max(width, height);
  shape.style.width = `${width * scale}px`;
  shape.style.height = `${height * scale}px`;
}

// ---------------------------------------------------------------- the API call of what the form says

let language = "curl";

function showCall() {
  const said = Object.entries({ prompt: fields().prompt ?? "a prompt", ...changed() }), pictures = Object.entries(files);
  const url = `${location.origin}/v1/videos/sync`, withKey = "withKey" in form.dataset;
  const file = form.dataset.makes === "picture" ? "picture.png" : "video.mp4";
  const shell = (text) => `'${String(text).replaceAll("'", "'\\''")}'`;
  const plain = (text) => text !== "" && !isNaN(text) ? text : JSON.stringify(text);
  const call = {
    curl: () => [
      `curl ${url} -o ${file}`, ...(withKey ? ['-H "Authorization: Bearer $KEY"'] : []),
      ...said.map(([name, value]) => `--form-string ${shell(`${name}=${value}`)}`),
      ...pictures.flatMap(([name, list]) => list.map((file) => `-F ${shell(`${name}=@${file.name}`)}`)),
    ].join(" \\\n  "),
    python: () => [
      `import ${pictures.length ? "base64, " : ""}json, ${withKey ? "os, " : ""}urllib.request`, "",
      ...(pictures.length ? ["def link(path):", '    return "data:image/png;base64," + base64.b64encode(open(path, "rb").read()).decode()', ""] : []),
      "fields = {", ...said.map(([name, value]) => `    ${JSON.stringify(name)}: ${plain(value)},`),
      ...pictures.map(([name, list]) => `    ${JSON.stringify(name)}: [${list.map((file) => `link(${JSON.stringify(file.name)})`).join(", ")}],`),
      "}", 'headers = {"Content-Type": "application/json"}',
      ...(withKey ? ['headers["Authorization"] = "Bearer " + os.environ["KEY"]'] : []),
      `request = urllib.request.Request(${JSON.stringify(url)}, json.dumps(fields).encode(), headers)`,
      `open("${file}", "wb").write(urllib.request.urlopen(request).read())`,
    ].join("\n"),
  };
  find("#call").textContent = call[language]();
}

for (const part of all("details", form)) {
  part.addEventListener("toggle", () => { if (part.open && touched) part.scrollIntoView({ block: "nearest" }); });
}
for (const tab of all("[role=tab]")) {
  tab.addEventListener("click", () => {
    language = tab.id.replace("tab-", "");
    for (const other of all("[role=tab]")) other.setAttribute("aria-selected", other === tab);
    find("#call").setAttribute("aria-labelledby", tab.id);
    showCall();
  });
}
find("#copy").addEventListener("click", async () => {
  getSelection().selectAllChildren(find("#call"));  // where a page may not write to the clipboard, Ctrl+C does
  await navigator.clipboard?.writeText(find("#call").textContent).then(() => say("Copied")).catch(() => {});
});

// ---------------------------------------------------------------- files

const MOST_BYTES = 0.97e6 * form.dataset.uploadMb;  // of files; the rest of a request is for texts

// How many bytes a field's files may have, beside those of the others.
function room(key) {
  const others = Object.entries(files).filter(([name]) => name !== key).flatMap(([, list]) => list);
  return others.reduce((left, file) => left - file.size, MOST_BYTES);
}

function showRoom(said) {
  const used = ((MOST_BYTES - room()) / 1e6).toFixed(1), most = `up to ${Number(form.dataset.uploadMb)} MB in all`;
  find("#room").textContent = said ? `${most}: ${said}` : used > 0 ? `${most}, ${used} so far` : most;
}

for (const drop of all(".drop")) {
  const input = find("input", drop), image = find("img", drop), words = find(".words", drop), remove = find(".remove", drop);
  const names = find(".names", drop), key = drop.dataset.key, clip = find(".clip", drop);
  const put = take[key] = (list) => {
    const chosen = [...list].slice(0, input.multiple ? 16 : 1), picture = chosen.find((file) => file.type.startsWith("image/"));
    input.value = "";
    if (chosen.reduce((size, file) => size + file.size, 0) > room(key)) {
      return showRoom(`${chosen.map((file) => file.name).join(", ")} would be too much, and was left out`);
    }
    if (image.src) URL.revokeObjectURL(image.src);
    if (chosen.length) files[key] = chosen; else delete files[key];
    image.hidden = !picture;
    remove.hidden = !chosen.length;
    if (picture) image.src = URL.createObjectURL(picture);
    if (clip) showClip(clip, picture ? null : chosen[0]);
    names.textContent = chosen.map((file) => file.name).join(", ");
    names.hidden = !chosen.length;
    words.hidden = chosen.length > 0;
    showRoom();
    remember();
  };
  input.addEventListener("change", () => { if (input.files.length) put(input.files); });
  remove.addEventListener("click", () => put([]));
  drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files.length) put(event.dataTransfer.files);
  });
}

// Shows a file, a camera's stream, or nothing.
function showClip(clip, source) {
  if (clip.src) URL.revokeObjectURL(clip.src);
  clip.removeAttribute("src");
  clip.srcObject = source instanceof MediaStream ? source : null;
  if (source instanceof File) clip.src = URL.createObjectURL(source);
  clip.hidden = !source;
  if (clip.srcObject) clip.play().catch(() => {});
}

// ---------------------------------------------------------------- recording

// A recording is a file like any other. Browsers lend devices only to pages from this machine, or with TLS.
for (const button of navigator.mediaDevices && window.MediaRecorder ? all(".record") : []) {
  const drop = button.closest(".drop"), key = drop.dataset.key, { device } = button.dataset, text = button.textContent;
  const wanted = { audio: true, video: device === "camera" && (key !== "face" || { aspectRatio: 1 }) };
  let recorder = null;
  button.hidden = false;
  button.addEventListener("click", async () => {
    if (recorder) return recorder.stop();
    button.disabled = true;
    const stream = await navigator.mediaDevices.getUserMedia(wanted).catch((error) => {
      showError(`The ${device} cannot be used: ${error.message}`);
    });
    button.disabled = false;
    if (stream) recorder = record(stream);
  });

  function record(stream) {
    const made = new MediaRecorder(stream), parts = [], most = room(key);
    let size = 0, full = false;
    if (device === "camera") showClip(find(".clip", drop), stream);
    made.addEventListener("start", () => { button.textContent = "Stop"; button.classList.add("on"); showError(); });
    made.addEventListener("dataavailable", ({ data }) => {
      button.textContent = `Stop, ${parts.push(data)} s`;
      size += data.size;
      showRoom(`${(size / 1e6).toFixed(1)} MB recorded`);
      full ||= size + 2 * data.size > most;  // no room for another second
      if (full && made.state === "recording") made.stop();
    });
    made.addEventListener("stop", () => {
      for (const track of stream.getTracks()) track.stop();
      recorder = null;
      button.textContent = text;
      button.classList.remove("on");
      const [type] = made.mimeType.split(";"), suffix = type.endsWith("mp4") ? "mp4" : type.endsWith("ogg") ? "ogg" : "webm";
      const recording = new File(parts, `recording.${suffix}`, { type });
      take[key]([recording]);
      if (full && files[key]?.[0] === recording) showRoom("the recording ended there");
    });
    made.start(1000);
    return made;
  }
}

// ---------------------------------------------------------------- the queue

const WORDS = {
  queued: "waiting", loading: "loading weights", compiling: "compiling", encoding: "reading the prompt",
  denoising: "denoising", generating: "generating", decoding: "decoding", writing: `writing the ${form.dataset.makes}`,
};
let waiting = new Map();

function say(text) { find("#said").textContent = text; }

function phase(video, place) {
  if (video.status === "failed") return video.error.message;
  const left = video.seconds_left === null ? "" : ` · about ${seconds(video.seconds_left)} left`;
  if (video.phase === "step" || video.phase === "preview") return `step ${video.step} of ${video.steps}${left}`;
  if (video.phase === "queued" && place > 0) return `waiting, ${place} before it${left}`;
  return `${WORDS[video.phase] ?? video.phase}${left}`;
}

function showJob(video, place) {
  const id = `job-${video.id}`, known = document.getElementById(id);
  const item = known ?? find("#job").content.firstElementChild.cloneNode(true);
  if (!known) {
    item.id = id;
    if (!video.step) item.began = performance.now();  // seen from its beginning
    find(".prompt", item).textContent = video.prompt;
    find("progress", item).setAttribute("aria-label", `Progress of ${video.prompt}`);
    find(".cancel", item).setAttribute("aria-label", `Cancel ${video.prompt}`);
    find(".cancel", item).addEventListener("click", () => cancel(video.id));
    find(".next", item).addEventListener("submit", (event) => { event.preventDefault(); changePrompt(video.id, item); });
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
  const plays = video.stream && video.status === "in_progress";
  find(".next", item).hidden = !plays;
  if (plays && !item.dataset.watched) watch(video, item);
  return item;
}

async function changePrompt(id, item) {
  const input = find(".next input", item), prompt = input.value.trim();
  if (!prompt) return;
  try {
    const body = JSON.stringify({ prompt });
    await ask(`/v1/videos/${id}/prompt`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
    find(".prompt", item).textContent = prompt;
    input.value = "";
    say("Applies from the next chunk on");
  } catch (error) {
    showError(error.message);
  }
}

// H.264 in fragments, as the server appends them; players go by the profile, not by the level.
const FRAGMENTS = 'video/mp4; codecs="avc1.640028"';

const AGAIN = 1000;  // milliseconds until a stream that ended too early is asked for again

// Plays a video while it is made. Where the connection is lost, or a worker begins the file anew, all of it is read
// again: what the player has already is replaced by the same.
async function watch(video, item) {
  if (!window.MediaSource?.isTypeSupported(FRAGMENTS)) return;
  item.dataset.watched = "true";
  const player = find("video", item), source = new MediaSource();
  const next = (target, name) => new Promise((resolve) => target.addEventListener(name, resolve, { once: true }));
  player.src = URL.createObjectURL(source);
  player.setAttribute("aria-label", `${video.prompt}, while it is made`);
  try {
    await next(source, "sourceopen");
    const buffer = source.addSourceBuffer(FRAGMENTS);
    for (;;) {
      await read(buffer).catch((error) => { if (!(error instanceof TypeError)) throw error; });  // the connection's
      if (source.readyState !== "open" || !item.isConnected || !(await isMade(video))) break;
      buffer.abort();  // what is left of a fragment
      await new Promise((resolve) => setTimeout(resolve, AGAIN));
    }
    if (source.readyState === "open") source.endOfStream();
  } catch (error) {
    player.hidden = true;
  } finally {
    URL.revokeObjectURL(player.src);
  }

  async function read(buffer) {
    const answer = await fetch(video.stream);
    if (!answer.ok) return;
    const reader = answer.body.getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const added = next(buffer, "updateend");
      buffer.appendBuffer(part.value);
      await added;
      const { buffered } = buffer;
      if (!buffered.length) continue;
      showPace(item, buffered.end(buffered.length - 1), video.fps);
      player.hidden = false;
      player.play().catch(() => {});
    }
  }
}

// Whether a video is still to be finished; as far as is known, without a connection.
async function isMade(video) {
  const answer = await fetch(`/v1/videos/${video.id}`).catch(() => null);
  return answer?.ok ? Boolean((await answer.json()).stream) : answer === null || answer.status >= 500;
}

// Of a video that plays while it is made: when its first frames came, and how many a second since then. What was made
// before the page was opened comes all at once, and tells nothing.
function showPace(item, there, fps) {
  if (item.began === undefined || !fps) return;  // a request of an earlier version says no rate
  const now = performance.now(), first = item.first ??= { now, there }, place = find(".pace", item);
  const pace = there > first.there ? `, ${(1000 * fps * (there - first.there) / (now - first.now)).toFixed(1)} frames a second` : "";
  place.textContent = `first frames after ${seconds((first.now - item.began) / 1000)}${pace}; it plays at ${fps}`;
  place.hidden = false;
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
  const items = videos.map(showJob), queue = find("#queue");
  // Moving what plays or is typed into would stop it.
  if (items.length !== queue.children.length || items.some((item, place) => item !== queue.children[place])) {
    queue.replaceChildren(...items);
  }
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
  const { makes } = form.dataset;
  find("#gallery-empty").textContent = query ? `No finished ${makes} has these words.` : `Finished ${makes}s will be here.`;
  find("#more").hidden = runs.length >= answer.total;
}

function facts(run) {
  const parts = [`${run.width} × ${run.height}${isPicture(run) ? "" : ` × ${run.frames}`}`, `${run.steps} ${run.steps === 1 ? "step" : "steps"}`, `guidance ${run.guidance_scale}`,
    `seed ${run.seed}`, run.preset ?? run.model, `made in ${seconds(run.total_seconds)}`];
  return parts.filter(Boolean).join(" · ");
}

// A run of one frame has made a picture, which a video element shows as its poster.
const isPicture = (run) => run.file.endsWith(".png");

function show(video, run) {
  video.poster = `${run.files}/${isPicture(run) ? run.file : "poster.png"}`;
  if (isPicture(run)) video.removeAttribute("src"); else video.src = `${run.files}/${run.file}`;
}

function showRun(run) {
  const known = document.getElementById(run.id);
  if (known) return known;
  const item = find("#run-card").content.firstElementChild.cloneNode(true), video = find("video", item);
  item.id = run.id;
  show(video, run);
  video.style.aspectRatio = Math.min(Math.max(run.width / run.height, 0.8), 1.8);  // not taller than a screen
  video.setAttribute("aria-label", `Show large: ${run.prompt}`);
  video.addEventListener("mouseenter", () => video.play().catch(() => {}));
  video.addEventListener("mouseleave", () => video.pause());
  video.addEventListener("click", () => openLarge(run));
  video.addEventListener("keydown", (event) => {
    if (event.key === " " || event.key === "Enter") { event.preventDefault(); video.click(); }
  });
  find(".prompt", item).textContent = run.prompt;
  find(".prompt", item).title = run.prompt;
  find(".facts", item).textContent = facts(run);
  find(".use", item).addEventListener("click", () => use(run));
  find(".download", item).href = `${run.files}/${run.file}`;
  find(".download", item).download = `${run.id}${run.file.slice(run.file.lastIndexOf("."))}`;
  find(".download", item).setAttribute("aria-label", `Download ${run.prompt}`);
  find(".pick", item).checked = picked.has(run.id);
  find(".pick", item).addEventListener("change", (event) => pick(run, event.target));
  const remove = find(".delete", item);
  remove.hidden = !run.id.startsWith("video_");
  remove.setAttribute("aria-label", `Delete ${run.prompt}`);
  remove.addEventListener("click", () => erase(run, item));
  return item;
}

async function use(run) {
  const size = `${run.width}x${run.height}`, model = run.preset ?? run.model;
  const chosen = Object.fromEntries(all("select[name]", form).map((field) => [field.name, run.choices[field.name] ?? ""]));
  const adapters = all("input[name^='adapter.']", form).map((field) => [field.name, run.adapters[field.name] ?? ""]);
  const known = [...(form.elements.model?.options ?? [])].some((option) => option.value === model);
  fill({ ...run, ...chosen, ...Object.fromEntries(adapters), size, model: known ? model : null });
  find("#prompt").focus();
  scrollTo({ top: 0, behavior: "smooth" });
  for (const [key, put] of Object.entries(take)) {
    const found = (run.inputs[key] ?? []).map((name) => download(`${run.files}/${name}`, name));
    put(await Promise.all(found).catch((error) => { showError(error.message); return []; }));
  }
}

async function download(path, name) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${name} is not there any more`);
  return new File([await answer.blob()], name, { type: answer.headers.get("content-type") });
}

// The last frame becomes the picture that the next video starts from.
async function goOn(run) {
  const file = isPicture(run) ? run.file : "last_frame.png";
  const name = isPicture(run) ? `${run.id}.png` : `last frame of ${run.id}.png`;
  const picture = await download(`${run.files}/${file}`, name);
  await use({ ...run, inputs: {} });
  take.image([picture]);
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

// ---------------------------------------------------------------- one, large

let large = null;

function openLarge(run) {
  const dialog = find("#large"), video = find("video", dialog);
  large = run;
  show(video, run);
  video.controls = !isPicture(run);
  video.setAttribute("aria-label", run.prompt);
  find(".prompt", dialog).textContent = run.prompt;
  find(".facts", dialog).textContent = facts(run);
  const place = runs.findIndex((one) => one.id === run.id);
  find("#previous").disabled = place <= 0;
  find("#next").disabled = place < 0 || place + 1 >= runs.length;
  if (!dialog.open) dialog.showModal();
  video.play().catch(() => {});
}

function turn(step) {
  const place = runs.findIndex((one) => one.id === large.id) + step;
  if (runs[place]) openLarge(runs[place]);
}

find("#large").addEventListener("keydown", (event) => {
  const video = find("#large video");
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") turn(event.key === "ArrowLeft" ? -1 : 1);
  else if (event.key === " " && !event.target.matches("button")) { if (video.paused) video.play(); else video.pause(); }
  else return;
  event.preventDefault();
  event.stopPropagation();
}, true);
find("#large").addEventListener("close", () => find("#large video").removeAttribute("src"));
find("#large").addEventListener("click", (event) => { if (event.target === find("#large")) find("#large").close(); });
find("#large-close").addEventListener("click", () => find("#large").close());
find("#previous").addEventListener("click", () => turn(-1));
find("#next").addEventListener("click", () => turn(1));
find("#large .use").addEventListener("click", () => { find("#large").close(); use(large); });
find("#large .go-on")?.addEventListener("click", () => {
  find("#large").close();
  goOn(large).catch(() => showError("Its last frame cannot be read."));
});

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
    show(video, run);
    Object.assign(video, { muted: true, playsInline: true, preload: "auto" });
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
fill(remembered());
connect();
showGallery();
