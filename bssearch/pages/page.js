"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const NARROW = 600;
  const MOST_TICKS = 6;
  const settings = { displayModeBar: false, responsive: true };

  // The point of the sequence at a per cent of its way, between the two stops around it.
  function alongSequence(style, percent) {
    const stops = style.getPropertyValue("--sequence").trim().split(/\s+/);
    const place = (percent / 100) * (stops.length - 1);
    const before = Math.min(Math.floor(place), stops.length - 2);
    const parts = [1, 3, 5].map((at) => {
      const [low, high] = [stops[before], stops[before + 1]].map((stop) => parseInt(stop.slice(at, at + 2), 16));
      return Math.round(low + (high - low) * (place - before));
    });
    return `rgb(${parts.join(",")})`;
  }

  function colour(style, name) {
    const step = /^seq-(\d+)$/.exec(name);
    return step ? alongSequence(style, Number(step[1])) : style.getPropertyValue(`--${name}`).trim();
  }

  // A copy of a figure's part with the names of colours replaced, only where a colour belongs.
  function painted(style, value, isColour) {
    if (typeof value === "string") {
      const name = isColour && /^var\(--([a-z]+(?:-\d+)?)\)$/.exec(value);
      return name ? colour(style, name[1]) : value;
    }
    if (Array.isArray(value)) return value.map((item) => painted(style, item, isColour));
    if (value === null || typeof value !== "object") return value;
    const copy = {};
    for (const [key, item] of Object.entries(value)) copy[key] = painted(style, item, /color(scale)?$/.test(key));
    return copy;
  }

  // On a phone the legend stands in rows of its own, and every other batch size is named.
  function fit(place, data, layout) {
    const narrow = root.clientWidth < NARROW;
    const entries = layout.showlegend ? data.filter((trace) => trace.showlegend !== false).length : 0;
    place.style.height = narrow ? `${300 + 20 * entries}px` : "";
    const ticks = layout.xaxis.tickvals;
    if (narrow && ticks && ticks.length > MOST_TICKS) {
      const every = Math.ceil(ticks.length / MOST_TICKS);
      for (const key of ["tickvals", "ticktext"]) layout.xaxis[key] = layout.xaxis[key].filter((_, at) => at % every === 0);
    }
    if (narrow) Object.assign(layout.font, { size: 12 });
  }

  function draw() {
    const style = getComputedStyle(root);
    for (const [name, figure] of Object.entries(figures)) {
      const place = document.getElementById(`figure-${name}`);
      const [data, layout] = [painted(style, figure.data), painted(style, figure.layout)];
      fit(place, data, layout);
      Plotly.react(place, data, layout, settings);
    }
  }

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia(`(max-width: ${NARROW}px)`).addEventListener("change", draw);
  addEventListener("beforeprint", () => {
    root.setAttribute("data-printing", "");
    draw();
  });
  addEventListener("afterprint", () => {
    root.removeAttribute("data-printing");
    draw();
  });
})();
