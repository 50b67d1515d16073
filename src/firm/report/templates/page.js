"use strict";
(() => {
  const gallery = document.querySelector(".gallery");
  const entries = Array.from(gallery.children);
  const count = document.getElementById("count");
  const score = (entry) => Number(entry.dataset.score);
  const rank = (entry) => Number(entry.dataset.rank);
  const byName = (a, b) => a.dataset.name.localeCompare(b.dataset.name, undefined, { numeric: true });
  const orders = {
    worst: (a, b) => rank(a) - rank(b) || score(b) - score(a),
    high: (a, b) => score(b) - score(a),
    low: (a, b) => score(a) - score(b),
    name: byName,
    verdict: (a, b) => rank(a) - rank(b) || byName(a, b),
  };
  const tell = () => {
    const seen = entries.filter((entry) => !entry.hidden).length;
    count.textContent = `${seen} of ${entries.length} shown`;
  };
  const filters = Array.from(document.querySelectorAll("[data-show]"));
  const filter = () => {
    const wanted = filters.filter((box) => box.checked).map((box) => box.dataset.show);
    entries.forEach((entry) => { entry.hidden = !wanted.some((kind) => entry.classList.contains(kind)); });
    tell();
  };
  const order = document.getElementById("order");
  const sort = () => gallery.append(...entries.slice().sort(orders[order.value]));
  const heat = document.getElementById("heat");
  const boxes = Array.from(gallery.querySelectorAll(".look input"));
  const warm = () => boxes.forEach((box) => { box.checked = heat.checked; });
  filters.forEach((box) => box.addEventListener("change", filter));
  order.addEventListener("change", sort);
  heat.addEventListener("change", warm);
  document.querySelector(".tools").hidden = false;
  filter(); // a browser may have kept the boxes as they were before a reload
  sort();
  if (heat.checked) warm();
})();
