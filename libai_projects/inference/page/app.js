"use strict";

const form = document.getElementById("form");
const prompt = document.getElementById("prompt");
const write = document.getElementById("write");
const stop = document.getElementById("stop");
const status = document.getElementById("status");
const error = document.getElementById("error");
const retry = document.getElementById("retry");
const results = document.getElementById("results");
const past = document.getElementById("past");
const keyLabel = document.getElementById("key");
const key = keyLabel.querySelector("input");
const settings = [...form.querySelectorAll(".settings input")];

let running = null;

const REASONS = {
  time: "The time for one request is over; this is what there was.",
  cancelled: "Stopped.",
};

// What to do about a refusal, by its status, where the server's own sentence leaves it open.
const ADVICE = {
  413: "Use fewer words.",
  503: "Try again in a moment; if that does not help, ask whoever runs the server.",
};
const LOST = "The server cannot be reached. See that it still runs and that you are connected.";
const BROKEN = "The server stopped in the middle of an answer.";

// So many requests are kept, with their prompts, settings and texts.
const MOST_KEPT = 30;

/** Why there is no answer, and whether a new try makes sense. */
const failure = (message, mayPass) => Object.assign(new Error(message), { mayPass });

async function refusal(response) {
  const code = response.status;
  if (code === 401) {
    keyLabel.hidden = false;
    key.focus();
    return failure(key.value === ""
      ? "This server asks for a key: enter the one it was started with (MAGICPROMPT_API_KEY)."
      : "The server does not take this key: check it and enter it again.");
  }
  const said = await response.json().then((body) => body.error, () => null);
  const message = said ?? `the server answered with status ${code}`;
  const again = code >= 500 || code === 408 || code === 429;
  return failure(
    code in ADVICE ? `${message.replace(/\.$/, "")}. ${ADVICE[code]}` : message,
    again,
  );
}

/** What the server answers; throws a failure, a TypeError without a server, or an AbortError. */
async function ask(path, { headers, ...options } = {}) {
  const allowed = key.value === "" ? {} : { Authorization: `Bearer ${key.value}` };
  const response = await fetch(path, { ...options, headers: { ...headers, ...allowed } });
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Says what went wrong, and offers `again` where that makes sense. */
function fail(problem, again) {
  const known = problem instanceof TypeError ? failure(LOST, true) : problem;
  error.textContent = known.message;
  retry.hidden = !known.mayPass;
  retry.onclick = again;
}

function forgive() {
  error.textContent = "";
  hide(retry, prompt);
}

/** The keyboard goes on at `next` where it was in what is hidden. */
function hide(element, next) {
  if (element.contains(document.activeElement)) next.focus();
  element.hidden = true;
}

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Reads what the browser keeps, after putting `value` there; null where it keeps nothing. */
function kept(storage, name, value) {
  try {
    if (value !== undefined) window[storage].setItem(name, JSON.stringify(value));
    return JSON.parse(window[storage].getItem(name));
  } catch {
    return null;
  }
}

const pastEntries = (value) => kept("localStorage", "serve.history", value) ?? [];

function showPast(entries) {
  const items = entries.map((entry) => {
    const when = make("small", { textContent: new Date(entry.when).toLocaleString() });
    const button = make("button", { type: "button", className: "entry" }, entry.body.prompt, when);
    button.addEventListener("click", () => bringBack(entry));
    return make("li", {}, button);
  });
  past.querySelector("ol").replaceChildren(...items);
  past.hidden = items.length === 0;
}

function bringBack({ body, texts }) {
  prompt.value = body.prompt;
  for (const input of settings) input.value = body[input.name] ?? "";
  // The list is the running request's while there is one.
  if (running === null) {
    results.replaceChildren();
    texts.forEach((text) => addResult(body.prompt, text));
    endResults();
    status.textContent = "From the history.";
  }
  prompt.focus();
}

async function fillSettings() {
  const { defaults, limits, model } = await (await ask("/api/health")).json();
  document.getElementById("model").textContent = `Model: ${model}`;
  const most = { num_return_sequences: limits.returns, max_new_tokens: limits.new_tokens };
  for (const input of settings) {
    if (input.name in most) input.max = most[input.name];
    if (input.name in defaults && input.value === "") {
      input.value = Math.min(defaults[input.name], most[input.name] ?? Infinity);
    }
  }
}

function request() {
  const body = { prompt: prompt.value.trim(), stream: true };
  for (const input of settings) {
    if (input.value !== "") body[input.name] = Number(input.value);
  }
  return body;
}

function addResult(given, added = "") {
  const paragraph = make("p", {},
    make("span", { className: "given", textContent: given }),
    make("span", { className: "added", textContent: added }));
  const copy = make("button", {
    type: "button", className: "copy", textContent: "Copy", disabled: true,
  });
  copy.setAttribute("aria-label", `Copy ${results.dataset.text} ${results.children.length + 1}`);
  copy.addEventListener("click", () => copyText(copy, paragraph.textContent));
  const item = make("li", {}, paragraph, copy);
  item.setAttribute("aria-busy", "true");
  results.append(item);
}

async function copyText(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are not served over https or from this machine have no clipboard.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) {
      status.textContent = "The browser did not allow copying; select the text instead.";
      return;
    }
    button.focus();
  }
  button.textContent = "Copied";
  status.textContent = "Copied to the clipboard.";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function endResults() {
  for (const item of results.children) {
    item.removeAttribute("aria-busy");
    item.querySelector(".copy").disabled = false;
  }
}

