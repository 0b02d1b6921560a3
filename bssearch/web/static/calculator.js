"use strict";

const PAUSE_MS = 150;
const form = document.getElementById("calculator");
const results = document.getElementById("results");
const announcement = document.getElementById("announcement");
const failure = document.getElementById("failure");
let timer = 0;
let running = null;

function query() {
  return new URLSearchParams(new FormData(form)).toString();
}

/** Request the results of the form's entries; show only the answer to the latest request. */
async function calculate() {
  clearTimeout(timer);
  running?.abort();
  const asked = new AbortController();
  running = asked;
  const words = query();
  results.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(`${location.pathname}?${words}&part=results`, { signal: asked.signal });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const fragment = await answer.text();
    if (running !== asked) return;
    show(fragment);
    history.replaceState(null, "", `${location.pathname}?${words}`);
    failure.textContent = "";
  } catch (error) {
    if (running !== asked || error.name === "AbortError") return;
    failure.textContent = `Not calculated: ${error.message}. The results below are from earlier entries.`;
  }
  results.removeAttribute("aria-busy");
}

/** Replace the results; opened details stay open, and the focused element keeps the focus. */
function show(fragment) {
  const open = [...results.querySelectorAll("details[open]")].map((one) => one.id);
  const focused = results.contains(document.activeElement) ? place(document.activeElement) : null;
  results.innerHTML = fragment;
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  if (focused) find(focused)?.focus({ preventScroll: true });
  showErrors();
  offerCopies();
  announcement.textContent = results.querySelector(".results").dataset.summary;
}

const FOCUSABLE = "summary, button, a, [tabindex]";

/** Position of an element in its section, to find the element again in new results. */
function place(element) {
  const section = element.closest("section");
  return section && { id: section.id, at: [...section.querySelectorAll(FOCUSABLE)].indexOf(element) };
}

function find({ id, at }) {
  return document.getElementById(id)?.querySelectorAll(FOCUSABLE)[at];
}

/** Show each error beside its field, as the server does for a whole page. */
function showErrors() {
  const messages = new Map();
  for (const one of results.querySelectorAll("#errors [data-field]")) {
    if (!messages.has(one.dataset.field)) messages.set(one.dataset.field, one.querySelector(".message").textContent);
  }
  for (const input of form.querySelectorAll("input, select")) {
    const message = messages.get(input.name) ?? "";
    document.getElementById(`error-${input.name}`).textContent = message;
    if (message) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
    if (message) input.closest("details")?.setAttribute("open", "");
  }
}

function offerCopies() {
  for (const button of results.querySelectorAll("button.copy")) button.hidden = false;
}

async function copy(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    announcement.textContent = button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    announcement.textContent = button.textContent = "Selected; press Ctrl+C to copy";
  }
}

form.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(calculate, PAUSE_MS);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  calculate();
});
results.addEventListener("click", (event) => {
  if (event.target.matches("button.copy")) copy(event.target);
  const field = event.target.closest("#errors a")?.getAttribute("href");
  if (field) {
    event.preventDefault();
    document.querySelector(field).closest("details")?.setAttribute("open", "");
    document.querySelector(field).focus();
  }
});
offerCopies();
