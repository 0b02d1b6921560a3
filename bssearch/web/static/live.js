"use strict";
// Keeps a page up to date: asks the server for changes, and replaces the changed parts.
(function () {
  const page = () => document.getElementById("main");
  const announced = document.getElementById("announced");
  const lost = document.getElementById("lost");
  let seen = new Date();
  let timer = 0;

  function say(message) {
    lost.textContent = message;
    lost.hidden = message === "";
  }

  // Opened details and form entries stay in the new parts.
  function keepState(old, fresh) {
    const unfold = (details) => {
      const next = fresh.id === details.id ? fresh : fresh.querySelector(`details[id="${CSS.escape(details.id)}"]`);
      if (details.id && next) next.open = details.open;
    };
    for (const details of [old, ...old.querySelectorAll("details")]) if (details.tagName === "DETAILS") unfold(details);
    for (const field of old.querySelectorAll("input[id], select[id]")) {
      const next = fresh.querySelector(`[id="${CSS.escape(field.id)}"]`);
      if (next) [next.value, next.checked] = [field.value, field.checked];
    }
  }

  function replace(old, fresh) {
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const at = focused ? [...old.querySelectorAll("*")].indexOf(focused) : -1;
    const scrolled = [...old.querySelectorAll(".table, pre")].map((one) => one.scrollLeft);
    keepState(old, fresh);
    old.replaceWith(fresh);
    [...fresh.querySelectorAll(".table, pre")].forEach((one, index) => (one.scrollLeft = scrolled[index] || 0));
    if (focused) {
      const next = (focused.id && document.getElementById(focused.id)) || fresh.querySelectorAll("*")[at];
      if (next && next.focus) next.focus({ preventScroll: true });
    }
  }

  // The page has other parts now: parts that stay keep the reader's details, entries and focus.
  function replaceAll(main, parts) {
    const focused = main.contains(document.activeElement) ? document.activeElement : null;
    const part = focused && focused.closest("main > [id]");
    const at = part ? [...part.querySelectorAll("*")].indexOf(focused) : -1;
    for (const fresh of parts) {
      const old = fresh.id && document.getElementById(fresh.id);
      if (old) keepState(old, fresh);
    }
    main.replaceChildren(...parts);
    const next = part && document.getElementById(part.id)?.querySelectorAll("*")[at];
    if (next && next.focus) next.focus({ preventScroll: true });
  }

  function take(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    const [was, is] = [page(), fresh.getElementById("main")];
    if (!is) return;
    const [before, after] = [[...was.children], [...is.children]];
    const named = (parts) => parts.map((part) => `${part.tagName}#${part.id}`).join();
    if (named(before) !== named(after)) replaceAll(was, after);
    else before.forEach((part, index) => part.outerHTML === after[index].outerHTML || replace(part, after[index]));
    const news = is.dataset.announce;
    if (news && news !== was.dataset.announce) announced.textContent = news;
    for (const name of ["announce", "liveSeconds", "version"]) {
      if (is.dataset[name] === undefined) delete was.dataset[name];
      else was.dataset[name] = is.dataset[name];
    }
    document.title = fresh.title;
  }

  async function look() {
    try {
      const version = page().dataset.version;
      const headers = version ? { "If-None-Match": `"${version}"` } : {};
      const answer = await fetch(location.href, { headers, cache: "no-store", signal: AbortSignal.timeout(20000) });
      if (answer.status === 304) {
        seen = new Date();
        say("");
      } else if (answer.ok) {
        take(await answer.text());
        seen = new Date();
        say("");
      } else {
        const shown = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("h1");
        say(`Last update ${seen.toLocaleTimeString()}. ${shown ? shown.textContent : answer.status}`);
      }
    } catch {
      say(`The server does not answer; last update ${seen.toLocaleTimeString()}.`);
    }
    wait();
  }

  function wait() {
    clearTimeout(timer);
    const seconds = Number(page().dataset.liveSeconds);
    if (seconds && !document.hidden) timer = setTimeout(look, 1000 * seconds);
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
  wait();
})();
