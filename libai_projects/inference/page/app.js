"use strict";

const form = document.getElementById("form");
const prompt = document.getElementById("prompt");
const write = document.getElementById("write");
const stop = document.getElementById("stop");
const status = document.getElementById("status");
const error = document.getElementById("error");
const results = document.getElementById("results");
const settings = [...form.querySelectorAll(".settings input")];

let running = null;

const REASONS = {
  time: "The time for one request is over; this is what there was.",
  cancelled: "Stopped.",
};

async function fillSettings() {
  const response = await fetch("/api/health");
  const { defaults, limits } = await response.json();
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

function addResult(text) {
  const item = document.createElement("li");
  item.setAttribute("aria-busy", "true");
  const paragraph = document.createElement("p");
  const given = document.createElement("span");
  given.className = "given";
  given.textContent = text;
  const added = document.createElement("span");
  added.className = "added";
  paragraph.append(given, added);
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", `Copy ${results.dataset.text} ${results.children.length + 1}`);
  copy.disabled = true;
  copy.addEventListener("click", () => copyText(copy, paragraph.textContent));
  item.append(paragraph, copy);
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
    throw new Error(event.error);
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
  if (rest !== "") throw new Error("The server stopped in the middle of an answer.");
}

async function generate() {
  const body = request();
  running = new AbortController();
  write.disabled = true;
  stop.hidden = false;
  error.textContent = "";
  status.textContent = "Writing …";
  let ended = false;
  try {
    const response = await fetch("/api/generate", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error);
    for await (const line of lines(response.body)) {
      const event = JSON.parse(line);
      show(event, body.prompt);
      ended = event.type === "done";
    }
    if (!ended) throw new Error("The server stopped in the middle of an answer.");
  } catch (problem) {
    const stopped = problem.name === "AbortError";
    status.textContent = stopped ? "Stopped." : "";
    if (!stopped) {
      error.textContent = problem instanceof TypeError
        ? "The server cannot be reached; is it still running?"
        : problem.message;
    }
  } finally {
    endResults();
    running = null;
    write.disabled = false;
    stop.hidden = true;
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

stop.addEventListener("click", () => {
  running?.abort();
  write.focus();
});

fillSettings().catch(() => {
  error.textContent = "The server cannot be reached; is it still running?";
});