function show(event, given) {
  if (event.type === "start") {
    results.replaceChildren();
    for (let i = 0; i < event.count; i += 1) addResult(given);
  } else if (event.type === "text") {
    results.children[event.index].querySelector(".added").textContent += event.text;
  } else if (event.type === "done") {
    event.results.forEach((result, i) => {
      const spans = results.children[i].querySelectorAll("span");
      // What the server says last counts.
      spans[1].textContent = result.generated_text.startsWith(given)
        ? result.generated_text.slice(given.length)
        : spans[1].textContent;
    });
    const count = event.results.length;
    const reason = event.results.map((result) => REASONS[result.finish_reason]).find(Boolean);
    status.textContent = reason
      ?? `${count} ${results.dataset.text}${count === 1 ? "" : "s"} in ${event.seconds.toFixed(1)} s.`;
  } else {
    throw failure(event.error, event.kind !== "refused");
  }
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
  if (rest !== "") throw failure(BROKEN, true);
}

async function generate() {
  const body = request();
  running = new AbortController();
  write.disabled = true;
  stop.hidden = false;
  forgive();
  status.textContent = "Writing …";
  let last = null;
  try {
    const response = await ask("/api/generate", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    hide(keyLabel, prompt);
    for await (const line of lines(response.body)) {
      const event = JSON.parse(line);
      last = event.type;
      show(event, body.prompt);
    }
    if (last !== "done") throw failure(BROKEN, true);
  } catch (problem) {
    const stopped = problem.name === "AbortError";
    status.textContent = stopped ? "Stopped." : "";
    if (!stopped) fail(problem, () => form.requestSubmit());
  } finally {
    running = null;
    write.disabled = false;
    hide(stop, write);
    endResults();
    const texts = [...results.querySelectorAll(".added")].map((added) => added.textContent);
    if (last !== null && texts.some(Boolean)) {
      const entry = { body, texts, when: Date.now() };
      showPast(pastEntries([entry, ...pastEntries()].slice(0, MOST_KEPT)));
    }
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null && prompt.value.trim() !== "") generate();
});

prompt.addEventListener("keydown", (event) => {
  // Not while an input method is composing a character.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

stop.addEventListener("click", () => running?.abort());

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) running?.abort();
});

key.addEventListener("change", () => {
  if (!key.checkValidity()) return;
  kept("sessionStorage", "serve.key", key.value);
  start();
});

document.getElementById("clear").addEventListener("click", () => {
  hide(past, prompt);
  showPast(pastEntries([]));
});

function start() {
  forgive();
  fillSettings().catch((problem) => fail(problem, start));
}

key.value = kept("sessionStorage", "serve.key") ?? "";
showPast(pastEntries());
start();
